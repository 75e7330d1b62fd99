"""Every error the client raises on purpose; each message fits on one line."""

from __future__ import annotations


class FlashdClientError(Exception):
    """Base of all errors of this package."""


class DaemonNotRunning(FlashdClientError, ConnectionError):
    """Nobody answers on the socket (or the socket may not be used)."""


class RequestTimeout(FlashdClientError, TimeoutError):
    """The daemon was silent for longer than ``timeout_s``."""


class ConnectionLost(FlashdClientError, ConnectionError):
    """The daemon closed the connection before it answered in full. Not retried."""


class StreamInterrupted(ConnectionLost):
    """A stream ended without its ``[DONE]``: the text so far is not the whole answer."""


class InvalidResponse(FlashdClientError):
    """The answer is not what flashd sends: something else listens there, or versions differ."""


class APIError(FlashdClientError):
    """The daemon answered with an error object.

    Attributes:
        status: HTTP status.
        message: the daemon's own words.
        type: OpenAI error type, e.g. ``invalid_request_error``.
        param: request field at fault, if one is.
        code: machine-readable code, e.g. ``context_length_exceeded``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(status, message, type, param, code)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


class BadRequest(APIError):
    """4xx: the request is wrong; sending it again will not help."""


class RateLimited(APIError):
    """429: the daemon's queue is full. ``retry_after_s`` is its advice, if it gave one."""

    retry_after_s: float | None = None


class ServerError(APIError):
    """5xx: the daemon failed, is still loading (503) or is shutting down."""


class StreamError(APIError):
    """An error object in the middle of a stream; chunks before it were delivered."""
