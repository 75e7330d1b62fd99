"""What a plan is computed from: facts of the bundle, and times measured on this machine."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """How long something takes, in seconds, by kind of work: their sum is the time by the clock.

    Attributes:
        wait_s: nothing is computed, because reads are started or missing.
        memory_s: upkeep of window and KV cache.
        compute_s: kernels.
        overhead_s: the rest.
    """

    wait_s: float = 0.0
    memory_s: float = 0.0
    compute_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        """By the clock."""
        return self.wait_s + self.memory_s + self.compute_s + self.overhead_s

    def __add__(self, other: Times) -> Times:
        return Times(
            self.wait_s + other.wait_s,
            self.memory_s + other.memory_s,
            self.compute_s + other.compute_s,
            self.overhead_s + other.overhead_s,
        )

    def __mul__(self, times: float) -> Times:
        return Times(
            self.wait_s * times, self.memory_s * times, self.compute_s * times, self.overhead_s * times
        )


@dataclass(frozen=True)
class RowTimes:
    """How long a batch of scattered rows of one layer takes with nothing else to do: from its submission to
    its last row.

    Attributes:
        rows: sizes of batches that were measured, ascending.
        seconds: of each.
        handling_s: what the lane itself does for a batch: it starts it, and takes note of its end.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    handling_s: float

    def at(self, n_rows: float) -> float:
        """Seconds of a batch of any size; between two that were measured a straight line, beyond them the
        last rows' time for each."""
        if n_rows <= 0:
            return 0.0
        place = bisect_left(self.rows, n_rows)
        if place == 0:
            # A batch smaller than all takes a read's latency at least: what a few rows take.
            return self.seconds[0] if n_rows >= 1 else n_rows * self.seconds[0]
        if place == len(self.rows):
            return self.seconds[-1] * n_rows / self.rows[-1]
        low, high = self.rows[place - 1], self.rows[place]
        share = (n_rows - low) / (high - low)
        return self.seconds[place - 1] * (1 - share) + self.seconds[place] * share


@dataclass(frozen=True)
class Measured:
    """Times on this machine, of this model's shapes and through this bundle's files.

    Attributes:
        step: of each step once: embeddings, output projection, changes of threads.
        masked: of a layer with a mask whose requested rows are all in RAM; None without such layers.
        resident: of a layer without one that is in RAM as a whole; None without such layers.
        streamed: of a layer without one that is streamed, reads and computing overlapped; likewise.
        streamed_busy_s: of that, the time with a read outstanding.
        rows: of scattered rows; None where nothing is read by rows.
        stream_s: reading a whole layer in one go; None where nothing is read.
        compute_share: speed of computing beside reads, of its speed alone; 1 is undisturbed.
        flash_share: speed of reads beside computing, likewise.
    """

    step: Times
    masked: Times | None
    resident: Times | None
    streamed: Times | None
    streamed_busy_s: float
    rows: RowTimes | None
    stream_s: float | None
    compute_share: float
    flash_share: float
