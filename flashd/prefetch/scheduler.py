"""Reads of scattered rows in flight: who waits for them, and how they ended. All of it on the compute lane.

The lane plans reads, starts them and waits for them by itself, without the GIL: between two layers the event
loop has nothing to do with them::

    lane  : plan, start demand(i), prefetch(i+1) | dots of rows in RAM | wait for demand(i) | ...
    flash :              [demand i ..............................][prefetch i+1 ...]
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from flashd import kernels
from flashd.disk.engine import ReadTicket
from flashd.kernels.lane import ComputeLane
from flashd.stats import StreamStats
from flashd.store.base import WeightStore
from flashd.types import I64Array, U8Array

# So much later than it is closed, the lane gives up waiting for a device that hangs.
_PATIENCE_S = 0.5


@dataclass(eq=False)
class RowRead:
    """One batch of rows of a layer.

    Attributes:
        layer: layer index.
        ids: ``[m]``, neurons.
        rows: ``[m]``, rows of the pool.
        prefetch: a guess: gives way to reads that are needed now.
        ticket: what to wait for; None once it has ended.
        error: why it failed, once it has.
    """

    layer: int
    ids: I64Array
    rows: I64Array
    prefetch: bool
    ticket: ReadTicket | None = None
    error: Exception | None = None


class RowReads:
    """The reads in flight into one matrix.

    Args:
        store: where rows are; stays the caller's to close.
        matrix: ``[n_rows, stride_bytes]``, where they go.
        lane: where everything but ``drain`` is called.
        stats: counts the time that computing waits.

    Attributes:
        open: reads whose end has not been told.
    """

    def __init__(self, store: WeightStore, matrix: U8Array, lane: ComputeLane, stats: StreamStats) -> None:
        self.open: list[RowRead] = []
        self._store = store
        self._matrix = matrix
        self._lane = lane
        self._stats = stats

    def start(self, read: RowRead, loop: asyncio.AbstractEventLoop) -> RowRead:
        """Start a read; counts as waiting for flash. Where the store refuses it, it has ended with an error.

        To be called inside of ``ComputeLane.memory_work``.
        """
        self.open.append(read)
        since_ns = time.perf_counter_ns()
        kernels.rest()  # the thread that reads is woken
        try:
            read.ticket = self._store.start_rows(
                read.layer, read.ids, self._matrix, read.rows, loop, prefetch=read.prefetch
            )
        except Exception as exc:
            read.error = exc
        spent_ns = time.perf_counter_ns() - since_ns
        self._stats.wait_ns += spent_ns
        self._lane.stats.memory_ns -= spent_ns
        return read

    def wait(self, read: RowRead) -> None:
        """Wait until a read has ended, well or not; counts as waiting for flash.

        Args:
            read: one of the open ones, or one that has ended.

        Raises:
            RuntimeError: the lane was closed meanwhile.
        """
        if read.ticket is None:
            return
        since_ns = time.perf_counter_ns()
        while not self._over(read, _PATIENCE_S):
            if self._lane.closed:
                break
        spent_ns = time.perf_counter_ns() - since_ns
        self._stats.wait_ns += spent_ns
        self._lane.stats.compute_ns -= spent_ns
        if read.ticket is not None:
            raise RuntimeError("the compute lane was closed while it waited for a read")

    def ended(self) -> list[RowRead]:
        """Reads that have ended since the last time, failed or not; each is told once. Counts as waiting for
        flash; to be called inside of ``ComputeLane.memory_work``."""
        if not self.open:
            return []
        since_ns = time.perf_counter_ns()
        over = [read for read in self.open if self._over(read, 0.0)]
        spent_ns = time.perf_counter_ns() - since_ns
        self._stats.wait_ns += spent_ns
        self._lane.stats.memory_ns -= spent_ns
        if over:
            self.open = [read for read in self.open if read.ticket is not None]
        return over

    def _over(self, read: RowRead, timeout_s: float) -> bool:
        """Whether a read has ended, or ends within some time."""
        if read.ticket is None:
            return True
        try:
            if not read.ticket.wait(timeout_s):
                return False
        except Exception as exc:
            read.error = exc
        read.ticket = None
        return True

    async def drain(self) -> None:
        """Wait for everything in flight."""
        await self._lane.run(self._wait_for_all)

    def _wait_for_all(self) -> None:
        for read in self.open:
            self.wait(read)
