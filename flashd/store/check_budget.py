"""How many rows to check at a read: a pure policy, which neither reads nor waits.

Checking may cost 2 % of a step. The store knows no steps, but their time is the time that passes
while rows keep coming, so a bucket earns its share of that. The fuller the bucket, the larger the
share of rows that is checked: where all fit it stays full and every row is checked; where not, it
settles at the level whose share of the rows costs just what comes in. As it moves slowly compared
with single reads, a read that happens to arrive right behind another gets the same share as it did.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

# What sums may take of the 2 %. The rest is for choosing rows, some 10 us a read.
SHARE = 0.016
# Some second's earnings. Above half of it everything is checked, so reads may come in bursts.
CAPACITY_NS = 20_000_000
_ALL_NS = CAPACITY_NS / 2
# A longer pause between two reads is nobody's step: the daemon had nothing to do.
MAX_PAUSE_NS = 100_000_000
# Until something has been measured; on the safe side for every processor.
UNKNOWN_NS_PER_BYTE = 20.0
# Each measurement leaves so much of the older ones' weight.
_MEMORY = 0.9


@dataclass(slots=True)
class Sample:
    """``count`` rows from ``start`` on, going on at 0 behind the last row, and what they may cost."""

    start: int
    count: int
    reserved_ns: float


class CheckBudget:
    """A bucket of nanoseconds to spend on checks that could also be left out.

    Args:
        clock_ns: what time it is.
        seed: of the choice of rows.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns, seed: int = 0) -> None:
        self._clock_ns = clock_ns
        self._random = random.Random(seed)
        self._level_ns = 0.0
        self._earned_until_ns = clock_ns()
        self._measured_ns = 0.0
        self._measured_bytes = 0.0

    @property
    def level_ns(self) -> float:
        """What is in the bucket; below 0 by what checks took longer than expected."""
        return self._level_ns

    @property
    def ns_per_byte(self) -> float:
        """What checking costs, lately."""
        return self._measured_ns / self._measured_bytes if self._measured_bytes else UNKNOWN_NS_PER_BYTE

    def sample(self, n_rows: int, row_bytes: int) -> Sample:
        """Choose which of ``n_rows`` rows that have been read to check, each with the same
        probability, and reserve what that costs. They lie side by side: one call sums them."""
        self._earn()
        row_ns = row_bytes * self.ns_per_byte
        level_ns = max(0.0, self._level_ns)
        affordable = n_rows * min(1.0, level_ns / _ALL_NS)
        if row_ns > 0:  # a coarse clock may have measured nothing at all
            affordable = min(affordable, level_ns / row_ns)
        # Rounded up as often as the fraction says: else a read of a few rows would never be checked.
        count = min(n_rows, int(affordable + self._random.random()))
        self._level_ns -= count * row_ns
        return Sample(int(self._random.random() * n_rows), count, count * row_ns)

    def settle(self, spent_ns: int, n_bytes: int, must_bytes: int = 0, reserved_ns: float = 0.0) -> None:
        """Say what a check took.

        Args:
            spent_ns: CPU time.
            n_bytes: what was checked.
            must_bytes: how much of it had to be, sampled or not. It takes what is in the bucket but
                leaves no debt: steps after a first pass over the rows shall not go unchecked for it.
            reserved_ns: of the sample that was checked.
        """
        self._earn()
        self._measured_ns = self._measured_ns * _MEMORY + spent_ns
        self._measured_bytes = self._measured_bytes * _MEMORY + n_bytes
        must_ns = spent_ns * must_bytes / n_bytes if n_bytes else 0.0
        level_ns = self._level_ns + reserved_ns - (spent_ns - must_ns)
        self._level_ns = min(CAPACITY_NS, level_ns, max(0.0, level_ns - must_ns))

    def _earn(self) -> None:
        now_ns = self._clock_ns()
        passed_ns = min(now_ns - self._earned_until_ns, MAX_PAUSE_NS)
        self._level_ns = min(CAPACITY_NS, self._level_ns + SHARE * passed_ns)
        self._earned_until_ns = now_ns
