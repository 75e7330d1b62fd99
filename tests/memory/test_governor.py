"""What weights get while other programs take memory and give it back, on a simulated machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashd.memory.account import Beside, MemoryAccount
from flashd.memory.budget import Demand
from flashd.memory.governor import (
    GROW_BYTES_PER_S,
    HOLD_S,
    POLL_S,
    RAMP_BYTES_PER_S,
    SHORT_POLL_S,
    Decision,
    Governor,
    reserve_bytes,
)
from flashd.memory.system import Reading
from flashd.types import FFNGeometry

MB = 1 << 20
GEOMETRY = FFNGeometry(n_layers=24, n_neurons=8192, d_model=2048, gated=False, dtype="f16", stride_bytes=8192)
DEMAND = Demand(GEOMETRY, 1000 * MB, 16 * MB, [True] * 24, [[800 + 60 * k for k in range(64)]] * 24)
BESIDE = Beside(100 * MB, 40 * MB, 200_000, 2048)
FIXED = BESIDE.fixed_bytes
LIMIT = 2000 * MB
STEP_S = 0.2


class Machine:
    """A cgroup with this process, which does at once what it is told, and a neighbour."""

    def __init__(self, asked_bytes: int | None = None, limit_bytes: int = LIMIT) -> None:
        self.limit_bytes = limit_bytes
        self.now_s = 0.0
        self.stalled: float | None = 0.0
        self.other_bytes = 0
        self.lowest = limit_bytes
        account = MemoryAccount(DEMAND, BESIDE, asked_bytes)
        account.ceiling_bytes = limit_bytes - reserve_bytes(limit_bytes, STEP_S)
        self.governor = Governor(account, account.weights_bytes(0.0))
        self.changes: list[tuple[float, Decision]] = []

    @property
    def footprint_bytes(self) -> int:
        return FIXED + self.governor.weights_bytes

    def look(self) -> Decision | None:
        available = self.limit_bytes - self.footprint_bytes - self.other_bytes
        self.lowest = min(self.lowest, available)
        reading = Reading(
            self.now_s, max(0, available), self.limit_bytes, "/group", self.footprint_bytes, self.stalled
        )
        decision = self.governor.observe(reading, STEP_S)
        if decision is not None:
            self.changes.append((self.now_s, decision))
        return decision

    def run(self, seconds: float, other_bytes: Callable[[float], float] = lambda s: 0) -> None:
        began_s = self.now_s
        while self.now_s - began_s < seconds:
            self.other_bytes = int(other_bytes(self.now_s - began_s))
            self.look()
            self.now_s += self.governor.poll_s


def test_a_steady_machine_has_a_steady_window() -> None:
    machine = Machine()
    machine.run(300)
    assert machine.changes == []
    assert machine.governor.poll_s == SHORT_POLL_S  # all is used but the reserve


def test_what_was_asked_for_is_never_exceeded_and_nothing_moves() -> None:
    machine = Machine(asked_bytes=1700 * MB)
    machine.run(60, lambda s: 30 * MB * (int(s) % 2))
    assert machine.changes == []
    assert machine.footprint_bytes <= 1700 * MB
    assert machine.governor.poll_s == POLL_S


def test_a_ramp_takes_memory_step_by_step_and_gets_it_back() -> None:
    machine = Machine()
    start = machine.governor.weights_bytes

    def ramp(s: float) -> float:
        return min(0.15 * LIMIT, 50e6 * s) if s < 12 else 0

    machine.run(11, ramp)
    low = machine.governor.weights_bytes
    assert low < start - 0.12 * LIMIT  # half of the reserve takes the rest
    assert {decision.reason for _, decision in machine.changes} == {"pressure"}
    assert machine.lowest > 0.25 * machine.governor.reserve_bytes
    machine.changes.clear()
    machine.run(30)
    assert machine.governor.weights_bytes > 0.97 * start
    assert {decision.reason for _, decision in machine.changes} == {"room"}
    # Slowly: not before it has held for a while, and no faster than this.
    assert machine.changes[0][0] >= 11 + HOLD_S
    for (before_s, _), (at_s, decision) in zip(machine.changes, machine.changes[1:], strict=False):
        grown = decision.weights_bytes - decision.before_bytes
        assert 0 < grown <= GROW_BYTES_PER_S * (at_s - before_s) + 1


def test_the_stated_ramp_is_survived_at_any_phase() -> None:
    for phase in range(10):
        machine = Machine()
        machine.run(phase * 0.05)
        machine.run(20, lambda s: min(600 * MB, RAMP_BYTES_PER_S * s))
        assert machine.lowest > 0


def test_a_square_wave_moves_the_window_at_most_once_a_period() -> None:
    """Two seconds: half of it with pressure."""
    machine = Machine()
    machine.run(60, lambda s: 150 * MB if s % 2 < 1 else 0)
    moves = [at_s for at_s, _ in machine.changes]
    for period in range(30):
        assert sum(2 * period <= at_s < 2 * period + 2 for at_s in moves) <= 1
    assert len(moves) <= 2  # in fact it stays where the pressure has put it


def test_little_noise_moves_nothing() -> None:
    machine = Machine()
    machine.run(120, lambda s: 0.2 * machine.governor.reserve_bytes * ((7 * s) % 1))
    assert machine.changes == []


def test_nothing_grows_while_somebody_waits_for_memory() -> None:
    machine = Machine()
    machine.run(10, lambda s: 300 * MB)
    machine.changes.clear()
    machine.stalled = 0.5
    machine.run(20)
    assert machine.changes == []
    machine.stalled = None  # a kernel that says nothing
    machine.run(20)
    assert machine.changes


def test_what_a_step_needs_is_kept_whatever_happens() -> None:
    machine = Machine()
    machine.run(10, lambda s: 1900 * MB)
    assert machine.governor.weights_bytes == DEMAND.least_bytes
    assert machine.governor.account.most_kv_bytes() == 0  # nobody is admitted
    count = len(machine.changes)
    machine.run(10, lambda s: 1900 * MB)
    assert len(machine.changes) == count


def test_sequences_take_from_the_window_at_once() -> None:
    machine = Machine(asked_bytes=1800 * MB)
    machine.run(1)
    before = machine.governor.weights_bytes
    account = machine.governor.account
    account.count_kv(100 * MB, 100 * MB, machine.now_s)
    decision = machine.governor.recount(machine.now_s)
    assert decision is not None
    assert decision.reason == "sequences"
    assert decision.weights_bytes == before - (100 * MB - BESIDE.least_kv_bytes)
    assert machine.governor.recount(machine.now_s) is None


def test_a_process_that_takes_more_than_it_says_has_less_for_weights() -> None:
    account = MemoryAccount(DEMAND, BESIDE, asked_bytes=1700 * MB)
    governor = Governor(account, account.weights_bytes(0.0))
    reading = Reading(0.0, 5000 * MB, 24_000 * MB, "system", 1700 * MB + 80 * MB, None)
    decision = governor.observe(reading, STEP_S)
    assert decision is not None
    assert decision.weights_bytes == decision.before_bytes - 80 * MB


@pytest.mark.parametrize(
    ("limit_bytes", "step_s", "expected"),
    [(24 << 30, 0.1, int(0.05 * (24 << 30))), (1 << 30, 2.0, int(2 * RAMP_BYTES_PER_S * (POLL_S + 2.0)))],
)
def test_the_reserve_is_a_share_or_what_a_ramp_takes(limit_bytes: int, step_s: float, expected: int) -> None:
    assert reserve_bytes(limit_bytes, step_s) == expected
