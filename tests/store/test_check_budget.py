"""The share of rows that is checked, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.store.check_budget import CAPACITY_NS, MAX_PAUSE_NS, SHARE, CheckBudget

ROW_BYTES = 10_000
ROW_NS = 1_000  # what checking one row takes here
BATCH = 300  # rows of a read


@dataclass
class Clock:
    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class Run:
    """Reads of ``n_rows`` rows at given times, and which of them were checked."""

    clock: Clock = field(default_factory=Clock)
    spent: list[tuple[int, int]] = field(default_factory=list)  # when, ns

    def __post_init__(self) -> None:
        self.budget = CheckBudget(self.clock)
        # One first read, so that the cost is known.
        self.budget.settle(ROW_NS * BATCH, ROW_BYTES * BATCH, must_bytes=ROW_BYTES * BATCH)

    def read(self, n_rows: int = BATCH) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        sample = self.budget.sample(n_rows, ROW_BYTES)
        checked = np.zeros(n_rows, np.bool_)
        checked[(sample.start + np.arange(sample.count)) % n_rows] = True
        assert np.count_nonzero(checked) == sample.count
        spent_ns = sample.count * ROW_NS
        if sample.count:
            self.budget.settle(spent_ns, sample.count * ROW_BYTES, reserved_ns=sample.reserved_ns)
        self.spent.append((self.clock.now_ns, spent_ns))
        return checked

    def spent_since(self, start_ns: int) -> int:
        return sum(ns for when, ns in self.spent if when >= start_ns)


def full() -> Run:
    """With a bucket that nobody has taken from for a while."""
    run = Run()
    for _ in range(20):
        run.clock.now_ns += MAX_PAUSE_NS
        run.budget.sample(0, ROW_BYTES)
    return run


def batch_every(share: float) -> int:
    """Time between two reads in which checking all of it costs this share."""
    return int(BATCH * ROW_NS / share)


def test_all_rows_are_checked_where_that_costs_less_than_the_share() -> None:
    run = Run()
    every_ns = batch_every(SHARE * 0.8)
    seen = []
    for _ in range(1000):
        run.clock.now_ns += every_ns
        seen.append(bool(run.read().all()))
    first = seen.index(True)
    assert all(seen[-500:])
    # Reads in bursts are no reason to leave rows out.
    for _ in range(20):
        run.clock.now_ns += 5 * every_ns
        assert all(run.read().all() for _ in range(5))
    assert first < 500


def test_else_as_many_as_the_share_pays_for() -> None:
    run = Run()
    every_ns = batch_every(SHARE * 5)
    n_checked = []
    for _ in range(4000):
        run.clock.now_ns += every_ns
        n_checked.append(np.count_nonzero(run.read()))
    steady = n_checked[1000:]
    assert np.mean(steady) == pytest.approx(BATCH / 5, rel=0.02)
    assert run.spent_since(0) <= SHARE * run.clock.now_ns + CAPACITY_NS


@pytest.mark.parametrize("together", [1, 2, 5])
def test_every_row_of_every_read_has_the_same_chance(together: int) -> None:
    """Also a read that always arrives at the same moment as another, after it."""
    run = Run()
    every_ns = batch_every(SHARE * 4)
    counts = np.zeros((together, BATCH))
    rounds = 2000
    for round_ in range(rounds + 500):
        run.clock.now_ns += every_ns * together
        for i in range(together):
            checked = run.read()
            if round_ >= 500:
                counts[i] += checked
    share = counts / rounds
    assert share.mean() == pytest.approx(0.25, rel=0.03)
    of_read = share.mean(axis=1, keepdims=True)
    assert of_read == pytest.approx(0.25, rel=0.1)
    # Six standard deviations of 2000 draws.
    assert (np.abs(share - of_read) < 6 * (0.25 * 0.75 / rounds) ** 0.5).all()


def test_reads_of_single_rows_are_sampled_too() -> None:
    run = Run()
    every_ns = int(ROW_NS / (SHARE * 5))
    n_checked = 0
    for _ in range(60_000):
        run.clock.now_ns += every_ns
        n_checked += int(run.read(1).sum())
    assert n_checked * ROW_NS == pytest.approx(SHARE * run.clock.now_ns - run.budget.level_ns)
    assert n_checked > 9000


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 3 * MAX_PAUSE_NS), st.integers(1, 50_000)), min_size=2, max_size=60))
def test_no_stretch_of_time_costs_more_than_the_bucket_and_its_share(
    reads: list[tuple[int, int]],
) -> None:
    run = Run()
    for passed_ns, n_rows in reads:
        run.clock.now_ns += passed_ns
        run.read(n_rows)
    for start_ns, _ in run.spent:
        stretch = run.clock.now_ns - start_ns
        # A row at each read: what is rounded up.
        assert run.spent_since(start_ns) <= CAPACITY_NS + SHARE * stretch + ROW_NS * len(reads)


def test_one_read_takes_no_more_than_the_bucket_holds() -> None:
    run = full()
    run.read(10 * CAPACITY_NS // ROW_NS)
    assert 0.99 * CAPACITY_NS <= run.spent_since(0) <= CAPACITY_NS + ROW_NS


def test_a_pause_earns_no_more_than_a_slow_step() -> None:
    """Else the first step after a quiet hour would check everything, whatever it costs."""
    run = Run()
    run.clock.now_ns += 3_600_000_000_000
    began_ns = run.clock.now_ns
    for _ in range(100):
        run.read()
    assert 0 < run.spent_since(began_ns) <= SHARE * MAX_PAUSE_NS + ROW_NS


def test_first_reads_take_what_there_is_and_leave_no_debt() -> None:
    run = full()
    assert run.budget.level_ns == CAPACITY_NS
    run.budget.settle(10 * CAPACITY_NS, 10_000 * ROW_BYTES, must_bytes=10_000 * ROW_BYTES)
    assert run.budget.level_ns == 0
    assert not run.read().any()
    run.clock.now_ns += MAX_PAUSE_NS
    assert run.read().any()


def test_the_cost_follows_what_is_measured() -> None:
    run = Run()
    assert run.budget.ns_per_byte == pytest.approx(ROW_NS / ROW_BYTES)
    for _ in range(100):
        run.budget.settle(7 * ROW_BYTES, ROW_BYTES, must_bytes=ROW_BYTES)
    assert run.budget.ns_per_byte == pytest.approx(7, rel=0.01)


def test_a_check_that_takes_longer_than_reserved_is_paid_for() -> None:
    run = full()
    sample = run.budget.sample(BATCH, ROW_BYTES)
    assert sample.count == BATCH
    run.budget.settle(3 * CAPACITY_NS, BATCH * ROW_BYTES, reserved_ns=sample.reserved_ns)
    assert run.budget.level_ns == pytest.approx(-2 * CAPACITY_NS)
    run.clock.now_ns += MAX_PAUSE_NS
    assert not run.read().any()


def test_checks_that_take_no_time_at_all() -> None:
    """By a clock that is too coarse for them; or of nothing."""
    clock = Clock()
    budget = CheckBudget(clock)
    budget.settle(0, 1000)
    budget.settle(0, 0)
    assert budget.sample(10, 512).count <= 1
    clock.now_ns += MAX_PAUSE_NS * 100
    for _ in range(20):
        clock.now_ns += MAX_PAUSE_NS
        budget.settle(0, 0)
    assert budget.sample(10, 512).count == 10
