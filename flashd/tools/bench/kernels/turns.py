"""Who is measured, and one sample of it: calls on the next pieces of cold memory, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from flashd.tools.bench.kernels.memory import Arena

Call = Callable[[], object]

_MAX_CALLS = 100_000
_TRIES = 2
# Calls of a sample of which the best counts: so many, or fewer where they take longer than that together.
_BEST_OF = 5
_BEST_OF_AT_LEAST = 3
_BEST_OF_S = 0.1


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
        best: whether the best of them counts, not all together.
        call_s: what a call took when it was tried.
        seconds, gb_per_s: of a call, and speed, sample by sample.
    """

    calls: Sequence[Call]
    nbytes: int
    counted: Sequence[float]
    foreign: bool = False
    count: int = 1
    best: bool = False
    call_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)

    def calibrate(self, arena: Arena, sample_s: float) -> None:
        """Find out how many calls take about ``sample_s``; the first call is not timed.

        Where it is 0, a sample is the best of a few calls: rough, but nothing that happens once
        (a thread that wakes up late) makes it absurd.
        """
        first, *tries = arena.take(self.nbytes, 1 + _TRIES)
        self.calls[first]()
        self.call_s = min(later - sooner for sooner, later in pairwise(self._clock(tries))) / 1e9
        self.best = not sample_s
        if not self.best:
            self.count = max(1, min(round(sample_s / self.call_s), _MAX_CALLS))
        elif self.call_s * _BEST_OF > _BEST_OF_S:
            self.count = _BEST_OF_AT_LEAST
        else:
            self.count = _BEST_OF

    def sample(self, arena: Arena, settle_s: float) -> None:
        """Measure once. The call before the clock starts wakes the threads."""
        first, *turn = arena.take(self.nbytes, self.count + 1)
        self.calls[first]()
        if self.best:
            spent = [later - sooner for sooner, later in pairwise(self._clock(turn))]
            gb_per_s, spent_ns = max((self.counted[i] / ns, -ns) for i, ns in zip(turn, spent, strict=True))
            self.seconds.append(-spent_ns / 1e9)
            self.gb_per_s.append(gb_per_s)
        else:
            calls = [self.calls[i] for i in turn]
            start_ns = time.perf_counter_ns()
            for call in calls:
                call()
            all_ns = max(time.perf_counter_ns() - start_ns, 1)
            self.seconds.append(all_ns / 1e9 / len(turn))
            self.gb_per_s.append(sum(self.counted[i] for i in turn) / all_ns)
        if self.foreign:
            time.sleep(settle_s)

    def _clock(self, turn: Sequence[int]) -> list[int]:
        """Times before, between and behind some calls, each at least 1 ns after the one before."""
        times = [time.perf_counter_ns()]
        for i in turn:
            self.calls[i]()
            times.append(max(time.perf_counter_ns(), times[-1] + 1))
        return times
