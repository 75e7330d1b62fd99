"""One measurement: keep an engine's queue full for a moment and count.

::

    lane 0  |--batch--|--batch--|--batch--|
    lane 1       |--batch--|--batch--|--batch--|      the next batch waits while one is read,
    counted           [==================]            as in the daemon: the queue never runs dry

Counting begins when the first batch ends and stops when a batch ends after the time is up, so that
neither the start nor the drain of the queue is in the figure.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVarTuple

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.pieces import MAX_ALIGNMENT_BYTES
from flashd.layout.geometry import round_up
from flashd.store.base import WeightStore
from flashd.types import I64Array, U8Array

if TYPE_CHECKING:
    from _typeshed import HasFileno

_Ts = TypeVarTuple("_Ts")

# A batch has so many times the depth: one that is read while the next waits keeps the queue full.
_BATCH_DEPTHS = 4
_MIN_BATCH_READS = 64
# Beyond it a batch has fewer reads, but never less than fill the queue.
_MAX_BATCH_BYTES = 16 << 20


class MeteredLoop(asyncio.SelectorEventLoop):
    """An event loop that measures each of its callbacks while ``metered`` is on.

    Attributes:
        metered: whether to measure.
        max_cpu_ns: the most CPU time that one callback took on the loop's thread.
        max_wall_ns: the longest that one took by the clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metered = False
        self.max_cpu_ns = 0
        self.max_wall_ns = 0

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See ``AbstractEventLoop.call_soon``."""
        return super().call_soon(self._timed, callback, args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """See ``AbstractEventLoop.call_soon_threadsafe``."""
        return super().call_soon_threadsafe(self._timed, callback, args, context=context)

    def add_reader(self, fd: int | HasFileno, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """See ``AbstractEventLoop.add_reader``."""
        super().add_reader(fd, self._timed, callback, args)

    def _timed(self, callback: Callable[[*_Ts], object], args: tuple[*_Ts]) -> None:
        if not self.metered:
            callback(*args)
            return
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        try:
            callback(*args)
        finally:
            # The callback that ends the measurement goes on with other things.
            if self.metered:
                self.max_cpu_ns = max(self.max_cpu_ns, time.thread_time_ns() - cpu_ns)
                self.max_wall_ns = max(self.max_wall_ns, time.perf_counter_ns() - wall_ns)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure callbacks inside of the block, from zero."""
        self.max_cpu_ns = self.max_wall_ns = 0
        self.metered = True
        try:
            yield
        finally:
            self.metered = False


@dataclass(frozen=True)
class Sample:
    """What one measurement gave.

    Attributes:
        gb_per_s: 1e9 bytes a second, asked for and delivered.
        cpu_us_per_read: CPU time of the whole process for each read.
        max_callback_cpu_ms: the most CPU time that one callback took on the event loop.
        max_callback_wall_ms: the longest that one took by the clock.
        engine_bytes: read in the whole run, its start and drain included.
        direct: whether the engine passes the page cache by.
        kernel_bytes: what ``/proc/self/io`` counted meanwhile as read from devices; None if unknown.
    """

    gb_per_s: float
    cpu_us_per_read: float
    max_callback_cpu_ms: float
    max_callback_wall_ms: float
    engine_bytes: int
    direct: bool
    kernel_bytes: int | None


class Work(ABC):
    """Batches of reads that never end.

    Attributes:
        lanes: batches outstanding at once.
        batch_bytes: bytes of a batch.
        batch_reads: reads of a batch.
        memory: where they land, a part for each lane.
    """

    def __init__(self, lanes: int, batch_reads: int, batch_bytes: int) -> None:
        self.lanes = lanes
        self.batch_reads = batch_reads
        self.batch_bytes = batch_bytes
        self._slot_bytes = round_up(batch_bytes, MAX_ALIGNMENT_BYTES)
        self.memory = aligned_empty(lanes * self._slot_bytes, huge_pages=True)
        self.rng = np.random.default_rng(0)

    def part(self, lane: int) -> U8Array:
        """The lane's memory."""
        start = lane * self._slot_bytes
        return self.memory[start : start + self.batch_bytes]

    @abstractmethod
    async def batch(self, lane: int) -> None:
        """Read one batch."""


class RandomReads(Work):
    """Reads of any size at random multiples of it, straight through an engine."""

    def __init__(self, engine: ReadEngine, file_bytes: int, size_bytes: int, depth: int) -> None:
        reads = batch_reads(size_bytes, depth)
        super().__init__(2, reads, reads * size_bytes)
        self._engine = engine
        self._size_bytes = size_bytes
        self._places = file_bytes // size_bytes
        self._length = np.full(reads, size_bytes)
        self._dest = np.arange(reads) * size_bytes

    async def batch(self, lane: int) -> None:
        """See ``Work.batch``."""
        offset = self.rng.integers(self._places, size=self.batch_reads) * self._size_bytes
        await self._engine.read(ReadBatch(offset, self._length, self.part(lane), self._dest))


