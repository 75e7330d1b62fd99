from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import Daemon, serving

from flashd.metrics.names import METRICS

Tiny = Callable[[str], tuple[Any, Path]]
# Too little for any layer to stay in RAM.
STREAMED = ("--memory", "75%")
COSTS = ("flash_wait", "memory", "compute", "overhead")


def scrape(daemon: Daemon) -> dict[str, Any]:
    with daemon.http() as http:
        return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def value(families: dict[str, Any], name: str, sample: str, **labels: str) -> float:
    for item in families[name].samples:
        if item.name == sample and labels.items() <= item.labels.items():
            return float(item.value)
    raise AssertionError(f"no sample {sample} {labels}")


@pytest.fixture
def served(tiny: Tiny, tmp_path: Path) -> Any:
    with serving(tiny("opt")[1], tmp_path, *STREAMED) as daemon:
        yield daemon


def test_every_metric_of_the_table_is_exported_and_no_other(served: Daemon) -> None:
    families = scrape(served)
    # The text format knows no info type: such a family is a gauge with the suffix in its name.
    expected = {f"{m.name}_info" if m.kind == "info" else m.name: m for m in METRICS.values()}
    assert set(families) == set(expected)
    for name, metric in expected.items():
        assert families[name].documentation == metric.help
        assert families[name].type == ("gauge" if metric.kind == "info" else metric.kind)


def test_counters_move_by_what_was_asked(served: Daemon) -> None:
    before = scrape(served)
    with served.http() as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json={"prompt": []}).status_code == 400
    after = scrape(served)

    def delta(name: str, sample: str, **labels: str) -> float:
        old = value(before, name, sample, **labels)
        return value(after, name, sample, **labels) - old

    assert delta("flashd_prompt_tokens", "flashd_prompt_tokens_total") == 3
    assert delta("flashd_generation_tokens", "flashd_generation_tokens_total") == 10
    success = "flashd_request_success"
    assert delta(success, f"{success}_total", finished_reason="length") == 1
    assert delta("flashd_time_to_first_token_seconds", "flashd_time_to_first_token_seconds_count") == 1
    assert delta("flashd_inter_token_latency_seconds", "flashd_inter_token_latency_seconds_count") == 9
    assert delta("flashd_step_seconds", "flashd_step_seconds_count", phase="decode") == 9
    assert delta("flashd_flash_read_bytes", "flashd_flash_read_bytes_total") > 0
    rejected = "flashd_requests_rejected"
    assert value(after, rejected, f"{rejected}_total", code="invalid_value") == 1


def test_reads_rows_and_their_checks_are_counted(tiny: Tiny, tmp_path: Path) -> None:
    names = ("reads", "read_bytes", "delivered_bytes", "rows", "checked_rows", "check_seconds")
    with serving(tiny("opt")[1], tmp_path, "--verify", "reads", *STREAMED) as daemon:
        with daemon.http() as http:
            body = {"prompt": [5, 6, 7], "max_tokens": 10, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
        families = scrape(daemon)
    flash = {name: value(families, f"flashd_flash_{name}", f"flashd_flash_{name}_total") for name in names}
    # Ten steps through all rows of three layers; the four buffers hold what comes after them.
    assert 10 * 3 * 200 <= flash["checked_rows"] <= (10 * 3 + 4) * 200
    assert flash["checked_rows"] == flash["rows"]
    assert 0 < flash["check_seconds"] < 10
    assert flash["reads"] >= 10 * 3
    assert flash["read_bytes"] >= flash["delivered_bytes"] >= 10 * 3 * 200 * 512
    for name in ("mismatched_rows", "mismatch_rereads", "read_errors", "continued_reads", "retried_reads"):
        assert value(families, f"flashd_flash_{name}", f"flashd_flash_{name}_total") == 0


def test_the_costs_add_up_to_the_step(served: Daemon) -> None:
    with served.http() as http:
        body = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}
        http.post("/v1/completions", json=body)
    families = scrape(served)
    for phase in ("prefill", "decode"):
        step = value(families, "flashd_step_seconds", "flashd_step_seconds_sum", phase=phase)
        parts = [
            value(families, f"flashd_step_{cost}_seconds", f"flashd_step_{cost}_seconds_sum", phase=phase)
            for cost in COSTS
        ]
        assert step > 0
        assert sum(parts) == pytest.approx(step, rel=0.02)
        assert parts[COSTS.index("compute")] > 0
