"""Requests and answers of the HTTP API as JSON. Pure: shared by both clients, does no I/O."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from flashd_client._sse import EventDecoder
from flashd_client.errors import (
    APIError,
    BadRequest,
    FlashdClientError,
    InvalidResponse,
    RateLimited,
    RequestTimeout,
    ServerError,
    StreamError,
    StreamInterrupted,
)
from flashd_client.types import Chunk, Completion, Health, Message, ModelInfo, Options, Usage

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HEALTH = "/health"
METRICS = "/metrics"

MAX_RETRY_WAIT_S = 30.0
_FIRST_BACKOFF_S = 0.5

T = TypeVar("T")


def completion_body(prompt: str | Sequence[int], options: Options, *, stream: bool) -> dict[str, Any]:
    """JSON body of ``POST /v1/completions``."""
    return _body({"prompt": prompt if isinstance(prompt, str) else list(prompt)}, options, stream)


def chat_body(messages: str | Sequence[Message], options: Options, *, stream: bool) -> dict[str, Any]:
    """JSON body of ``POST /v1/chat/completions``; a plain string is one user message."""
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return _body({"messages": turns}, options, stream)


def _body(body: dict[str, Any], options: Options, stream: bool) -> dict[str, Any]:
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = ", ".join(sorted(Options.__annotations__))
        raise TypeError(f"unknown option {unknown[0]!r}; known options: {known}")
    body.update(options)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def parse_completion(raw: bytes) -> Completion:
    """A whole answer of either endpoint."""
    return _checked(raw, _completion)


def _completion(body: Any) -> Completion:
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Completion(
        text=_text(text),
        finish_reason=choice.get("finish_reason"),
        usage=_usage(body["usage"]),
        tokens=_tokens(choice),
        model=body.get("model") or "",
        id=body.get("id") or "",
    )


def _chunk(body: Any) -> Chunk:
    # The chunk that carries the usage has no choice.
    choice = body["choices"][0] if len(body["choices"]) else {}
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    return Chunk(
        text=_text(text),
        finish_reason=choice.get("finish_reason"),
        usage=_usage(body["usage"]) if body.get("usage") else None,
        tokens=_tokens(choice),
        model=body.get("model") or "",
        id=body.get("id") or "",
    )


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text of type {type(value).__name__}")
    return value or ""


def _usage(body: Any) -> Usage:
    prompt, completion = int(body["prompt_tokens"]), int(body["completion_tokens"])
    return Usage(prompt, completion, int(body.get("total_tokens", prompt + completion)))


def _tokens(choice: Any) -> tuple[int, ...] | None:
    tokens = choice.get("tokens")
    return None if tokens is None else tuple(int(token) for token in tokens)


def parse_models(raw: bytes) -> list[ModelInfo]:
    """The answer of ``GET /v1/models``."""
    return _checked(
        raw,
        lambda body: [
            ModelInfo(str(item["id"]), str(item.get("owned_by") or ""), int(item.get("created") or 0))
            for item in body["data"]
        ],
    )


def parse_health(status: int, raw: bytes) -> Health:
    """The answer of ``GET /health``: 200, or 503 while the model loads."""
    return _checked(raw, lambda body: Health(status == 200, str(body["status"])))


def _checked(raw: bytes | str, parse: Callable[[Any], T]) -> T:
    """Parse JSON; whatever is missing or of the wrong kind becomes ``InvalidResponse``."""
    try:
        return parse(json.loads(raw))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as exc:
        sample = raw[:80] if isinstance(raw, str) else raw[:80].decode("utf-8", "replace")
        raise InvalidResponse(
            f"not an answer of flashd ({type(exc).__name__}: {exc}): {sample!r}; is something else "
            "listening there, or is the daemon of another version?"
        ) from exc


def error_from(status: int, headers: Mapping[str, str], raw: bytes) -> APIError:
    """The typed error for a status >= 400, whatever its body looks like."""
    fields = _error_fields(raw) or {"message": f"HTTP status {status}"}
    if status == 429:
        limited = RateLimited(status, **fields)
        limited.retry_after_s = _retry_after_s(headers.get("retry-after"))
        return limited
    return (ServerError if status >= 500 else BadRequest)(status, **fields)


def _error_fields(raw: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, str):
        return {"message": error}
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    # OpenAI's own codes are strings; some servers send the status as a number.
    texts = {key: error.get(key) for key in ("type", "param", "code")}
    return {"message": error["message"]} | {k: None if v is None else str(v) for k, v in texts.items()}


def _retry_after_s(value: str | None) -> float | None:
    """Seconds to wait from a Retry-After header: a number, or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def retry_wait_s(error: APIError, attempt: int, retries: int) -> float | None:
    """How long to wait before trying again, or None if the error shall surface.

    Only 429 is retried: nothing was generated yet. A daemon that asks for more patience than
    ``MAX_RETRY_WAIT_S`` gets none.
    """
    if not isinstance(error, RateLimited) or attempt >= retries:
        return None
    advice = error.retry_after_s
    wait_s = _FIRST_BACKOFF_S * 2**attempt if advice is None else advice
    return wait_s if wait_s <= MAX_RETRY_WAIT_S else None


class StreamReader:
    """Bytes of an SSE answer -> chunks, up to ``[DONE]``."""

    def __init__(self, content_type: str) -> None:
        if not content_type.lower().startswith("text/event-stream"):
            raise InvalidResponse(f"expected a text/event-stream, got {content_type or 'no type'!r}")
        self._decoder = EventDecoder()
        self._done = False

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Chunks that ``data`` completes; what follows ``[DONE]`` is ignored.

        Raises:
            StreamError: the daemon reports an error.
            InvalidResponse: an event that is no chunk.
        """
        for event in self._decoder.feed(data):
            if self._done:
                continue
            if event.data == "[DONE]":
                self._done = True
                continue
            fields = _error_fields(event.data.encode())
            if fields is not None:
                raise StreamError(200, **fields)
            yield _checked(event.data, _chunk)

    def finish(self, cause: FlashdClientError | None = None) -> None:
        """The connection ended. Raises, if that was before ``[DONE]``: the request's own error
        for a silent daemon, ``StreamInterrupted`` for anything else."""
        if self._done:
            return
        if isinstance(cause, RequestTimeout):
            raise cause
        raise StreamInterrupted(
            "the daemon's stream ended in the middle of the answer "
            f"({cause or 'closed without [DONE]'}); see the daemon's log"
        ) from cause
