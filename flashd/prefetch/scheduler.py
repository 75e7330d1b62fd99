"""Reads of scattered rows in flight: who started them, who waits for them, and how they ended.

The lane plans reads and the event loop submits them, while the lane goes on computing. What has ended
is told to the lane, which alone changes the window's tables, when it asks the next time::

    lane  : plan | dots of rows in RAM ........ | settle, plan | ...
    loop  :        submit   wait for rows -> ended
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from flashd.stats import StreamStats
from flashd.store.base import WeightStore
from flashd.types import I64Array, U8Array


@dataclass(eq=False)
class RowRead:
    """One batch of rows of a layer.

    Attributes:
        layer: layer index.
        ids: ``[m]``, neurons.
        rows: ``[m]``, rows of the pool.
        prefetch: a guess: gives way to reads that are needed now.
        task: the read, from when it was submitted.
        error: why it failed, once it has.
    """

    layer: int
    ids: I64Array
    rows: I64Array
    prefetch: bool
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    error: BaseException | None = None


class RowReads:
    """The reads in flight into one matrix.

    Args:
        store: where rows are; stays the caller's to close.
        matrix: ``[n_rows, stride_bytes]``, where they go.
        stats: counts the time that computing waits.
    """

    def __init__(self, store: WeightStore, matrix: U8Array, stats: StreamStats) -> None:
        self._store = store
        self._matrix = matrix
        self._stats = stats
        self._in_flight: set[asyncio.Task[None]] = set()
        self._ended: deque[RowRead] = deque()

    def submit_from_lane(self, read: RowRead, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop submit a read soon; those of one lane call in the order given. Whoever gets the
        result of that call on the loop finds them submitted."""
        loop.call_soon_threadsafe(self._submit, read)

    def ended(self) -> list[RowRead]:
        """Reads that have ended since the last time, failed or not; each is told once."""
        some = []
        while self._ended:
            some.append(self._ended.popleft())
        return some

    async def wait(self, read: RowRead) -> None:
        """Wait until a read has ended, well or not; counts as waiting for flash. Cancelling the wait
        leaves the read alone, because it cannot be taken back."""
        assert read.task is not None, "waited for before it was submitted"
        if read.task.done():
            return
        since_ns = time.perf_counter_ns()
        try:
            await asyncio.shield(read.task)
        finally:
            self._stats.wait_ns += time.perf_counter_ns() - since_ns

    async def drain(self) -> None:
        """Wait for everything in flight."""
        if self._in_flight:
            await asyncio.wait(set(self._in_flight))

    def _submit(self, read: RowRead) -> None:
        read.task = asyncio.get_running_loop().create_task(self._read(read))
        self._in_flight.add(read.task)

    async def _read(self, read: RowRead) -> None:
        """Never raises what the store raises: a read that nobody waits for has nobody to tell."""
        try:
            await self._store.read_rows(read.layer, read.ids, self._matrix, read.rows, prefetch=read.prefetch)
        except BaseException as exc:
            read.error = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            task = read.task
            assert task is not None
            self._in_flight.discard(task)
            self._ended.append(read)
