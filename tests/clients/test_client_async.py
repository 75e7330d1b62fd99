"""The asyncio client against exact bytes on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from pathlib import Path

import flashd_client
import pytest
from clients.raw_server import (
    DONE,
    STREAM_HEAD,
    WAIT_FOR_CLIENT_CLOSE,
    RawServer,
    answer,
    delta,
    error,
    event,
    piece,
    usage,
)
from flashd_client import AsyncClient, Client, Health, ModelInfo, Usage


async def test_every_method(server: RawServer) -> None:
    counts = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    choice = {"index": 0, "text": "t", "finish_reason": "stop"}
    turn = {"index": 0, "message": {"role": "assistant", "content": "m"}, "finish_reason": "stop"}
    server.reply(answer({"id": "1", "model": "tiny", "choices": [choice], "usage": counts}))
    server.reply(answer({"id": "2", "model": "tiny", "choices": [turn], "usage": counts}))
    server.reply(STREAM_HEAD, piece("a"), piece("b", "length"), usage(1, 2), DONE)
    server.reply(STREAM_HEAD, delta(None), delta("c"), delta("", "stop"), DONE)
    server.reply(answer({"status": "loading"}, 503))
    server.reply(answer({"object": "list", "data": [{"id": "tiny"}]}))
    server.reply(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nm\n")
    async with AsyncClient(server.path, timeout_s=10) as client:
        assert (await client.complete("x", max_tokens=1)).text == "t"
        assert (await client.chat("x")).usage == Usage(1, 2, 3)
        assert [c.text async for c in client.stream_complete([1])] == ["a", "b", ""]
        assert [c.text async for c in client.stream_chat("x")] == ["", "c", ""]
        assert await client.health() == Health(False, "loading")
        assert await client.models() == [ModelInfo("tiny", "", 0)]
        assert await client.metrics() == "m\n"
    assert [request.path for request in server.requests] == [
        "/v1/completions", "/v1/chat/completions", "/v1/completions", "/v1/chat/completions",
        "/health", "/v1/models", "/metrics",
    ]  # fmt: skip


async def test_closing_and_cancelling_close_the_stream(server: RawServer) -> None:
    async with AsyncClient(server.path, timeout_s=10) as client:
        server.reply(STREAM_HEAD, piece("a"), WAIT_FOR_CLIENT_CLOSE)
        async with contextlib.aclosing(client.stream_complete("x")) as stream:
            assert (await anext(stream)).text == "a"
        assert await asyncio.to_thread(server.client_closed.wait, 5)

        server.client_closed.clear()
        server.reply(STREAM_HEAD, piece("a"), WAIT_FOR_CLIENT_CLOSE)

        async def read_all() -> None:
            async for _chunk in client.stream_complete("x"):
                pass

        task = asyncio.create_task(read_all())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.client_closed.wait, 5)


async def test_errors(server: RawServer, tmp_path: Path) -> None:
    server.reply(STREAM_HEAD, piece("a"))
    server.reply(STREAM_HEAD, event({"error": {"message": "no", "type": "server_error"}}))
    server.reply(error(400, "bad", "invalid_value"))
    server.reply(WAIT_FOR_CLIENT_CLOSE)
    async with AsyncClient(server.path, timeout_s=0.5) as client:
        with pytest.raises(flashd_client.StreamInterrupted):
            [c async for c in client.stream_complete("x")]
        with pytest.raises(flashd_client.StreamError, match="no"):
            [c async for c in client.stream_complete("x")]
        with pytest.raises(flashd_client.BadRequest, match="bad"):
            await client.complete("x")
        with pytest.raises(flashd_client.RequestTimeout):
            await client.complete("x")
    async with AsyncClient(tmp_path / "none.sock") as client:
        with pytest.raises(flashd_client.DaemonNotRunning, match="flashd start"):
            await client.health()
    assert len(server.requests) == 4


async def test_full_queue_is_tried_again(server: RawServer) -> None:
    server.reply(error(429, "queue full", retry_after="0.2"))
    server.reply(STREAM_HEAD, piece("a", "stop"), DONE)
    async with AsyncClient(server.path, timeout_s=10) as client:
        start = time.monotonic()
        assert [c.text async for c in client.stream_complete("x")] == ["a"]
    assert time.monotonic() - start >= 0.2


async def test_two_streams_at_once(server: RawServer) -> None:
    for name in ("a", "b"):
        server.reply(STREAM_HEAD, piece(name), 0.3, piece(name, "stop"), DONE)

    async def text(client: AsyncClient) -> str:
        return "".join([c.text async for c in client.stream_complete("x")])

    async with AsyncClient(server.path, timeout_s=10) as client:
        start = time.monotonic()
        texts = await asyncio.gather(text(client), text(client))
    assert sorted(texts) == ["aa", "bb"]
    assert time.monotonic() - start < 0.55


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> dict[str, list[str]]:
        return {
            name.removeprefix("a") if name == "aclose" else name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert public(Client) == public(AsyncClient)
