from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashd.layout.coalesce import GAP, RowPlan, break_even_gap_bytes, plan_rows

LARGEST_ROW = 120


@st.composite
def wanted(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Pairs of neuron and row: any neurons, no row twice, rows often side by side."""
    ids = draw(st.lists(st.integers(0, 60), max_size=50))
    if draw(st.booleans()):
        ids.sort()
    if draw(st.booleans()):
        start = draw(st.integers(0, 9))
        return [(neuron, start + i) for i, neuron in enumerate(ids)]
    rows = draw(st.permutations(range(LARGEST_ROW)))
    return list(zip(ids, rows, strict=False))


def plan_of(pairs: list[tuple[int, int]], max_gap: int, max_run: int) -> RowPlan:
    ids = np.array([neuron for neuron, _ in pairs], np.int64)
    rows = np.array([row for _, row in pairs], np.int64)
    before = ids.copy(), rows.copy()
    plan = plan_rows(ids, rows, max_gap_neurons=max_gap, max_run_neurons=max_run)
    np.testing.assert_array_equal((ids, rows), before)
    for column in (plan.neuron, plan.first, plan.count, plan.row):
        assert column.dtype == np.int64
    assert len(plan) == len(plan.first)
    assert len(plan.count) == len(plan.row)
    return plan


def reads_of(plan: RowPlan) -> list[list[tuple[int, int]]]:
    """Every read as pairs of neuron and row (``GAP`` where it is thrown away), one by one."""
    reads = []
    stops = np.append(plan.first, len(plan.count))[1:].tolist()
    for neuron, first, stop in zip(plan.neuron.tolist(), plan.first.tolist(), stops, strict=True):
        read: list[tuple[int, int]] = []
        for count, row in zip(plan.count[first:stop].tolist(), plan.row[first:stop].tolist(), strict=True):
            assert count >= 1
            start = neuron + len(read)
            read += [(start + i, row if row == GAP else row + i) for i in range(count)]
        reads.append(read)
    return reads


def chains_of(pairs: list[tuple[int, int]], max_gap: int) -> Iterator[list[int]]:
    """Neurons that would share a read if reads could be of any length, found one by one."""
    chain: list[int] = []
    for neuron in sorted(neuron for neuron, _ in pairs):
        if chain and not 0 < neuron - chain[-1] <= max_gap + 1:
            yield chain
            chain = []
        chain.append(neuron)
    if chain:
        yield chain


@given(wanted(), st.integers(0, 8), st.integers(1, 70))
@example([], 0, 1)
@example([(5, 0), (5, 1), (6, 2), (6, 3)], 3, 10)
@settings(max_examples=150, deadline=None)
def test_every_wanted_row_and_nothing_else(pairs: list[tuple[int, int]], max_gap: int, max_run: int) -> None:
    reads = reads_of(plan_of(pairs, max_gap, max_run))
    delivered = [(neuron, row) for read in reads for neuron, row in read if row != GAP]
    assert sorted(delivered) == sorted(pairs)
    skipped = {neuron for read in reads for neuron, row in read if row == GAP}
    assert not skipped & {neuron for neuron, _ in pairs}


@given(wanted(), st.integers(0, 8), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_limits_hold(pairs: list[tuple[int, int]], max_gap: int, max_run: int) -> None:
    plan = plan_of(pairs, max_gap, max_run)
    reads = reads_of(plan)
    starts = [read[0][0] for read in reads]
    assert starts == sorted(starts)
    for read in reads:
        assert GAP not in (read[0][1], read[-1][1])
        assert 1 <= len(read) <= max_run
    is_gap = plan.row == GAP
    assert (plan.count[is_gap] <= max_gap).all()
    assert not (is_gap[1:] & is_gap[:-1]).any()
    assert int(np.diff(plan.first, append=len(plan.count)).max(initial=0)) <= max_run


@given(wanted(), st.integers(0, 8), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_what_may_share_a_read_does(pairs: list[tuple[int, int]], max_gap: int, max_run: int) -> None:
    plan = plan_of(pairs, max_gap, max_run)
    reads = reads_of(plan)
    got = [[neuron for neuron, row in read if row != GAP] for read in reads]
    for chain in chains_of(pairs, max_gap):
        parts: list[list[int]] = []
        while sum(map(len, parts)) < len(chain):
            parts.append(got.pop(0))
        assert [neuron for part in parts for neuron in part] == chain
        assert len(parts) <= -(-(chain[-1] - chain[0] + 1) // max_run)
    assert not got
    for read, places in zip(reads, np.diff(plan.first, append=len(plan.row)), strict=True):
        rows = [row for _, row in read]
        follows = [after == (GAP if row == GAP else row + 1) for row, after in pairwise(rows)]
        assert places == 1 + follows.count(False)


def test_a_long_run_is_cut_evenly() -> None:
    plan = plan_rows(np.arange(130), np.arange(130), max_run_neurons=64)
    assert plan.neuron.tolist() == [0, 44, 88]
    assert plan.count.tolist() == [44, 44, 42]


@pytest.mark.parametrize("max_run", range(1, 14))
@pytest.mark.parametrize("span", range(1, 27))
def test_every_length_of_run_at_every_limit(span: int, max_run: int) -> None:
    plan = plan_rows(np.arange(span), np.arange(span), max_run_neurons=max_run)
    assert len(plan) == -(-span // max_run)
    assert int(plan.count.max()) <= max_run
    # The same with one gap, which is read over exactly where it may be.
    ids = np.delete(np.arange(span + 2), span // 2 + 1)
    gapped = plan_rows(ids, np.arange(span + 1), max_gap_neurons=1, max_run_neurons=max_run)
    assert max(len(read) for read in reads_of(gapped)) <= max_run
    assert len(gapped) <= -(-(span + 2) // max_run)
    if len(gapped) == 1:
        assert gapped.count[gapped.row == GAP].tolist() == [1]


def test_a_token_of_a_large_model_in_one_plan() -> None:
    rng = np.random.default_rng(3)
    ids = rng.choice(40_000, 12_000, replace=False)
    rows = rng.permutation(12_000)
    plan = plan_rows(ids, rows, max_gap_neurons=2, max_run_neurons=16)
    neuron = np.repeat(plan.neuron, np.add.reduceat(plan.count, plan.first))
    read = np.repeat(np.arange(len(plan)), np.add.reduceat(plan.count, plan.first))
    start = np.searchsorted(read, np.arange(len(plan)))
    neuron += np.arange(len(neuron)) - start[read]
    place = np.repeat(np.arange(len(plan.row)), plan.count)
    row = plan.row[place] + np.arange(len(place)) - (np.cumsum(plan.count) - plan.count)[place]
    kept = plan.row[place] != GAP
    got = np.empty(12_000, np.int64)
    got[row[kept]] = neuron[kept]
    assert kept.sum() == 12_000
    np.testing.assert_array_equal(got[rows], ids)


@pytest.mark.parametrize(
    ("ids", "rows", "limits", "said"),
    [
        ([1, 2], [0], (0, 4), r"rows is int64\[1\], expected int64\[2\]"),
        ([[1, 2]], [[0, 1]], (0, 4), r"ids is int64\[1, 2\]"),
        ([1.0], [0], (0, 4), "ids is float64"),
        ([1, 2], [0, -1], (0, 4), "destination row -1"),
        ([2, -1], [0, 1], (0, 4), r"ids -1\.\.2 are not neurons"),
        ([2**62, 1], [0, 1], (0, 4), "are not neurons"),
        ([1], [0], (-1, 4), "gaps of -1"),
        ([1], [0], (0, 0), "reads of 0"),
    ],
)
def test_what_is_no_plan(ids: list[int], rows: list[int], limits: tuple[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_rows(np.array(ids), np.array(rows), max_gap_neurons=limits[0], max_run_neurons=limits[1])


SIZES = 4096 << np.arange(9)


@given(st.floats(1e-11, 1e-7), st.floats(500, 4e6), st.integers(0, 8), st.sampled_from([1.0, 1.2, 2.0, 9.0]))
def test_break_even_of_a_line_with_one_slow_point(
    byte_s: float, ratio: float, odd: int, factor: float
) -> None:
    read_s = byte_s * (ratio + SIZES)
    read_s[odd] *= factor
    expected = min(ratio, float(SIZES[-1]))
    assert break_even_gap_bytes(SIZES, read_s) == pytest.approx(expected, rel=0.01, abs=1)


def test_break_even_of_a_real_device() -> None:
    """A virtual NVMe disk, full queue: the fixed cost of a read pays for some 8 KiB."""
    gb_per_s = np.array([0.46, 0.67, 0.91, 1.09, 1.23, 1.31, 1.31, 1.30, 1.33])
    assert 6_000 < break_even_gap_bytes(SIZES, SIZES / (gb_per_s * 1e9)) < 10_000


@pytest.mark.parametrize(
    ("sizes", "read_s", "expected"),
    [
        ([], [], 0),
        ([4096, 8192], [1.0, 1.1], 0),
        ([4096, 4096, 8192], [1.0, 1.0, 1.1], 0),
        ([4096, 8192, 16384], [1.0, 1.0, 1.0], 16384),  # a read costs the same whatever its size
        ([4096, 8192, 16384], [3.0, 2.0, 1.0], 16384),
        ([4096, 8192, 16384], [1.0, 2.0, 4.0], 0),  # bytes are all that costs
        ([4096, 8192, 16384], [1.0, 3.0, 7.0], 0),
    ],
)
def test_break_even_at_the_ends(sizes: list[int], read_s: list[float], expected: int) -> None:
    assert break_even_gap_bytes(sizes, read_s) == expected


@pytest.mark.parametrize(
    ("sizes", "read_s", "said"),
    [
        ([4096], [1.0, 2.0], "one time a size"),
        ([4096, 8192, 0], [1.0, 2.0, 3.0], "positive"),
        ([4096, 8192, 16384], [1.0, float("inf"), 3.0], "positive"),
        ([4096, 8192, 16384], [1.0, float("nan"), 3.0], "positive"),
    ],
)
def test_break_even_of_nonsense(sizes: list[int], read_s: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        break_even_gap_bytes(sizes, read_s)


def test_break_even_of_very_many_sizes() -> None:
    """As of few: a hundred thousand would take petabytes if all of them were paired."""
    sizes = np.random.default_rng(0).permutation(np.arange(1, 100_001) * 512)
    assert break_even_gap_bytes(sizes, 20e-6 + 0.4e-9 * sizes) == pytest.approx(50_000, abs=1)
    assert break_even_gap_bytes([4096] * 1000 + [8192, 16384], [1.0] * 1002) == 0
