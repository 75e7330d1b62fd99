"""The proof of overlap on a small model. What it measures is for an idle machine; here, which way it goes."""

from __future__ import annotations

import json

import pytest

from flashd.testing import overlap

SMALL = ["--d-model=768", "--n-layers=5", "--steps=4", "--rounds=2", "--json"]
# Where others use the CPUs, what takes milliseconds says little: it has to come out right once.
TRIES = 5


def test_reads_overlap_computing_and_bad_guesses_are_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    for attempt in range(1, TRIES + 1):
        overlap.main(SMALL)
        report = json.loads(capsys.readouterr().out)
        assert report["same_logits"] is True
        rows = {row["setting"]: row for row in report["rows"]}
        assert list(rows) == ["off", "oracle", "random"]
        assert rows["off"]["prefetch_layers"] == rows["random"]["prefetch_layers"] == 0
        assert rows["off"]["beside_off"] == 1
        assert all(row["flash_busy_ms"] > 0 and row["compute_ms"] > 0 for row in rows.values())
        right = (
            rows["oracle"]["prefetch_layers"] == 4
            and rows["oracle"]["beside_off"] < 0.9
            and rows["oracle"]["flash_wait_ms"] < rows["off"]["flash_wait_ms"] / 2
            and rows["random"]["beside_off"] < 1.2
        )
        if right or attempt == TRIES:
            assert right, report
            return


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    overlap.main(["--d-model=128", "--n-layers=2", "--steps=2", "--rounds=1", "--warm-up=2", "--requested=4"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("device: ")
    assert [line.split()[0] for line in printed[1:]] == ["LOOKAHEAD", "off", "oracle", "random", "logits:"]
    assert printed[-1] == "logits: the same, bit for bit"
