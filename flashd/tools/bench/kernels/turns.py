"""Who is measured, and one sample of it: calls on the next pieces of cold memory, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flashd.tools.bench.kernels.memory import Arena

Call = Callable[[], object]

_MAX_CALLS = 100_000


@dataclass
class Subject:
    """Somebody who takes turns.

    Args:
        calls: one for each piece of the arena.
        nbytes: of a piece; 0 for a call that reads nothing of the arena.
        counted: bytes that each call has to read once.
        foreign: whether threads of another library run, which look for more work for some time after it.

    Attributes:
        count: calls of a sample.
        seconds, gb_per_s: of a call, and speed, sample by sample.
    """

    calls: Sequence[Call]
    nbytes: int
    counted: Sequence[float]
    foreign: bool = False
    count: int = 1
    seconds: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)

    def calibrate(self, arena: Arena, sample_s: float) -> None:
        """Find out how many calls take about ``sample_s``, 0 being one; the first call is not timed."""
        first, second = arena.take(self.nbytes, 2)
        self.calls[first]()
        if not sample_s:
            return
        start_s = time.perf_counter()
        self.calls[second]()
        spent_s = max(time.perf_counter() - start_s, 1e-9)
        self.count = max(1, min(round(sample_s / spent_s), _MAX_CALLS))

    def sample(self, arena: Arena, settle_s: float) -> None:
        """Measure once. The call before the clock starts wakes the threads."""
        first, *turn = arena.take(self.nbytes, self.count + 1)
        calls = [self.calls[i] for i in turn]
        self.calls[first]()
        start_ns = time.perf_counter_ns()
        for call in calls:
            call()
        spent_ns = max(time.perf_counter_ns() - start_ns, 1)
        self.seconds.append(spent_ns / 1e9 / len(turn))
        self.gb_per_s.append(sum(self.counted[i] for i in turn) / spent_ns)
        if self.foreign:
            time.sleep(settle_s)
