"""Where a step's time went, from the counters of the rooms below."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns

from flashd.stats import CostHistograms, LaneStats, StoreStats, StreamStats


@dataclass(frozen=True)
class Reading:
    """All counters at one moment, in ns."""

    wall: int
    flash_wait: int
    flash_busy: int
    memory: int
    compute: int


class CostClock:
    """Splits a step into flash_wait + memory + compute + overhead; flash_busy runs beside them."""

    def __init__(self, store: StoreStats, stream: StreamStats, lane: LaneStats) -> None:
        self._store = store
        self._stream = stream
        self._lane = lane

    def read(self) -> Reading:
        """Counters now."""
        return Reading(
            perf_counter_ns(),
            self._stream.wait_ns,
            self._store.busy_ns,
            self._lane.memory_ns,
            self._lane.compute_ns,
        )

    def observe(self, costs: CostHistograms, start: Reading) -> None:
        """Count the step that began at ``start`` and ends now."""
        end = self.read()
        step = end.wall - start.wall
        wait = end.flash_wait - start.flash_wait
        memory = end.memory - start.memory
        compute = end.compute - start.compute
        costs.step_s.observe(step / 1e9)
        costs.flash_wait_s.observe(wait / 1e9)
        costs.flash_busy_s.observe((end.flash_busy - start.flash_busy) / 1e9)
        costs.memory_s.observe(memory / 1e9)
        costs.compute_s.observe(compute / 1e9)
        # Clocks are read at slightly different moments: a tiny negative rest is rounding.
        costs.overhead_s.observe(max(0, step - wait - memory - compute) / 1e9)
