"""Limits on what a request may send."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 8 << 20


class BodyLimit:
    """ASGI middleware: a body of more than ``MAX_BODY_BYTES`` is a 413, and is never held whole.

    The error is raised where the body is read, inside the application, so that it gets the shape of
    all its errors.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        too_long = announced.isdigit() and (len(announced) > 18 or int(announced) > MAX_BODY_BYTES)
        received = 0

        async def limited() -> Message:
            nonlocal received
            if too_long:
                raise _too_long()
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _too_long()
            return message

        await self._app(scope, limited, send)


def _too_long() -> HTTPException:
    return HTTPException(413, f"the body is too long, expected at most {MAX_BODY_BYTES} bytes")
