"""The official SDK, pointed at the socket."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest
from support import Daemon

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
URL = "http://flashd/v1"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=str(daemon.socket))
    with openai.OpenAI(
        base_url=URL, api_key="none", http_client=httpx2.Client(transport=transport)
    ) as client:
        yield client


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=32, seed=1
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions_and_llama_cpp_extras(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2-135m",
        prompt="The capital of France is",
        max_tokens=5,
        temperature=0,
        extra_body={"ignore_eos": True, "return_tokens": True, "top_k": 5},
    )
    assert "Paris" in answer.choices[0].text
    assert len(answer.choices[0].tokens) == 5  # type: ignore[attr-defined]  # an extra of this server


def test_errors_are_the_sdk_s_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smollm2-135m", prompt=[5] * 8193)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)


async def test_async_client(daemon: Daemon) -> None:
    transport = httpx2.AsyncHTTPTransport(uds=str(daemon.socket))
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", http_client=http) as client:
        stream = await client.chat.completions.create(
            model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=32, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert "Paris" in text
