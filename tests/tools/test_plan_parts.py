"""The pure parts of `flashd plan`: traces, the window over them, costs, advice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashd.tools.plan.advice import memory_advice, model_advice
from flashd.tools.plan.cost import Layers, break_even_share, masked_layer, together, token_cost
from flashd.tools.plan.facts import Measured, RowTimes, Times
from flashd.tools.plan.report import PlanRow
from flashd.tools.plan.usage import (
    Usage,
    WindowShape,
    both_shares,
    correlation_of,
    make_trace,
    run_window,
    traces_of,
    usage_of,
)

N = 400
ROWS = RowTimes((8, 32, 128), (1e-3, 2e-3, 6e-3), 1e-4)
MEASURED = Measured(
    step=Times(compute_s=5e-3, overhead_s=1e-3),
    masked=Times(memory_s=1e-4, compute_s=2e-3),
    resident=Times(compute_s=4e-3),
    streamed=Times(wait_s=20e-3, compute_s=5e-3, overhead_s=2e-3),
    streamed_busy_s=24e-3,
    rows=ROWS,
    stream_s=25e-3,
    compute_share=0.75,
    flash_share=0.5,
)
NOTHING_READ = Usage(100.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def frequencies(rng: np.random.Generator) -> np.ndarray:
    """Some favourites, many that are hardly ever requested."""
    return np.clip(rng.beta(0.4, 3.0, N), 1e-3, 0.95).astype(np.float32)


def test_two_tokens_share_as_many_neurons_as_they_do_when_drawn():
    rng = np.random.default_rng(0)
    share = np.array([0.02, 0.1, 0.4], np.float32)
    for rho in (-0.3, 0.0, 0.6, 0.95):
        first = rng.standard_normal((200_000, 3))
        second = rho * first + np.sqrt(1 - rho * rho) * rng.standard_normal((200_000, 3))
        level = np.quantile(rng.standard_normal(400_000), 1 - share)
        drawn = ((first > level) & (second > level)).mean(axis=0)
        np.testing.assert_allclose(both_shares(share, rho), drawn, atol=4e-3)
    assert both_shares(share, 0.0) == pytest.approx(share**2, rel=1e-3)


@pytest.mark.parametrize(("first", "slow"), [(0.55, 0.0), (0.7, 0.5), (-0.2, 0.0)])
def test_a_trace_has_the_frequencies_and_the_usage_that_it_was_made_for(first, slow):
    rng = np.random.default_rng(1)
    share = frequencies(rng)
    long = make_trace(share, first, slow, 3000, rng)
    assert np.abs(long.mean(axis=0) - share).mean() < 0.02
    curve = [usage_of(long, k) for k in range(1, 65)]
    assert correlation_of(share, curve[1]) == pytest.approx(first, abs=0.05)
    made = traces_of([share] * 2, [curve] * 2)
    assert len(made) == 2
    for k in (1, 2, 8, 32):
        assert np.mean([usage_of(trace, k) for trace in made]) == pytest.approx(curve[k - 1], rel=0.12), k


def test_without_a_curve_tokens_share_only_favourites():
    share = frequencies(np.random.default_rng(2))
    (trace,) = traces_of([share], [()])
    assert usage_of(trace, 1) == pytest.approx(share.mean(), rel=0.1)
    assert usage_of(trace, 4) == pytest.approx((1 - (1 - share) ** 4).mean(), rel=0.1)


def shape(capacity: int, **other) -> WindowShape:
    given = {"spare": 24, "eviction": "frequency", "k": 4, "ahead_rows": 0, "max_gap": 0, "max_run": 32}
    return WindowShape(capacity=(capacity,) * 2, **(given | other))


@pytest.fixture(scope="module")
def traced():
    share = frequencies(np.random.default_rng(3))
    curve = [usage_of(make_trace(share, 0.5, 0.0, 2000, np.random.default_rng(4)), k) for k in range(1, 65)]
    return traces_of([share] * 2, [curve] * 2), [share] * 2


def test_a_larger_window_reads_less_and_one_for_everything_nothing(traced):
    traces, share = traced
    found = [run_window(traces, share, shape(capacity)) for capacity in (60, 120, 240, N)]
    missing = [one.demand for one in found]
    assert missing == sorted(missing, reverse=True)
    assert found[0].demand > 3 * found[2].demand > 0
    assert found[-1].demand == found[-1].reads == 0
    requested = np.mean([trace[48:].sum(axis=1).mean() for trace in traces])
    assert found[0].requested == pytest.approx(requested)


def test_the_paper_s_window_misses_what_no_token_of_the_last_k_requested(traced):
    traces, share = traced
    k = 4
    found = run_window(traces, share, shape(N, eviction="window", k=k))
    expected = np.mean(
        [
            (trace[token] & ~trace[token - k : token].any(axis=0)).sum()
            for trace in traces
            for token in range(48, len(trace))
        ]
    )
    assert found.demand == pytest.approx(expected, rel=0.02)


def test_counting_by_frequency_reads_no_more_than_the_paper_s_window(traced):
    traces, share = traced
    by_policy = {name: run_window(traces, share, shape(120, eviction=name)).demand for name in
                 ("frequency", "lru", "window")}  # fmt: skip
    assert by_policy["frequency"] <= by_policy["lru"] <= by_policy["window"] * 1.01


def test_guesses_take_half_of_the_free_rows_and_gaps_save_reads(traced):
    traces, share = traced
    plain = run_window(traces, share, shape(80))
    guessing = run_window(traces, share, shape(80, ahead_rows=1000))
    assert plain.ahead == 0
    assert 0 < guessing.ahead <= 12  # of 24 that are free
    assert guessing.ahead + guessing.demand == pytest.approx(plain.demand, rel=0.05)
    gaps = run_window(traces, share, shape(80, max_gap=4))
    assert gaps.reads < 0.9 * plain.reads
    assert gaps.read_rows > plain.read_rows == pytest.approx(plain.demand)


def test_batches_between_those_that_were_measured():
    assert ROWS.at(0) == 0
    assert ROWS.at(0.5) == pytest.approx(0.5e-3)
    assert ROWS.at(3) == ROWS.at(8) == 1e-3
    assert ROWS.at(20) == pytest.approx(1.5e-3)
    assert ROWS.at(256) == pytest.approx(12e-3)


def test_both_run_slower_together_and_what_is_left_runs_alone():
    # Four ms of computing at 0.75 beside one ms of reads at 0.5: reads are done first, after 2 ms.
    assert together(4.0, 1.0, 0.75, 0.5) == 2.0
    assert together(1.5, 9.0, 0.75, 0.5) == 2.0
    cost = masked_layer(MEASURED, replace(NOTHING_READ, ahead=8.0))
    # 0.9 ms of reads beside 2.1 ms on the lane: 1.8 ms together at 0.75, so that computing loses 0.45 ms.
    assert cost.times.compute_s == pytest.approx(2.45e-3)
    assert cost.times.wait_s == pytest.approx(0.1e-3)
    assert cost.flash_s == pytest.approx(1.9e-3)
    assert cost.times.total_s == pytest.approx(2.65e-3)


def test_what_is_read_on_demand_is_waited_for():
    nothing = masked_layer(MEASURED, NOTHING_READ)
    assert nothing.times == MEASURED.masked
    assert nothing.flash_s == 0
    late = masked_layer(MEASURED, replace(NOTHING_READ, demand=32.0))
    assert late.times.total_s - nothing.times.total_s == pytest.approx(2e-3)
    # More reads than computing hides.
    much = masked_layer(MEASURED, replace(NOTHING_READ, ahead=128.0))
    both_s = 2.1e-3 / 0.75
    assert much.times.total_s == pytest.approx(1e-4 + both_s + 5.9e-3 - 0.5 * both_s)
    assert much.times.memory_s == 1e-4
    assert masked_layer(MEASURED, replace(NOTHING_READ, upkeep_s=3e-4)).times.memory_s == pytest.approx(4e-4)


def test_a_token_is_its_layers_and_the_step():
    cost = token_cost(MEASURED, Layers(masked=2, resident=3, streamed=1), NOTHING_READ)
    assert cost.times.compute_s == pytest.approx(5e-3 + 2 * 2e-3 + 3 * 4e-3 + 5e-3)
    assert cost.times.wait_s == pytest.approx(20e-3)
    assert cost.times.overhead_s == pytest.approx(3e-3)
    assert cost.flash_s == pytest.approx(24e-3)
    parts = cost.times.wait_s + cost.times.memory_s + cost.times.compute_s + cost.times.overhead_s
    assert cost.times.total_s == pytest.approx(parts)


def test_break_even_is_where_scattered_reads_take_as_long():
    assert break_even_share(ROWS, 2e-3, 320) == pytest.approx(0.1)
    assert break_even_share(ROWS, 12e-3, 512) == pytest.approx(0.5)
    assert break_even_share(ROWS, 1.0, 128) == 1.0


def row(memory: str, peak_mb: float, ms: float, k: int = 1, **other) -> PlanRow:
    return PlanRow(memory, True, peak_bytes=int(peak_mb * 1e6), ms_per_token=ms, k=k, window_rows=9, **other)


def test_advice_names_the_cheapest_step_and_the_best_one():
    chosen = row("50%", 1500, 100.0, k=3)
    others = [row("60%", 1800, 95.0, 4), row("70%", 2100, 78.0, 6), row("90%", 2700, 50.0, 30)]
    assert memory_advice(chosen, others) == [
        "add 600 MB (--memory 70%): k 3 -> 6, 100 -> 78 ms per token (-22 %)",
        "add 1,200 MB (--memory 90%): k 3 -> 30, 100 -> 50 ms per token (-50 %)",
    ]
    assert memory_advice(row("90%", 2700, 50.0), others[:2]) == []
    assert memory_advice(row("70%", 2100, 50.0, 6), [row("90%", 2700, 49.0, 30)]) == [
        "more memory makes a token less than 10% faster"
    ]
    assert memory_advice(row("90%", 2700, 50.0, 30), [row("70%", 2100, 51.0, 6)]) == [
        "give 600 MB less (--memory 70%): k 30 -> 6, 50 -> 51 ms per token (+2 %)"
    ]
    small = PlanRow("1%", False, "too small")
    assert memory_advice(small, [row("60%", 1800, 95.0, 4)]) == [
        "with --memory 60% it works: k 4, 95 ms per token, 1,800 MB"
    ]
    assert memory_advice(small, [small]) == []


def test_advice_about_the_model():
    quiet = {"relu": True, "calibrated": True, "streamed": False, "requested": 0.1, "break_even": 0.3}
    assert model_advice(**quiet) == []
    (text,) = model_advice(**(quiet | {"requested": 0.5}))
    assert "50% of a layer's neurons" in text
    assert "more than 30%" in text
    bare = {"calibrated": False, "streamed": True, "requested": None, "break_even": None}
    assert model_advice(relu=True, **bare)[0].startswith("its activation is ReLU: flashd calibrate")
    assert model_advice(relu=False, **bare) == []
