"""How much of the CPUs other programs took while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

_ROOT = Path("/")
# user, nice, system, irq, softirq and steal; guests are in user and nice already.
_BUSY = (0, 1, 2, 5, 6, 7)


class Others:
    """From when it was made, what ran beside this process on the CPUs that it may use.

    A library that splits its work into equal parts beforehand waits for the part on the CPU that somebody
    else uses; one whose threads take small parts one by one loses only what the other takes.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._start = self._now()

    def cpus(self) -> float | None:
        """Mean number of CPUs that others kept busy; None where the kernel does not count it."""
        busy_s, own_s, now_s = (
            after - before for after, before in zip(self._now(), self._start, strict=True)
        )
        if self._start[0] == 0.0 or now_s <= 0.0:
            return None
        return max(0.0, busy_s - own_s) / now_s

    def _now(self) -> tuple[float, float, float]:
        """Seconds: all CPUs' together, this process's, the clock's."""
        return self._busy_s(), time.process_time(), time.perf_counter()

    def _busy_s(self) -> float:
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
        except OSError:
            return 0.0
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [fields[1:] for fields in map(str.split, lines) if fields and fields[0] in usable]
        ticks = sum(int(row[i]) for row in rows for i in _BUSY if i < len(row))
        return ticks / os.sysconf("SC_CLK_TCK")
