"""One request while it is being answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from flashd.errors import FlashdError
from flashd.kv.contiguous import ContiguousKV
from flashd.memory.account import KV_BLOCK_TOKENS
from flashd.runtime.sampling import Sampler, SamplingParams
from flashd.runtime.tokenizer import TextStream
from flashd.types import I64Array

_ids = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """Something new in an answer: a token and the text it completed (often empty)."""

    text: str
    tokens: tuple[int, ...]


@dataclass
class Timing:
    """Clock readings (``perf_counter`` seconds) of one request."""

    submitted_s: float = field(default_factory=perf_counter)
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0


class Session:
    """A sequence: its prompt, what has been generated, and the queue its reader drains.

    Only the engine calls the methods that change it, except ``cancel``.
    """

    def __init__(
        self, prompt: list[int], params: SamplingParams, limit: int, text: TextStream | None
    ) -> None:
        self.id = next(_ids)
        self.prompt = prompt
        self.params = params
        self.limit = limit  # tokens to generate at most: max_tokens or the context's end
        self.generated: list[int] = []
        self.sampler = Sampler(params)
        self.kv: ContiguousKV | None = None
        self.granted_tokens = 0  # of the KV cache, memory is set aside for
        self.timing = Timing()
        self.finish_reason: str | None = None
        self.cancelled = False
        self._text = text
        self._queue: asyncio.Queue[Piece | FlashdError | None] = asyncio.Queue()

    def cancel(self) -> None:
        """The reader has gone: the engine drops the sequence at the next layer."""
        self.cancelled = True

    @property
    def promised_tokens(self) -> int:
        """Tokens that its KV cache may come to hold; the last one that is generated needs no place."""
        return len(self.prompt) + self.limit - 1

    @property
    def wanted_tokens(self) -> int:
        """Tokens that memory should be set aside for now: all, where somebody has said how many there shall
        be; else whole blocks, as the answer grows."""
        if self.params.max_tokens is not None:
            return self.promised_tokens
        blocks = (len(self.prompt) + len(self.generated)) // KV_BLOCK_TOKENS + 1
        return max(self.granted_tokens, min(self.promised_tokens, blocks * KV_BLOCK_TOKENS))

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in the KV cache and the first token is chosen."""
        return bool(self.generated)

    def next_tokens(self, chunk: int) -> I64Array:
        """What the next forward pass must run: a prompt chunk, or the newest token."""
        if self.prefilled:
            return np.array(self.generated[-1:], np.int64)
        assert self.kv is not None
        return np.array(self.prompt[self.kv.length : self.kv.length + chunk], np.int64)

    def accept(self, token: int, eos: frozenset[int]) -> None:
        """Take the sampled token; sets ``finish_reason`` when it was the last one."""
        self.generated.append(token)
        text = ""
        if token in eos and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif self._text is not None:
            text = self._text.push(token)
            if self._text.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.generated) >= self.limit:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._text is not None:
            text += self._text.flush()
        self._queue.put_nowait(Piece(text, (token,)))
        if self.finish_reason is not None:
            self._queue.put_nowait(None)

    def fail(self, error: FlashdError, reason: str = "error") -> None:
        """End the answer with an error that the reader gets."""
        self.finish_reason = reason
        self._queue.put_nowait(error)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes.

        Raises:
            FlashdError: the answer could not be finished.
        """
        while (item := await self._queue.get()) is not None:
            if isinstance(item, FlashdError):
                raise item
            yield item
