"""The proof of overlap on a small model. What it measures is for an idle machine; here, which way it goes."""

from __future__ import annotations

import json

import pytest

from flashd.testing import overlap

SMALL = ["--d-model=768", "--n-layers=5", "--steps=4", "--rounds=2", "--json"]
# Where others use the CPUs, what takes milliseconds says little: it has to come out right once.
TRIES = 5


def test_reads_overlap_computing_and_bad_guesses_are_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    seen: set[str] = set()
    for _ in range(TRIES):
        overlap.main(SMALL)
        report = json.loads(capsys.readouterr().out)
        assert report["same_logits"] is True
        rows = {row["setting"]: row for row in report["rows"]}
        assert list(rows) == ["off", "oracle", "random"]
        off, oracle, random = rows.values()
        assert off["prefetch_layers"] == random["prefetch_layers"] == 0
        assert off["beside_off"] == 1
        assert all(row["flash_busy_ms"] > 0 and row["compute_ms"] > 0 for row in rows.values())
        came_out = {
            "kept": oracle["prefetch_layers"] == 5,
            "faster": oracle["beside_off"] < 0.9,
            "waits less": oracle["flash_wait_ms"] < off["flash_wait_ms"] / 2,
            "harmless": random["beside_off"] < 1.1,
        }
        seen |= {what for what, right in came_out.items() if right}
        if len(seen) == len(came_out):
            return
    assert seen == came_out.keys(), report


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    overlap.main(["--d-model=128", "--n-layers=2", "--steps=2", "--rounds=1", "--warm-up=2", "--requested=4"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("device: ")
    assert [line.split()[0] for line in printed[1:]] == ["LOOKAHEAD", "off", "oracle", "random", "logits:"]
    assert printed[-1] == "logits: the same, bit for bit"
