"""The synchronous client."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
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


class Client:
    """Talks to one daemon. Use it as a context manager, or call ``close()``; threads may share it.

    Args:
        socket: the daemon's Unix socket; None is ``default_socket_path()``.
        base_url: ``http://HOST:PORT`` of a daemon that serves TCP, instead of a socket.
        timeout_s: longest silence of the daemon within a request, None for ever. A model larger
            than RAM may need minutes until its first token; a whole answer that isn't streamed
            is one silence.
        connect_timeout_s: longest time to connect.
        retries: how often a request is sent again when the daemon's queue is full (429), after
            the time that the daemon asks for. Nothing else is ever repeated.

    Every method raises ``DaemonNotRunning``, ``RequestTimeout``, ``ConnectionLost``,
    ``InvalidResponse`` or an ``APIError``; streams also ``StreamError`` and ``StreamInterrupted``.
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
        self._http = httpx.Client(
            base_url=self._target.base_url,
            transport=None if uds is None else httpx.HTTPTransport(uds=str(uds), verify=False, limits=LIMITS),
            limits=LIMITS,
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s),
            trust_env=False,  # a proxy must not see local prompts
        )

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """Continue a text or a list of token ids."""
        body = wire.completion_body(prompt, options, stream=False)
        return wire.parse_completion(self._call("POST", wire.COMPLETIONS, body).content)

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Answer a chat; a plain string is one user message."""
        body = wire.chat_body(messages, options, stream=False)
        return wire.parse_completion(self._call("POST", wire.CHAT, body).content)

    def stream_complete(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> Generator[Chunk, None, None]:
        """As ``complete``, piece by piece.

        The request is sent when the first chunk is asked for. Closing the iterator (or dropping
        it) closes the HTTP stream, which stops the generation.
        """
        return self._chunks(wire.COMPLETIONS, wire.completion_body(prompt, options, stream=True))

    def stream_chat(
        self, messages: str | Sequence[Message], **options: Unpack[Options]
    ) -> Generator[Chunk, None, None]:
        """As ``chat``, piece by piece; see ``stream_complete``."""
        return self._chunks(wire.CHAT, wire.chat_body(messages, options, stream=True))

    def models(self) -> list[ModelInfo]:
        """What the daemon serves."""
        return wire.parse_models(self._call("GET", wire.MODELS).content)

    def health(self) -> Health:
        """Whether the daemon takes requests; a daemon that still loads is no error here."""
        response = self._send("GET", wire.HEALTH)
        if response.status_code not in (200, 503):
            raise wire.error_from(response.status_code, response.headers, response.content)
        return wire.parse_health(response.status_code, response.content)

    def metrics(self) -> str:
        """The daemon's metrics in Prometheus text format."""
        return self._call("GET", wire.METRICS).text

    def close(self) -> None:
        """Close all connections; streams that still run end."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _chunks(self, path: str, body: dict[str, Any]) -> Generator[Chunk, None, None]:
        response = self._call("POST", path, body, stream=True)
        try:
            reader = wire.StreamReader(response.headers.get("content-type", ""))
            try:
                for data in response.iter_bytes():
                    yield from reader.feed(data)
            except httpx.HTTPError as exc:
                reader.finish(self._target.translate(exc))
            reader.finish()
        finally:
            response.close()

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, stream: bool = False
    ) -> httpx.Response:
        """Send until the daemon answers with success; a stream's body is left to the caller."""
        attempt = 0
        while True:
            response = self._send(method, path, body, stream=stream)
            if response.status_code == 200:
                return response
            error = wire.error_from(response.status_code, response.headers, response.content)
            wait_s = wire.retry_wait_s(error, attempt, self._retries)
            if wait_s is None:
                raise error
            time.sleep(wait_s)
            attempt += 1

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, stream: bool = False
    ) -> httpx.Response:
        """Send once; the body of everything but a stream that begins well is read and closed."""
        try:
            request = self._http.build_request(method, path, json=body)
            response = self._http.send(request, stream=True)
            if not stream or response.status_code != 200:
                try:
                    response.read()
                finally:
                    response.close()
            return response
        except httpx.HTTPError as exc:
            raise self._target.translate(exc) from exc
