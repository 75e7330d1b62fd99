"""The client against a real daemon that serves the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flashd_client import AsyncClient, BadRequest, Client
from support import Daemon, wait_until

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


def test_facts(client: Client) -> None:
    assert client.health().ready
    assert [model.id for model in client.models()] == ["smollm2-135m"]
    assert "flashd_generation_tokens_total" in client.metrics()


def test_chat_and_completion_whole_and_streamed(client: Client) -> None:
    whole = client.chat(QUESTION, temperature=0, max_tokens=32, return_tokens=True)
    assert "Paris" in whole.text
    assert whole.finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(whole.tokens or ())
    assert "".join(c.text for c in client.stream_chat(QUESTION, temperature=0, max_tokens=32)) == whole.text
    plain = client.complete("The capital of France is", temperature=0, max_tokens=8)
    chunks = client.stream_complete("The capital of France is", temperature=0, max_tokens=8)
    assert "".join(chunk.text for chunk in chunks) == plain.text


def test_a_wrong_request_is_a_typed_error(client: Client) -> None:
    with pytest.raises(BadRequest) as caught:
        client.complete([5] * 8193)
    assert caught.value.code == "context_length_exceeded"


def test_closing_a_stream_stops_the_generation(client: Client) -> None:
    stream = client.stream_complete("Once", max_tokens=8000, ignore_eos=True)
    next(stream)
    assert "flashd_num_requests_running 1.0" in client.metrics()
    stream.close()
    wait_until(lambda: "flashd_num_requests_running 0.0" in client.metrics(), what="stopped")


async def test_async_client(daemon: Daemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        parts = [c.text async for c in client.stream_chat(QUESTION, temperature=0, max_tokens=32)]
    assert "Paris" in "".join(parts)
