"""The synchronous client against exact bytes on a real socket."""

from __future__ import annotations

import os
import socket
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import flashd_client
import pytest
from clients.raw_server import (
    CHUNKED_HEAD,
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
from flashd_client import Client, Health, ModelInfo, Usage, default_socket_path

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def client_of(server: RawServer, **kwargs: Any) -> Client:
    return Client(server.path, timeout_s=10, **kwargs)


def test_complete(server: RawServer) -> None:
    choice = {"index": 0, "text": " Paris", "finish_reason": "length", "tokens": [7, 8]}
    server.reply(answer({"id": "cmpl-1", "model": "tiny", "choices": [choice], "usage": USAGE}))
    with client_of(server) as client:
        result = client.complete([1, 2], max_tokens=2, temperature=0, stop=["x"], return_tokens=True)
    assert (result.text, result.finish_reason, result.tokens) == (" Paris", "length", (7, 8))
    assert (result.usage, result.model, result.id) == (Usage(3, 2, 5), "tiny", "cmpl-1")
    request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == {
        "prompt": [1, 2], "max_tokens": 2, "temperature": 0, "stop": ["x"], "return_tokens": True,
    }  # fmt: skip


def test_chat_takes_a_string_or_messages(server: RawServer) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    for _ in range(2):
        server.reply(answer({"id": "c", "model": "tiny", "choices": [choice], "usage": USAGE}))
    with client_of(server) as client:
        assert client.chat("Hello").text == "Hi"
        assert client.chat([{"role": "system", "content": "Be brief"}], seed=1).tokens is None
    assert server.requests[0].body == {"messages": [{"role": "user", "content": "Hello"}]}
    assert server.requests[1].body == {"messages": [{"role": "system", "content": "Be brief"}], "seed": 1}


def test_unknown_option_is_refused_before_anything_is_sent(server: RawServer) -> None:
    with client_of(server) as client, pytest.raises(TypeError, match=r"unknown option 'max_token'; known"):
        client.stream_complete("x", max_token=3)  # type: ignore[call-arg]  # the mistake under test
    assert server.requests == []


def test_stream_complete(server: RawServer) -> None:
    server.reply(
        STREAM_HEAD, b": ping\n\n", piece(" a", tokens=[4]), piece("b", "stop", [5, 6]), usage(3, 3), DONE
    )
    with client_of(server) as client:
        chunks = list(client.stream_complete("x"))
    assert [c.text for c in chunks] == [" a", "b", ""]
    assert [c.finish_reason for c in chunks] == [None, "stop", None]
    assert [c.tokens for c in chunks] == [(4,), (5, 6), None]
    assert [c.usage for c in chunks] == [None, None, Usage(3, 3, 6)]
    assert server.requests[0].body == {
        "prompt": "x", "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_stream_chat_skips_nothing_and_survives_any_chunk_boundary(server: RawServer) -> None:
    raw = (delta(None) + delta("grüße ") + delta("🦙") + delta("", "stop") + usage(1, 3) + DONE).replace(
        b"\n", b"\r\n"
    )
    server.reply(STREAM_HEAD, *(step for i in range(len(raw)) for step in (raw[i : i + 1], 0.0001)))
    with client_of(server) as client:
        assert "".join(chunk.text for chunk in client.stream_chat("hi")) == "grüße 🦙"


def test_chunks_arrive_as_they_are_sent(server: RawServer) -> None:
    server.reply(STREAM_HEAD, piece("a"), 0.5, piece("b", "stop"), DONE)
    with client_of(server) as client:
        start = time.monotonic()
        stream = client.stream_complete("x")
        assert next(stream).text == "a"
        assert time.monotonic() - start < 0.4
        assert next(stream).text == "b"
        assert time.monotonic() - start >= 0.5


def test_closing_the_iterator_closes_the_stream(server: RawServer) -> None:
    server.reply(STREAM_HEAD, piece("a"), WAIT_FOR_CLIENT_CLOSE)
    with client_of(server) as client:
        stream = client.stream_complete("x")
        next(stream)
        assert not server.client_closed.is_set()
        stream.close()
        assert server.client_closed.wait(5)


def test_leaving_the_loop_closes_the_stream(server: RawServer) -> None:
    server.reply(STREAM_HEAD, piece("a"), WAIT_FOR_CLIENT_CLOSE)
    with client_of(server) as client:
        for _chunk in client.stream_complete("x"):
            break
        assert server.client_closed.wait(5)


@pytest.mark.parametrize(
    "steps",
    [
        (STREAM_HEAD, piece("a")),
        (STREAM_HEAD, piece("a"), b'data: {"choices": [{"te'),
        (CHUNKED_HEAD, b"%x\r\n%s\r\n" % (len(piece("a")), piece("a"))),
        (STREAM_HEAD, piece("a"), b"data: [DONE]"),
    ],
    ids=["after an event", "within an event", "within chunked coding", "DONE without its blank line"],
)
def test_stream_that_ends_too_early(server: RawServer, steps: tuple[bytes, ...]) -> None:
    server.reply(*steps)
    with client_of(server) as client:
        stream = client.stream_complete("x")
        assert next(stream).text == "a"
        with pytest.raises(flashd_client.StreamInterrupted, match="in the middle of the answer"):
            next(stream)
    assert len(server.requests) == 1  # never sent again: the text so far would be repeated


def test_error_in_mid_stream(server: RawServer) -> None:
    fields = {"message": "disk failed", "type": "server_error", "param": None, "code": "disk_read"}
    server.reply(STREAM_HEAD, piece("a"), event({"error": fields}), DONE)
    with client_of(server) as client:
        stream = client.stream_complete("x")
        next(stream)
        with pytest.raises(flashd_client.StreamError, match="disk failed") as caught:
            next(stream)
    assert (caught.value.type, caught.value.code) == ("server_error", "disk_read")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [b"data: nonsense\n\n", b"data: 7\n\n", event({"choices": [{"text": 5}]}), event({"choices": None})],
)
def test_stream_of_something_else(server: RawServer, body: bytes) -> None:
    server.reply(STREAM_HEAD, body)
    with (
        client_of(server) as client,
        pytest.raises(flashd_client.InvalidResponse, match="not an answer of flashd"),
    ):
        list(client.stream_complete("x"))


def test_stream_without_the_type_of_one(server: RawServer) -> None:
    server.reply(answer({"hello": 1}))
    with client_of(server) as client, pytest.raises(flashd_client.InvalidResponse, match="application/json"):
        next(client.stream_chat("x"))


def test_answer_of_something_else(server: RawServer) -> None:
    server.reply(b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n<html></html>")
    server.reply(b"SSH-2.0-OpenSSH_9.2\r\n")
    with client_of(server) as client:
        with pytest.raises(flashd_client.InvalidResponse, match=r"<html></html>"):
            client.complete("x")
        with pytest.raises(flashd_client.ConnectionLost):
            client.complete("x")


def test_bad_request(server: RawServer) -> None:
    server.reply(error(400, "too long", "context_length_exceeded"))
    with client_of(server) as client, pytest.raises(flashd_client.BadRequest) as caught:
        client.complete("x")
    assert str(caught.value) == "too long"
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.type == "invalid_request_error"


def test_server_error_without_a_body_it_knows(server: RawServer) -> None:
    server.reply(b"HTTP/1.1 502 X\r\ncontent-length: 3\r\n\r\noops"[:-1])
    with client_of(server) as client, pytest.raises(flashd_client.ServerError, match="HTTP status 502"):
        client.models()


def test_full_queue_is_tried_again_after_the_time_it_asks_for(server: RawServer) -> None:
    server.reply(error(429, "queue full", retry_after="0.3"))
    server.reply(STREAM_HEAD, piece("a", "stop"), DONE)
    with client_of(server) as client:
        start = time.monotonic()
        assert [c.text for c in client.stream_complete("x")] == ["a"]
    assert time.monotonic() - start >= 0.3
    assert len(server.requests) == 2


def test_full_queue_again_and_again(server: RawServer) -> None:
    for _ in range(3):
        server.reply(error(429, "queue full", retry_after="0.01"))
    with client_of(server, retries=2) as client, pytest.raises(flashd_client.RateLimited) as caught:
        client.chat("x")
    assert (len(server.requests), caught.value.retry_after_s) == (3, 0.01)


@pytest.mark.parametrize("as_date", [False, True])
def test_a_long_wait_is_left_to_the_caller(server: RawServer, as_date: bool) -> None:
    header = formatdate(time.time() + 3600, usegmt=True) if as_date else "3600"
    server.reply(error(429, "queue full", retry_after=header))
    with client_of(server) as client, pytest.raises(flashd_client.RateLimited) as caught:
        client.chat("x")
    assert len(server.requests) == 1
    assert caught.value.retry_after_s is not None
    assert 3500 <= caught.value.retry_after_s <= 3600


def test_health_models_metrics(server: RawServer) -> None:
    server.reply(answer({"status": "loading"}, 503))
    server.reply(answer({"status": "ok"}))
    server.reply(
        answer({"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "flashd"}]})
    )
    server.reply(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\nflashd 1\n")
    with client_of(server) as client:
        assert client.health() == Health(False, "loading")
        assert client.health() == Health(True, "ok")
        assert client.models() == [ModelInfo("tiny", "flashd", 0)]
        assert client.metrics() == "flashd 1\n"


def test_a_silent_daemon(server: RawServer) -> None:
    server.reply(WAIT_FOR_CLIENT_CLOSE)
    server.reply(STREAM_HEAD, piece("a"), WAIT_FOR_CLIENT_CLOSE)
    with Client(server.path, timeout_s=0.3) as client:
        with pytest.raises(flashd_client.RequestTimeout, match="timeout_s"):
            client.complete("x")
        stream = client.stream_complete("x")
        next(stream)
        with pytest.raises(flashd_client.RequestTimeout, match="timeout_s"):
            next(stream)


def test_daemon_that_dies_before_it_answers(server: RawServer) -> None:
    server.reply(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    with client_of(server) as client, pytest.raises(flashd_client.ConnectionLost):
        client.complete("x")
    assert len(server.requests) == 1


def test_no_daemon(tmp_path: Path) -> None:
    missing, dead, long = tmp_path / "a.sock", tmp_path / "b.sock", tmp_path / ("x" * 120)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(dead))
    for path, why in (
        (missing, "there is no such socket"),
        (dead, "nobody listens"),
        (long, "at most 107 bytes"),
    ):
        with Client(path) as client, pytest.raises(flashd_client.DaemonNotRunning, match=why) as caught:
            next(client.stream_chat("x"))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with (
        Client(missing) as client,
        pytest.raises(ConnectionError, match=f"start --model DIR --socket {missing}"),
    ):
        client.health()


def test_no_daemon_on_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    expected = pytest.raises(flashd_client.DaemonNotRunning, match=f"127.0.0.1:{port}.*flashd start")
    with Client(base_url=f"http://127.0.0.1:{port}") as client, expected:
        client.models()


def test_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHD_SOCKET", "/here/a.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_path() == Path("/here/a.sock")
    monkeypatch.setenv("FLASHD_SOCKET", "")
    assert default_socket_path() == Path("/run/user/7/flashd/flashd.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket_path() == Path(f"/tmp/flashd-{os.getuid()}/flashd.sock")


def test_default_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHD_SOCKET", str(tmp_path / "d.sock"))
    Client().close()
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:  # root's directories are everybody's to trust; this needs a third user
        os.chown(tmp_path, 12345, -1)
    with pytest.raises(flashd_client.DaemonNotRunning, match="belongs to user id"):
        Client()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both socket and base_url"):
        Client(tmp_path / "x", base_url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        Client(base_url="localhost:8000")


def test_environment_proxies_are_ignored(server: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.reply(answer({"status": "ok"}))
    with client_of(server) as client:
        assert client.health().ready
