"""The tables of docs/measurements.md are those of docs/results."""

from __future__ import annotations

import json
from typing import Any

from support import REPO

RESULTS = REPO / "docs" / "results"
HEAD = (
    "| mode | ms/token | x naive | x hybrid | GB/token | flash busy | flash wait | memory | compute "
    "| overhead | free run | found in RAM |"
)


def token_table(found: dict[str, Any]) -> str:
    """``flashd bench token`` as a Markdown table; times in ms."""
    lines = [HEAD, "|---" * HEAD.count(" |") + "|"]
    for row in found["rows"]:
        hits = "" if row["hit_ratio"] is None else f"{row['hit_ratio']:.1%}"
        cells = (
            row["mode"],
            f"{row['ms_per_token']:.1f}",
            f"{row['speedup_naive']:.1f}",
            f"{row['speedup_hybrid']:.1f}",
            f"{row['gb_read_per_token']:.3f}",
            *(f"{row[f'flash_{what}_ms']:.1f}" for what in ("busy", "wait")),
            *(f"{row[f'{what}_ms']:.1f}" for what in ("memory", "compute", "overhead")),
            f"{row['overlap']:.2f}",
            hits,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_tables_are_those_of_the_results() -> None:
    document = (REPO / "docs" / "measurements.md").read_text()
    names = sorted(path.name for path in RESULTS.glob("*.json"))
    assert names
    for name in names:
        assert f"results/{name}" in document, f"{name} is not mentioned"
        if name.startswith("bench-token"):
            found = json.loads((RESULTS / name).read_text())
            assert found["enforced"].startswith("by a cgroup")
            if found["rows"][0]["mode"] == "naive":
                assert token_table(found) in document, name
            else:  # told in words
                assert all(f"{row['ms_per_token']:.1f}" in document for row in found["rows"]), name


def test_policies_and_orders_are_those_of_the_results() -> None:
    document = (REPO / "docs" / "measurements.md").read_text()
    policies = ("frequency", "lru", "window")
    for budget, found in json.loads((RESULTS / "eviction-opt-relu-6m.json").read_text()).items():
        rows = [found[name]["rows"][0] for name in policies]
        missing = [row["requested_rows"] * (1 - row["hit_ratio"]) for row in rows]
        assert missing == sorted(missing), "the default is what reads least"
        assert f"| {budget[:-1]} % | {' | '.join(f'{rows:.1f}' for rows in missing)} |" in document
        before = found["frequency, split by k"]["rows"][0]
        assert f"{before['requested_rows'] * (1 - before['hit_ratio']):.1f}" in document
    for name, cost in json.loads((RESULTS / "reorder-opt-relu-6m.json").read_text())["costs"].items():
        assert f"| {name} | {cost['reads']:.1f} | {cost['nbytes'] / 1e3:.1f} |" in document


def test_pressure_and_plans_are_those_of_the_results() -> None:
    document = (REPO / "docs" / "measurements.md").read_text()
    for ramp, found in json.loads((RESULTS / "pressure-opt-1.3b.json").read_text()).items():
        assert found["survived"]
        assert not found["errors"]
        cells = (
            f"{ramp} MiB/s",
            f"{found['answers']}",
            f"{found['tokens']}",
            f"{found['different']}",
            f"{min(found['k'])} to {max(found['k'])}",
            f"{found['lowest_available_bytes'] / 1e6:.0f} MB",
            f"{found['footprint_peak_bytes'] / 1e6:.0f} MB",
        )
        assert f"| {' | '.join(cells)} |" in document
    for name in ("opt-1.3b", "opt-125m"):
        for row in json.loads((RESULTS / f"bench-window-{name}.json").read_text())["rows"]:
            assert 0.75 < row["ratio"] < 1.25
            times = f"{row['ms_per_token']:.1f} | {row['predicted_ms']:.1f} | {row['ratio']:.2f}"
            assert f"| {name} | {row['budget']} | {row['k']} | {times} |" in document
