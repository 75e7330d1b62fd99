"""The client for asyncio; ``client.py`` with awaits, method for method."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from flashd_client import _wire as wire
from flashd_client._target import (
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    LIMITS,
    Target,
)
from flashd_client.types import Chunk, Completion, Health, Message, ModelInfo, Options


class AsyncClient:
    """Talks to one daemon. Use it with ``async with``, or call ``aclose()``.

    Arguments, results and errors are those of ``Client``.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        base_url: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        retries: int = DEFAULT_RETRIES,
    ) -> None:
        self._target = Target.resolve(socket, base_url)
        self._retries = retries
        # verify=False: no TLS on a Unix socket, so nothing to load certificates for (50 ms).
        uds = self._target.socket
        self._http = httpx.AsyncClient(
            base_url=self._target.base_url,
            transport=None
            if uds is None
            else httpx.AsyncHTTPTransport(uds=str(uds), verify=False, limits=LIMITS),
            limits=LIMITS,
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s),
            trust_env=False,  # a proxy must not see local prompts
        )

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """Continue a text or a list of token ids."""
        body = wire.completion_body(prompt, options, stream=False)
        return wire.parse_completion((await self._call("POST", wire.COMPLETIONS, body)).content)

    async def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Answer a chat; a plain string is one user message."""
        body = wire.chat_body(messages, options, stream=False)
        return wire.parse_completion((await self._call("POST", wire.CHAT, body)).content)

    def stream_complete(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """As ``complete``, piece by piece.

        The request is sent when the first chunk is asked for. Closing the iterator closes the
        HTTP stream, which stops the generation; to leave early, use ``contextlib.aclosing``.
        """
        return self._chunks(wire.COMPLETIONS, wire.completion_body(prompt, options, stream=True))

    def stream_chat(
        self, messages: str | Sequence[Message], **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """As ``chat``, piece by piece; see ``stream_complete``."""
        return self._chunks(wire.CHAT, wire.chat_body(messages, options, stream=True))

    async def models(self) -> list[ModelInfo]:
        """What the daemon serves."""
        return wire.parse_models((await self._call("GET", wire.MODELS)).content)

    async def health(self) -> Health:
        """Whether the daemon takes requests; a daemon that still loads is no error here."""
        response = await self._send("GET", wire.HEALTH)
        if response.status_code not in (200, 503):
            raise wire.error_from(response.status_code, response.headers, response.content)
        return wire.parse_health(response.status_code, response.content)

    async def metrics(self) -> str:
        """The daemon's metrics in Prometheus text format."""
        return (await self._call("GET", wire.METRICS)).text

    async def aclose(self) -> None:
        """Close all connections; streams that still run end."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _chunks(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        response = await self._call("POST", path, body, stream=True)
        try:
            reader = wire.StreamReader(response.headers.get("content-type", ""))
            try:
                async for data in response.aiter_bytes():
                    for chunk in reader.feed(data):
                        yield chunk
            except httpx.HTTPError as exc:
                reader.finish(self._target.translate(exc))
            reader.finish()
        finally:
            await response.aclose()

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, stream: bool = False
    ) -> httpx.Response:
        """Send until the daemon answers with success; a stream's body is left to the caller."""
        attempt = 0
        while True:
            response = await self._send(method, path, body, stream=stream)
            if response.status_code == 200:
                return response
            error = wire.error_from(response.status_code, response.headers, response.content)
            wait_s = wire.retry_wait_s(error, attempt, self._retries)
            if wait_s is None:
                raise error
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, stream: bool = False
    ) -> httpx.Response:
        """Send once; the body of everything but a stream that begins well is read and closed."""
        try:
            request = self._http.build_request(method, path, json=body)
            response = await self._http.send(request, stream=True)
            if not stream or response.status_code != 200:
                try:
                    await response.aread()
                finally:
                    await response.aclose()
            return response
        except httpx.HTTPError as exc:
            raise self._target.translate(exc) from exc
