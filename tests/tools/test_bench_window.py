"""`flashd bench window`: budgets are measured beside their predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashd.cli.bench_window import parse_percent, print_window
from flashd.errors import ConfigError
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.tools.bench.token.options import Sample
from flashd.tools.bench.window import WindowOptions, WindowReport, WindowRow, bench_window
from flashd.tools.bench.window.report import window_row
from flashd.tools.plan import PlanReport, PlanRow
from flashd.tools.synth import SynthOptions, synth

SAMPLE = Sample(
    ms_per_token=10.0, flash_wait_ms=4.0, flash_busy_ms=5.0, memory_ms=1.0, compute_ms=4.0, overhead_ms=1.0,
    bytes_per_token=1e7, counted=True, engine_bytes_per_token=1e7, reads_per_token=9.0,
    needed_bytes_per_token=5e6, requested=100.0, hits=75.0, free_ms=0.0, overlaps=(),
    peak_bytes=1 << 30, footprint_bytes=1 << 30, kv_bytes=0, budget_bytes=1 << 30, prefill_s=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("window") / "tiny"
    synth(folder, SynthOptions("opt-tiny"))
    return folder


@pytest.fixture(scope="module")
def found(bundle) -> dict:
    """A whole run by the command."""
    plot = bundle.parent / "plot.png"
    options = ["--rounds", "1", "--tokens", "8", "--warmup", "4", "--prompt", "32", "--budgets", "60,85,140"]
    command = [sys.executable, "-m", "flashd", "bench", "window", str(bundle), *options, "--plot", str(plot)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["plot.png", "tiny"]
    return json.loads(done.stdout)


def test_a_run(found):
    assert (found["mode"], found["rounds"], found["tokens"]) == ("+prefetch", 1, 8)
    assert [row["budget"] for row in found["rows"]] == ["85%", "140%"]
    assert any(note.startswith("60%: too small: the least that works") for note in found["notes"])
    for row in found["rows"]:
        parts = ("flash_wait_ms", "memory_ms", "compute_ms", "overhead_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["ms_per_token"])
        assert row["ratio"] == pytest.approx(row["predicted_ms"] / row["ms_per_token"])
        assert row["rounds_ms"] == [row["ms_per_token"]]
        assert row["predicted"]["memory"] == row["budget"]
        assert 0.1 < row["ratio"] < 10  # a machine that runs tests says no more
    small, large = found["rows"]
    assert small["k"] < large["k"]
    assert small["gb_read_per_token"] > large["gb_read_per_token"]
    assert small["predicted"]["read_bytes"] > large["predicted"]["read_bytes"] == 0


def test_what_is_predicted_to_be_read_is_read(found):
    row = found["rows"][0]
    assert row["predicted"]["read_bytes"] == pytest.approx(1e9 * row["gb_read_per_token"], rel=0.4)


def test_the_table_for_people(found, capsys):
    rows = [WindowRow(**{**row, "predicted": PlanRow(**row["predicted"])}) for row in found["rows"]]
    print_window(WindowReport(**{**found, "rows": rows}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", +prefetch")
    assert lines[1].split("\t")[-2:] == ["PREDICTED", "RATIO"]
    assert [line.split("\t")[0] for line in lines[2:4]] == ["85%", "140%"]


def test_a_model_without_masks(tmp_path):
    made = make_bundle(tmp_path / "dense", tiny_spec(max_context=512))
    asked = []

    def planning(config, base_bytes, *, budgets_percent, context):
        asked.append((config.prefetch, base_bytes, budgets_percent, context))
        rows = [
            PlanRow(f"{share}%", True, weights_bytes=1 << 20, ms_per_token=1.0, resident_layers=share // 100)
            if share > 100
            else PlanRow(f"{share}%", False, "too small")
            for share in budgets_percent
        ]
        return replace(REPORT, rows=rows)

    options = WindowOptions((50, 150, 200), rounds=2, tokens=8, warmup_tokens=2, prompt_tokens=16)
    told = []
    report = bench_window(
        made.directory, options, 7, measuring=lambda *done: told.append(done), planning=planning
    )
    assert (report.mode, report.tokens) == ("hybrid", 2)
    assert [row.budget for row in report.rows] == ["150%", "200%"]
    assert report.notes[0] == "50%: too small"
    assert all(len(row.rounds_ms) == len(row.predicted_rounds_ms) == 2 for row in report.rows)
    # Each budget's plan is made right before it, and another budget begins each round.
    assert [shares for _, _, shares, _ in asked] == [(50, 150, 200), (150,), (200,), (200,), (150,)]
    assert {(prefetch, base) for prefetch, base, _, _ in asked} == {("on", 7)}
    assert told[-1] == (4, 4)
    with pytest.raises(ConfigError, match="no budget can be measured: 50%: too small"):
        bench_window(made.directory, replace(options, budgets_percent=(50,)), 7, planning=planning)


REPORT = PlanReport(
    directory="d", model="m", synthetic=False, memory="auto", all_weights_bytes=1, least_memory="1%",
    available_bytes=1, context_tokens=1, parts=None, chosen=PlanRow("auto", True), rows=[], masked_layers=0,
    layers=1, requested_share=None, break_even_share=None, device_gb_per_s=None, row_gb_per_s=None,
    stream_gb_per_s=None, compute_share=1.0, flash_share=1.0, advice=[], notes=[],
)  # fmt: skip


def test_a_row_is_the_median_round_and_the_median_ratio():
    rounds = [replace(SAMPLE, ms_per_token=ms) for ms in (30.0, 10.0, 20.0)]
    plans = [PlanRow("50%", True, ms_per_token=ms, k=3) for ms in (33.0, 12.0, 10.0)]
    row = window_row(rounds, plans)
    assert (row.ms_per_token, row.predicted_ms) == (20.0, 10.0)
    assert row.ratio == pytest.approx(1.1)
    assert row.rounds_ms == [30.0, 10.0, 20.0]
    assert (row.found_share, row.k, row.budget) == (0.75, 3, "50%")


def test_what_cannot_be_measured_is_said_first(bundle):
    for options, message in (
        ({"budgets_percent": ()}, "budgets are ''"),
        ({"budgets_percent": (0,)}, "budgets are '0'"),
        ({"rounds": 0}, "rounds: 0"),
        ({"tokens": 0}, "tokens: 0"),
        ({"backend": "memory"}, "backend memory reads nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            WindowOptions(**options)
    with pytest.raises(ConfigError, match="too many for a context of 512"):
        bench_window(bundle, WindowOptions(tokens=400), 0)
    assert (parse_percent("50"), parse_percent("65%")) == (50, 65)
    with pytest.raises(ConfigError, match="--budgets has 'half'"):
        parse_percent("half")
