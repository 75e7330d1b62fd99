"""The engine: admits requests, prefills prompts in chunks, decodes running sequences together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

from flashd.errors import FlashdError, InternalError, RequestError
from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.models.decoder import Decoder, ForwardCancelled, Span
from flashd.runtime.accounting import PREFILL_CHUNK_TOKENS
from flashd.runtime.costs import CostClock
from flashd.runtime.memory import ADMISSION_PATIENCE_S, MemoryKeeper
from flashd.runtime.sampling import SamplingParams
from flashd.runtime.session import Session
from flashd.runtime.tokenizer import TextStream, Tokenizer
from flashd.stats import EngineStats

log = logging.getLogger("flashd.engine")

# Sequences that wait for memory are looked at so often.
_MEMORY_POLL_S = 0.1


class Engine:
    """Continuous batching over one decoder.

    Args:
        decoder: the model.
        tokenizer: for texts; ``None`` serves token ids only.
        eos_ids: tokens that end a sequence.
        lane: the compute lane (for sampling).
        clock: where a step's time went.
        max_sessions: sequences that run together.
        max_queue: requests that may wait behind them.
        kv_dtype: ``f16`` or ``f32``.
        memory: keeps the process within its memory; None: nobody does.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None,
        eos_ids: Sequence[int],
        lane: ComputeLane,
        clock: CostClock,
        *,
        max_sessions: int,
        max_queue: int,
        kv_dtype: str,
        memory: MemoryKeeper | None = None,
    ) -> None:
        self.stats = EngineStats()
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._lane = lane
        self._clock = clock
        self._max_sessions = max_sessions
        self._max_queue = max_queue
        self._kv_dtype = kv_dtype
        self._memory = memory
        if memory is not None:
            memory.on_change = self.wake
        self._waiting: deque[Session] = deque()
        self._running: list[Session] = []
        self._work = asyncio.Event()
        self.idle = asyncio.Event()  # set while nothing runs or waits
        self.idle.set()
        self._closing = False
        self._moved_s = perf_counter()  # when the last step ended
        # Awaited while nothing is computed, with the phase of the step that begins: for who measures.
        self.before_step: Callable[[str], Awaitable[None]] | None = None

    def submit(self, prompt: list[int], params: SamplingParams) -> Session:
        """Queue a request.

        Raises:
            RequestError: an empty, too long or impossible prompt, or a full queue.
        """
        spec = self._decoder.spec
        if not prompt:
            raise RequestError("the prompt is empty; expected at least one token", param="prompt")
        if max(prompt) >= spec.vocab_size or min(prompt) < 0:
            raise RequestError(
                f"a prompt token is outside the vocabulary of {spec.vocab_size}", param="prompt"
            )
        if len(prompt) > spec.max_context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the model's context is {spec.max_context}",
                code="context_length_exceeded",
                param="prompt",
            )
        if self._closing:
            raise RequestError("the daemon is shutting down", code="shutting_down", status=503)
        if len(self._waiting) >= self._max_queue + self._max_sessions - len(self._running):
            raise RequestError(
                f"{len(self._running)} requests are running and {len(self._waiting)} are waiting, no "
                "more are taken; try again later",
                code="queue_full",
                status=429,
            )
        # The last token of a sequence is never fed back: it needs no place in the context.
        limit = spec.max_context - len(prompt) + 1
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if self._memory is not None:
            if params.max_tokens is None:
                limit = max(1, min(limit, self._memory.open_tokens(spec.max_context) - len(prompt) + 1))
            self._memory.check(len(prompt) + limit - 1)
        text = None if self._tokenizer is None else TextStream(self._tokenizer, params.stop)
        session = Session(prompt, params, limit, text)
        log.debug("request %d: %d prompt tokens, up to %d more", session.id, len(prompt), session.limit)
        self._waiting.append(session)
        self.idle.clear()
        self._work.set()
        return session

    async def run(self) -> None:
        """Serve until cancelled; errors end requests, never this loop."""
        while True:
            self._admit()
            if self._memory is not None:
                await self._memory.settle()
            if not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                await self.step()
            except Exception as exc:
                log.exception("a step failed")
                self._fail(self._running, InternalError(f"internal error: {exc!r}; see the daemon's log"))
                self._retire()

    async def step(self) -> None:
        """One chunk of the oldest unfinished prompt, then one token for every other sequence."""
        prefilling = next((s for s in self._running if not s.prefilled), None)
        decoding = [s for s in self._running if s.prefilled]
        if prefilling is not None:
            await self._forward([prefilling], "prefill")
        decoding = [s for s in decoding if self._goes_on(s)]
        if decoding:
            await self._forward(decoding, "decode")
        self._retire()
        if prefilling is None and not decoding and self._running:
            await self._for_memory()

    def close(self, error: FlashdError) -> None:
        """Refuse new requests and end all others with ``error``."""
        self._closing = True
        for session in (*self._waiting, *self._running):
            if session.finish_reason is None:
                session.fail(error)
                session.cancel()

    def wake(self) -> None:
        """Look what is to be done, even if nobody has asked for anything."""
        self._work.set()

    def refuse_new(self) -> None:
        """Drain: running and waiting requests go on, new ones are refused."""
        self._closing = True

    def _admit(self) -> None:
        for session in [s for s in self._waiting if s.cancelled]:
            self._waiting.remove(session)
            self._finish(session)
        while self._waiting and len(self._running) < self._max_sessions:
            if not self._has_room(self._waiting[0]):
                break
            session = self._waiting.popleft()
            capacity = len(session.prompt) + session.limit - 1
            try:
                session.kv = ContiguousKV(self._decoder.spec, capacity, self._kv_dtype)
            except MemoryError as exc:
                session.fail(
                    RequestError(f"{exc}; ask for fewer max_tokens", code="out_of_memory", status=503)
                )
                self._finish(session)
                continue
            session.timing.admitted_s = perf_counter()
            self.stats.queue_time_s.observe(session.timing.admitted_s - session.timing.submitted_s)
            self._running.append(session)
            self._gauges()
        self._gauges()

    def _goes_on(self, session: Session) -> bool:
        """Whether there is memory for a sequence's next token; where there is none, it waits for others."""
        memory = self._memory
        if memory is None or session.wanted_tokens <= session.granted_tokens or session.cancelled:
            return True
        # Where there is less memory than when it was promised, the oldest that waits goes on all the same.
        oldest = next(one for one in self._running if one.wanted_tokens > one.granted_tokens)
        if memory.grants(self._running, session) or (
            session is oldest and memory.fits(self._running, session)
        ):
            session.granted_tokens = session.wanted_tokens
            self._gauges()
            return True
        if session is oldest and self._patience_is_over(session):
            session.fail(memory.no_room(memory.kv_bytes(session.wanted_tokens)))
        return False

    def _patience_is_over(self, session: Session) -> bool:
        """Whether for too long nothing has gone on, for want of memory."""
        since_s = max(self._moved_s, session.timing.submitted_s)
        return perf_counter() - since_s > ADMISSION_PATIENCE_S

    async def _for_memory(self) -> None:
        """Nothing can go on before there is more memory, or somebody leaves."""
        self._work.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MEMORY_POLL_S):
                await self._work.wait()

    def _has_room(self, session: Session) -> bool:
        """Whether there is memory for one more; who has waited too long for it is sent away."""
        memory = self._memory
        if memory is None or memory.grants(self._running, session):
            session.granted_tokens = session.wanted_tokens
            return True
        if not self._running and self._patience_is_over(session):
            self._waiting.remove(session)
            session.fail(memory.no_room(memory.kv_bytes(session.promised_tokens)))
            self._finish(session)
        return False

    async def _forward(self, sessions: list[Session], phase: str) -> None:
        """Run one forward pass and hand out the tokens it gives."""
        spans = []
        for session in sessions:
            assert session.kv is not None
            spans.append(Span(session.next_tokens(PREFILL_CHUNK_TOKENS), session.kv))
        if self.before_step is not None:
            await self.before_step(phase)
        start = self._clock.read()
        try:
            logits = await self._decoder.forward(spans, lambda: all(s.cancelled for s in sessions))
            ready = [s for s in sessions if s.kv is not None and s.kv.length >= len(s.prompt)]
            tokens = await self._lane.run(
                lambda: [s.sampler.next(row) for s, row in zip(sessions, logits, strict=True) if s in ready]
            )
        except ForwardCancelled:
            return
        except FlashdError as exc:
            log.error("requests %s failed: %s", [s.id for s in sessions], exc)
            self._fail(sessions, exc)
            return
        except Exception as exc:
            log.exception("requests %s failed", [s.id for s in sessions])
            self._fail(sessions, InternalError(f"internal error: {exc!r}; see the daemon's log"))
            return
        self._moved_s = perf_counter()
        self._clock.observe(self.stats.costs[phase], start)
        if self._memory is not None:
            self._memory.step_s = perf_counter() - start.wall / 1e9
        if phase == "prefill":
            self.stats.prompt_tokens += len(spans[0].tokens)
        for session, token in zip(ready, tokens, strict=True):
            self._deliver(session, token)

    def _fail(self, sessions: list[Session], error: FlashdError) -> None:
        for session in sessions:
            if session.finish_reason is None:
                session.fail(error)

    def _deliver(self, session: Session, token: int) -> None:
        if session.finish_reason is not None:  # closed while its step was running
            return
        now, timing = perf_counter(), session.timing
        if session.generated:
            self.stats.inter_token_latency_s.observe(now - timing.last_token_s)
        else:
            timing.first_token_s = now
            self.stats.time_to_first_token_s.observe(now - timing.submitted_s)
        timing.last_token_s = now
        self.stats.generated_tokens += 1
        try:
            session.accept(token, self._eos)
        except FlashdError as exc:  # the tokenizer can't turn it into text
            session.fail(exc)

    def _retire(self) -> None:
        for session in [s for s in self._running if s.finish_reason is not None or s.cancelled]:
            self._running.remove(session)
            self._finish(session)
        self._gauges()

    def _finish(self, session: Session) -> None:
        session.kv = None
        session.timing.finished_s = perf_counter()
        reason = session.finish_reason or "cancelled"
        log.debug("request %d: %s after %d tokens", session.id, reason, len(session.generated))
        self.stats.finished[reason] += 1
        self.stats.e2e_latency_s.observe(session.timing.finished_s - session.timing.submitted_s)

    def _gauges(self) -> None:
        if not self._running and not self._waiting:
            self.idle.set()
        self.stats.running = len(self._running)
        self.stats.waiting = len(self._waiting)
        self.stats.kv_bytes = sum(s.kv.nbytes for s in self._running if s.kv is not None)
        if self._memory is not None:
            held = any(s.wanted_tokens > s.granted_tokens for s in self._running)
            paused = held or (bool(self._waiting) and len(self._running) < self._max_sessions)
            self._memory.count(self._running, paused=paused)