class RandomRows(Work):
    """Neurons of random layers through a store, as the daemon asks for them: ascending, and here
    without neighbours, so that each row is a read of its own."""

    def __init__(self, store: WeightStore, depth: int) -> None:
        geometry = store.geometry
        self._store = store
        self._layers = geometry.n_layers
        reads = max(1, min(batch_reads(geometry.stride_bytes, depth), geometry.n_neurons // 4))
        self._cell = geometry.n_neurons // reads
        # A small layer doesn't fill the queue: more layers at once do.
        super().__init__(max(2, -(-2 * depth // reads)), reads, reads * geometry.stride_bytes)

    async def batch(self, lane: int) -> None:
        """See ``Work.batch``."""
        layer = int(self.rng.integers(self._layers))
        out = self.part(lane).reshape(self.batch_reads, -1)
        await self._store.read_rows(layer, self.neurons(), out)

    def neurons(self) -> I64Array:
        """One of every ``cell`` neurons, never its last."""
        cells = np.arange(self.batch_reads) * self._cell
        return cells + self.rng.integers(max(1, self._cell - 1), size=self.batch_reads)


class Stream(Work):
    """Whole layers one after the other through a store, in slices as the streaming path reads them.

    Args:
        store: where the rows are.
        ring_bytes: memory of all slices.
        n_buffers: slices outstanding.
        piece_bytes: how large the reads are that an engine makes of a slice.
    """

    def __init__(self, store: WeightStore, ring_bytes: int, n_buffers: int, piece_bytes: int) -> None:
        geometry = store.geometry
        rows = max(1, min(ring_bytes // n_buffers // geometry.stride_bytes, geometry.n_neurons))
        nbytes = rows * geometry.stride_bytes
        super().__init__(n_buffers, -(-nbytes // piece_bytes), nbytes)
        self._store = store
        self._rows = rows
        self._next = 0

    async def batch(self, lane: int) -> None:
        """See ``Work.batch``."""
        geometry = self._store.geometry
        a_layer = geometry.n_neurons // self._rows
        layer, piece = divmod(self._next, a_layer)
        self._next = (self._next + 1) % (a_layer * geometry.n_layers)
        start = piece * self._rows
        out = self.part(lane).reshape(self._rows, -1)
        await self._store.read_range(layer, start, start + self._rows, out)


def batch_reads(size_bytes: int, depth: int) -> int:
    """Reads of a batch, so that two of them keep a queue of ``depth`` full."""
    wanted = max(_BATCH_DEPTHS * depth, _MIN_BATCH_READS)
    return max(min(wanted, _MAX_BATCH_BYTES // size_bytes), depth, 1)


async def measure(work: Work, engine: ReadEngine | None, seconds: float) -> Sample:
    """Run ``work`` for about ``seconds`` on a ``MeteredLoop``.

    Args:
        work: what to read.
        engine: whose counters tell what was read for it; None trusts what was asked for.
        seconds: how long.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MeteredLoop)
    work.memory[::4096] = 0  # touched now: page faults are not the device's
    clock = _Clock(seconds)

    def engine_bytes() -> int:
        return clock.total * work.batch_bytes if engine is None else engine.stats.bytes_read

    async def lane(index: int) -> None:
        while not clock.up:
            await work.batch(index)
            clock.batch_done()

    before, kernel_before = engine_bytes(), kernel_read_bytes()
    with loop.measuring():
        results = await asyncio.gather(*map(lane, range(work.lanes)), return_exceptions=True)
    for result in results:
        if result is not None:
            raise result
    kernel_after = kernel_read_bytes()
    known = kernel_before is not None and kernel_after is not None
    counted = clock.counted
    return Sample(
        gb_per_s=counted * work.batch_bytes / max(clock.wall_ns, 1),
        cpu_us_per_read=clock.cpu_ns / 1e3 / (counted * work.batch_reads),
        max_callback_cpu_ms=loop.max_cpu_ns / 1e6,
        max_callback_wall_ms=loop.max_wall_ns / 1e6,
        engine_bytes=engine_bytes() - before,
        direct=engine is not None and engine.direct,
        kernel_bytes=(kernel_after or 0) - (kernel_before or 0) if known else None,
    )


class _Clock:
    """Batches counted between the end of the first one and the first end after the time is up."""

    def __init__(self, seconds: float) -> None:
        self._until_ns = time.perf_counter_ns() + round(seconds * 1e9)
        self._from: tuple[int, int] | None = None
        self.up = False
        self.total = 0
        self.counted = 0
        self.wall_ns = 0
        self.cpu_ns = 0

    def batch_done(self) -> None:
        """Count a batch; the first starts the clock."""
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self.total += 1
        if self._from is None:
            self._from = now_ns, cpu_ns
        elif not self.up:
            self.counted += 1
            self.wall_ns, self.cpu_ns = now_ns - self._from[0], cpu_ns - self._from[1]
            self.up = now_ns >= self._until_ns


def kernel_read_bytes() -> int | None:
    """Bytes that this process's reads had devices deliver, by ``/proc/self/io``; None if unknown."""
    try:
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return None
