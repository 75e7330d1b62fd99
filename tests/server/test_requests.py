"""Many requests at once, clients that go away, failures of the disk under a running daemon."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import Daemon, serving, wait_until

Tiny = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def small(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    args = ("--max-queue", "4", "--max-sessions", "3")
    with serving(tiny("opt")[1], tmp_path_factory.mktemp("small"), *args) as daemon:
        yield daemon


def metric(daemon: Daemon, name: str) -> float:
    with daemon.http() as http:
        for line in http.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def idle(daemon: Daemon) -> bool:
    return (
        metric(daemon, "flashd_num_requests_running") == 0
        and metric(daemon, "flashd_num_requests_waiting") == 0
    )


def test_parallel_requests_give_the_tokens_they_give_alone(small: Daemon) -> None:
    def tokens(i: int) -> list[int]:
        body = {"prompt": [i + 3, 40, i * 7 + 3], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with small.http() as http:
            choice = http.post("/v1/completions", json={**body, "return_tokens": True}).json()["choices"][0]
        return list(choice["tokens"])

    alone = [tokens(i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(tokens, range(6))) == alone
    assert len({tuple(t) for t in alone}) > 1


def test_a_full_queue_is_429_with_retry_after(small: Daemon) -> None:
    gate = threading.Barrier(12)

    def status(_: int) -> tuple[int, str | None]:
        gate.wait()
        body = {"prompt": [5], "max_tokens": 150, "ignore_eos": True}
        with small.http() as http:
            response = http.post("/v1/completions", json=body)
            return response.status_code, response.headers.get("retry-after")

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(status, range(12)))
    assert answers.count((200, None)) >= 7
    assert (429, "1") in answers
    assert {code for code, _ in answers} == {200, 429}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place(daemon: Daemon, stream: bool) -> None:
    wait_until(lambda: idle(daemon), what="idle")
    before = metric(daemon, 'flashd_request_success_total{finished_reason="cancelled"}')
    body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    with daemon.http(10 if stream else 1.5) as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body)
    wait_until(lambda: idle(daemon), what="the sequence has left")
    after = metric(daemon, 'flashd_request_success_total{finished_reason="cancelled"}')
    assert after == before + 1


def test_text_for_a_model_without_tokenizer_is_refused(small: Daemon) -> None:
    with small.http() as http:
        text = http.post("/v1/completions", json={"prompt": "hello"})
        assert text.status_code == 400
        assert "token ids" in text.json()["error"]["message"]
        chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert chat.json()["error"]["code"] == "no_tokenizer"


def test_the_last_place_of_the_context_can_be_used(small: Daemon) -> None:
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 50, "return_tokens": True}
    with small.http() as http:
        for length, expected in ((160, 1), (159, 2), (150, 11)):
            choice = http.post("/v1/completions", json={**body, "prompt": [9] * length}).json()["choices"][0]
            assert len(choice["tokens"]) == expected
            assert choice["finish_reason"] == "length"


def broken_tokenizer(bundle: Path) -> None:
    """A tokenizer whose decoder panics on some texts, and a context beyond any memory."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    tokenizer = json.loads((bundle / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 50}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], strip]}
    content = json.dumps(tokenizer).encode()
    (bundle / "tokenizer.json").write_bytes(content)
    entry = next(file for file in manifest["files"] if file["name"] == "tokenizer.json")
    entry |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["model"]["max_context"] = 1 << 30
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_what_fails_for_one_request_leaves_the_others_alone(smollm2: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "broken"
    shutil.copytree(smollm2, bundle)
    broken_tokenizer(bundle)
    with serving(bundle, tmp_path) as daemon, daemon.http() as http:
        body = {"prompt": " 1 1 1 1 1", "temperature": 0, "max_tokens": 4}
        failed = http.post("/v1/completions", json=body)
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "TokenizerError"
        # Without max_tokens the request may fill the whole context: address space, not memory.
        chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
        with http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as response:
            lines = response.iter_lines()
            assert response.status_code == 200
            next(lines)
        assert http.get("/health").status_code == 200
        assert psutil.Process(daemon.process.pid).memory_info().rss < 1 << 30


def test_a_bundle_cut_short_under_the_daemon_fails_requests_not_the_daemon(
    tiny: Tiny, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny("opt")[1], copy)
    # Too little for any layer to stay in RAM.
    with serving(copy, tmp_path, "--memory", "75%") as daemon, daemon.http() as http:
        body = {"prompt": [5], "max_tokens": 3, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        good = http.post("/v1/completions", json=body).json()["choices"][0]["tokens"]
        size = (copy / "ffn.bundle").stat().st_size
        content = (copy / "ffn.bundle").read_bytes()
        os.truncate(copy / "ffn.bundle", size // 2)
        failed = http.post("/v1/completions", json=body)
        assert failed.status_code == 500
        assert "ffn.bundle" in failed.json()["error"]["message"]
        stream = http.post("/v1/completions", json={**body, "stream": True}).text
        assert '"error"' in stream
        assert stream.endswith("data: [DONE]\n\n")
        with (copy / "ffn.bundle").open("r+b") as file:
            file.write(content)
        assert http.post("/v1/completions", json=body).json()["choices"][0]["tokens"] == good
