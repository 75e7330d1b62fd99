"""Damaged rows below a real daemon: the request fails by name, the daemon lives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import Daemon, serving, wait_until

from flashd.layout.manifest import BUNDLE
from flashd.store.open import open_manifest

Tiny = Callable[[str], tuple[Any, Path]]
BODY = {
    "prompt": [5, 6, 7],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "return_tokens": True,
}
LAYER, NEURON = 1, 70
# Too little for any layer to stay in RAM.
STREAMED = ("--memory", "75%")


@pytest.fixture
def bundle(tiny: Tiny, tmp_path: Path) -> Path:
    """A bundle of this test's own."""
    copy = tmp_path / "bundle"
    shutil.copytree(tiny("opt")[1], copy)
    return copy


def flip(bundle: Path) -> None:
    """Damage one row, or repair it."""
    manifest = open_manifest(bundle)
    at = manifest.layer_offset_bytes[LAYER] + NEURON * manifest.ffn.stride_bytes + 17
    with (bundle / BUNDLE).open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        os.fsync(file.fileno())


def complete(daemon: Daemon) -> httpx.Response:
    with daemon.http() as http:
        return http.post("/v1/completions", json=BODY)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["tokens"])


def assert_named(answer: httpx.Response) -> None:
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["code"] == "BundleCorruptError"
    assert error["type"] == "server_error"
    assert f"{BUNDLE}: layer {LAYER}, neuron {NEURON}: checksum mismatch (1 of" in error["message"]


@pytest.mark.parametrize("verify", ["auto", "reads"])
def test_a_row_damaged_before_the_start(bundle: Path, tmp_path: Path, verify: str) -> None:
    flip(bundle)
    with serving(bundle, tmp_path, "--verify", verify, *STREAMED) as daemon:
        for _ in range(2):
            assert_named(complete(daemon))
        with (
            daemon.http() as http,
            http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as r,
        ):
            assert "checksum mismatch" in "".join(r.iter_lines())
        flip(bundle)
        assert len(tokens(complete(daemon))) == 12
        with daemon.http() as http:
            assert http.get("/health").status_code == 200
        assert daemon.stop() == 0


def test_a_row_damaged_while_serving_is_found_at_the_next_read(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path, "--verify", "reads", *STREAMED) as daemon:
        right = tokens(complete(daemon))
        flip(bundle)
        # One layer may have been read ahead of the damage: twelve steps read it again.
        assert_named(complete(daemon))
        flip(bundle)
        assert tokens(complete(daemon)) == right


def test_a_row_damaged_while_serving_is_found_within_the_budget(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path, *STREAMED) as daemon:
        right = tokens(complete(daemon))
        flip(bundle)
        answers: list[httpx.Response] = []

        def found() -> bool:
            answers.append(complete(daemon))
            return answers[-1].status_code != 200

        wait_until(found, timeout_s=30, what="the row's turn to be checked")
        assert_named(answers[-1])
        assert_named(complete(daemon))  # now it is watched
        flip(bundle)
        assert tokens(complete(daemon)) == right
