"""From a running session to OpenAI-shaped JSON, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from flashd.errors import FlashdError, RequestError
from flashd.runtime.session import Session


def error_body(exc: FlashdError) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI error object of an error."""
    if isinstance(exc, RequestError):
        kind = "invalid_request_error" if exc.status < 500 else "server_error"
        if exc.status == 429:
            kind = "rate_limit_error"
        return exc.status, _error(str(exc), kind, exc.param, exc.code)
    return 500, _error(str(exc), "server_error", None, type(exc).__name__)


def _error(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class Answer:
    """How one request wants its answer shaped.

    Attributes:
        session: the sequence that is being generated.
        model: id shown to the client.
        chat: chat or plain completion.
        return_tokens: whether ``choices[].tokens`` is filled.
        include_usage: whether a stream ends with a usage chunk.
    """

    session: Session
    model: str
    chat: bool
    return_tokens: bool
    include_usage: bool

    async def whole(self) -> dict[str, Any]:
        """The complete answer.

        Raises:
            FlashdError: the answer could not be finished.
        """
        text: list[str] = []
        tokens: list[int] = []
        async for piece in self.session.pieces():
            text.append(piece.text)
            tokens.extend(piece.tokens)
        body = self._frame("chat.completion" if self.chat else "text_completion")
        content = "".join(text)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self.session.finish_reason,
            "logprobs": None,
        }
        if self.chat:
            choice["message"] = {"role": "assistant", "content": content}
        else:
            choice["text"] = content
        if self.return_tokens:
            choice["tokens"] = tokens
        return {**body, "choices": [choice], "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events. However it ends, the session ends with it."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        frame = self._frame(kind)
        try:
            if self.chat:
                yield self._event(frame, {"role": "assistant", "content": ""}, (), None)
            async for piece in self.session.pieces():
                if piece.text or self.return_tokens:
                    delta = {"content": piece.text} if self.chat else {"text": piece.text}
                    yield self._event(frame, delta, piece.tokens, None)
            last: dict[str, str] = {} if self.chat else {"text": ""}
            yield self._event(frame, last, (), self.session.finish_reason)
            if self.include_usage:
                yield _sse({**frame, "choices": [], "usage": self._usage()})
        except FlashdError as exc:
            yield _sse(error_body(exc)[1])
        finally:
            self.session.cancel()
        yield "data: [DONE]\n\n"

    def _event(
        self, frame: dict[str, Any], delta: dict[str, str], tokens: tuple[int, ...], reason: str | None
    ) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"delta": delta} if self.chat else delta
        if self.return_tokens:
            choice["tokens"] = list(tokens)
        return _sse({**frame, "choices": [choice]})

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _usage(self) -> dict[str, int]:
        prompt, generated = len(self.session.prompt), len(self.session.generated)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }


def _sse(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
