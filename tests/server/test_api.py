"""The HTTP API of a daemon that serves the demo model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from support import Daemon

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    with daemon.http() as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    """The JSON bodies of a server-sent event stream, which must end with [DONE]."""
    blocks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def test_health_and_models(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    listed = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["smollm2-135m"]
    assert http.get("/v1/models/smollm2-135m").json()["max_model_len"] == 8192
    missing = http.get("/v1/models/gpt-4")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_the_capital_of_france_is_paris(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 32}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] > 3


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_carries_the_same_text_as_the_whole_answer(http: httpx.Client, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    content = {"messages": QUESTION} if chat else {"prompt": "Once upon a time"}
    body = {**content, "temperature": 0, "max_tokens": 24, "return_tokens": True}
    whole = http.post(path, json=body).json()["choices"][0]
    streamed = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(streamed)
    choices = [chunk["choices"][0] for chunk in chunks]
    if chat:
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert choices[0]["delta"]["role"] == "assistant"
        assert text == whole["message"]["content"]
    else:
        text = "".join(choice["text"] for choice in choices)
        assert text == whole["text"]
    assert [t for choice in choices for t in choice["tokens"]] == whole["tokens"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
        whole["finish_reason"]
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(whole["tokens"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_token_ids_as_prompt_give_the_same_answer_as_text(http: httpx.Client) -> None:
    body = {"temperature": 0, "max_tokens": 8, "return_tokens": True}
    first = http.post("/v1/completions", json={**body, "prompt": "The sky is"}).json()
    ids = [504, 6376, 314]
    second = http.post("/v1/completions", json={**body, "prompt": ids}).json()
    assert first["choices"][0]["tokens"] == second["choices"][0]["tokens"]
    nested = http.post("/v1/completions", json={**body, "prompt": [ids]}).json()
    assert nested["choices"][0]["tokens"] == second["choices"][0]["tokens"]


def test_ignore_eos_goes_on_and_max_tokens_ends_with_length(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    choice = http.post("/v1/chat/completions", json={**body, "return_tokens": True}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["tokens"]) == 40
    assert 2 in choice["tokens"][:-1]


def test_the_same_seed_gives_the_same_text(http: httpx.Client) -> None:
    def text(seed: int) -> str:
        body = {"prompt": "My favourite animal is", "seed": seed, "max_tokens": 20, "temperature": 1.2}
        answer = http.post("/v1/completions", json={**body, "top_p": 0.9, "top_k": 50}).json()
        return str(answer["choices"][0]["text"])

    assert text(1) == text(1)
    assert len({text(1), text(2), text(3)}) > 1


@pytest.mark.parametrize("stop", ["capital", "al of F", ["nowhere", "of France"]])
def test_a_stop_string_never_leaks(http: httpx.Client, stop: Any) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 32}
    free = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    first = min(free.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in free)
    response = http.post("/v1/chat/completions", json={**body, "stop": stop, "stream": True})
    choices = [chunk["choices"][0] for chunk in events(response)]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == free[:first]
    assert choices[-1]["finish_reason"] == "stop"


def test_characters_over_several_tokens_arrive_whole(http: httpx.Client) -> None:
    text = "東京、大阪、京都、東京、大阪、京都、東京、大阪、京都、東京、"
    body = {"prompt": text, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "stream": True}
    chunks = events(http.post("/v1/completions", json={**body, "return_tokens": True}))
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    wide = [char for char in "".join(pieces) if ord(char) > 0x2E80]
    tokens = sum(len(chunk["choices"][0]["tokens"]) for chunk in chunks)
    assert 5 < len(wide) < tokens, "the case must hold characters that are split over tokens"
    assert all("\ufffd" not in piece for piece in pieces)


BAD_REQUESTS = [
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", None),
    ({"prompt": "x", "max_tokens": "many"}, "max_tokens", None),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", None),
    ({"prompt": ""}, "prompt", None),
    ({"prompt": []}, "prompt", None),
    ({"prompt": {"a": 1}}, "prompt", None),
    ({"prompt": [1, "x"]}, "prompt", None),
    ({"prompt": [-1]}, "prompt", None),
    ({"prompt": [10**9]}, "prompt", None),
    ({"prompt": [10**30]}, "prompt", None),
    ({"prompt": ["a", "b"]}, "prompt", None),
    ({}, "prompt", None),
    ({"prompt": "x", "temperature": -1}, "temperature", None),
    ({"prompt": "x", "temperature": "hot"}, "temperature", None),
    ({"prompt": "x", "top_p": 0}, "top_p", None),
    ({"prompt": "x", "top_p": 1.5}, "top_p", None),
    ({"prompt": "x", "top_k": -1}, "top_k", None),
    ({"prompt": "x", "seed": -1}, "seed", None),
    ({"prompt": "x", "stop": [""]}, "stop", None),
    ({"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop", None),
    ({"prompt": "x", "n": 2}, "n", None),
    ({"prompt": "x", "stream": "yes"}, "stream", None),
    ({"prompt": "x", "logit_bias": {"1": 5}}, "logit_bias", None),
    ({"prompt": "x", "model": "gpt-4"}, "model", "model_not_found"),
    ({"prompt": "hello " * 9000}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 8193}, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize(("body", "param", "code"), BAD_REQUESTS, ids=lambda value: str(value)[:40])
def test_a_bad_request_is_an_openai_error_that_names_the_field(
    http: httpx.Client, body: dict[str, Any], param: str, code: str | None
) -> None:
    response = http.post("/v1/completions", json=body)
    assert response.status_code in (400, 404, 422)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    if code is not None:
        assert error["code"] == code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "invalid_json"),
        (b"", "invalid_value"),
        (b"[]", "invalid_value"),
        (b"null", "invalid_value"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_value"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_a_body_that_is_no_json_object(http: httpx.Client, content: bytes, code: str) -> None:
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.json()["error"]["code"] == code


def test_parameters_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "logit_bias": None, "tools": [],
        "response_format": {"type": "text"}, "store": False, "n": 1, "user": "me", "whatever": None,
    }  # fmt: skip
    body = {"messages": QUESTION, "max_tokens": 1, **neutral}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    for name, value in (("frequency_penalty", 0.5), ("logprobs", True), ("tools", [{}]), ("whatever", 0)):
        refused = http.post("/v1/chat/completions", json={**body, name: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"{name}: unsupported parameter"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_refused_and_not_held(
    http: httpx.Client, daemon: Daemon, chunked: bool
) -> None:
    rss = psutil.Process(daemon.process.pid).memory_info().rss
    block = b"x" * (1 << 20)
    blocks = [b'{"prompt": "', *[block] * 100, b'"}']
    headers = {"content-type": "application/json"}
    if not chunked:
        headers["content-length"] = str(sum(map(len, blocks)))
    try:
        response = http.post("/v1/completions", content=iter(blocks), headers=headers)
    except httpx.WriteError:  # answered and closed before all was sent
        pass
    else:
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_long"
    assert http.get("/health").status_code == 200
    assert psutil.Process(daemon.process.pid).memory_info().rss < rss + (64 << 20)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(http: httpx.Client) -> None:
    start = time.monotonic()
    response = http.post("/v1/completions", json={"prompt": "7" * (7 << 20)})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_half_a_surrogate_pair_is_a_bad_request(http: httpx.Client, field: str) -> None:
    content = json.dumps({"prompt": "x", field: "a\ud800b"})
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert "surrogate" in response.json()["error"]["message"]


def test_bad_chats_and_unknown_paths(http: httpx.Client) -> None:
    for messages in ([], [{"role": "robot", "content": "x"}], [{"role": "user"}], "hello", [7]):
        response = http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code in (400, 422)
        assert response.json()["error"]["param"] == "messages"
    assert http.get("/v2/nothing").json()["error"]["code"] == "not_found"
    assert http.get("/v1/completions").status_code == 405


def test_content_parts_are_joined(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    body = {"temperature": 0, "max_tokens": 16, "return_tokens": True}
    split = http.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": parts}]})
    plain = http.post("/v1/chat/completions", json={**body, "messages": QUESTION})
    assert split.json()["choices"][0]["tokens"] == plain.json()["choices"][0]["tokens"]


def test_openapi_describes_the_requests(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert "top_k" in schema["components"]["schemas"]["CompletionRequest"]["properties"]
