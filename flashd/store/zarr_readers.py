"""The three ways to the rows of one zarr array: in place, decoded, or by zarr itself.

Raw rows are ranges of a file, which the disk engine reads where they belong::

    shard    |chunk 0|chunk 1|chunk 2|...|index|      one extent, as long as chunks follow each other
    wanted       [##########]                         one read

A packed chunk is read whole and decoded in a worker thread. What only zarr understands, it reads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import MAX_DESTINATIONS, SKIP, ReadBatch, ReadEngine
from flashd.disk.files import max_open_files
from flashd.errors import BundleCorruptError, DiskReadError, FlashdError
from flashd.layout.coalesce import plan_rows
from flashd.store.bundle_file import MAX_READ_BYTES
from flashd.store.zarr_chunks import NO_FILE, ChunkTable, Extents, Runs, extents_of, split_runs
from flashd.types import BoolArray, I64Array, U8Array

if TYPE_CHECKING:  # it imports zarr
    from flashd.store.zarr_codecs import ZarrArray, ZarrThreads


# A batch of more files than this waits for others of its kind, so that all of them together keep
# about max_open_files() open.
_FEW_FILES = 32
# Zeros that the event loop writes at a time.
_FILL_BYTES = 1 << 20


class Cancel:
    """Whether a call was cancelled, or failed in one place: what has not begun is dropped."""

    stopped = False


class ChunkFiles:
    """The files of all chunks, and the engine that reads them.

    Attributes:
        engine: closed by who opened it.
    """

    def __init__(self, engine: ReadEngine) -> None:
        self.engine = engine
        self._all_open = len(engine.paths) <= max_open_files()
        self._many = asyncio.Lock()

    async def read(self, batch: ReadBatch, prefetch: bool = False) -> None:
        """As ``ReadEngine.read``, however many files the batch names.

        Raises:
            BundleCorruptError: also when a file is gone.
        """
        try:
            file = batch.file
            if file is None or self._all_open or len(distinct := np.unique(file)) <= _FEW_FILES:
                await self.engine.read(batch, prefetch=prefetch)
                return
            async with self._many:
                for some in np.array_split(distinct, -(-2 * len(distinct) // max_open_files())):
                    await self.engine.read(_part(batch, np.isin(file, some)), prefetch=prefetch)
        except DiskReadError as exc:
            raise gone(exc) from exc


def _part(batch: ReadBatch, reads: BoolArray) -> ReadBatch:
    """Some reads of a batch."""
    places, first = reads, None
    if batch.first is not None:
        n_places = np.diff(batch.first, append=len(batch.length_bytes))
        places = np.repeat(reads, n_places)
        first = np.cumsum(n_places[reads]) - n_places[reads]
    return ReadBatch(
        batch.offset_bytes[reads],
        batch.length_bytes[places],
        batch.dest,
        batch.dest_offset_bytes[places],
        first,
        None if batch.file is None else batch.file[reads],
    )


def gone(error: DiskReadError) -> Exception:
    """The error for a chunk that was there when the store was opened: it must not read as fill value."""
    if isinstance(error.__cause__, FileNotFoundError):
        path = error.__cause__.filename
        return BundleCorruptError(f"{path}: disappeared while in use; convert the model again")
    return error


class RowReader(ABC):
    """Reads the rows of one layer."""

    @abstractmethod
    async def read_range(self, start: int, stop: int, out: U8Array, cancel: Cancel) -> None:
        """See ``WeightStore.read_range``; ``start < stop``."""

    @abstractmethod
    async def read_rows(
        self, ids: I64Array, rows: I64Array, out: U8Array, cancel: Cancel, prefetch: bool
    ) -> None:
        """See ``WeightStore.read_rows``; at least one id."""


class RawRows(RowReader):
    """Rows that lie in the files as they are.

    Args:
        table: the chunks.
        first_file: index of the table's first file among all.
        stride_bytes: length of a row.
        files: who reads.
        max_gap_bytes: longest gap between two wanted rows to read over (the device's break-even).
    """

    def __init__(
        self,
        table: ChunkTable,
        first_file: int,
        stride_bytes: int,
        files: ChunkFiles | None,
        max_gap_bytes: int,
    ) -> None:
        extents = extents_of(table, stride_bytes)
        there = extents.file != NO_FILE
        file = np.where(there, extents.file + first_file, NO_FILE)
        self._extents = Extents(extents.neuron, file, extents.offset_bytes)
        self._whole = bool(there.all())
        self._stride_bytes = stride_bytes
        self._fill_value = table.layout.fill_value
        self._files = files
        self._max_run_neurons = min(MAX_DESTINATIONS, max(1, MAX_READ_BYTES // stride_bytes))
        # Rows that go through scratch memory are read one by one: merging over a gap saves nothing.
        low_bits = (files.engine.alignment_bytes if files else 1) - 1
        in_place = not (stride_bytes & low_bits or (extents.offset_bytes[there] & low_bits).any())
        self._max_gap_neurons = max_gap_bytes // stride_bytes if in_place else 0

    async def read_range(self, start: int, stop: int, out: U8Array, cancel: Cancel) -> None:
        """See ``RowReader.read_range``."""
        extent, parts = split_runs(self._extents.neuron, Runs.range(start, stop))
        if not self._whole:
            left_out = self._extents.file[extent] == NO_FILE
            await self._fill(parts.take(np.flatnonzero(left_out)), out)
            extent, parts = extent[~left_out], parts.take(np.flatnonzero(~left_out))
        if len(parts):
            stride = self._stride_bytes
            await self._read(extent, parts.neuron, None, parts.count * stride, parts.row * stride, out)

    async def read_rows(
        self, ids: I64Array, rows: I64Array, out: U8Array, cancel: Cancel, prefetch: bool
    ) -> None:
        """See ``RowReader.read_rows``."""
        bounds, gap, row = self._extents.neuron, self._max_gap_neurons, rows
        extent = np.searchsorted(bounds, ids, "right") - 1
        if not self._whole:
            left_out = self._extents.file[extent] == NO_FILE
            await self._fill(Runs(ids, row, np.ones_like(ids)).take(np.flatnonzero(left_out)), out)
            ids, row, extent = ids[~left_out], row[~left_out], extent[~left_out]
            if not len(ids):
                return
        # Moved apart by more than a gap, so that no read goes on into another extent.
        apart = gap + 1
        plan = plan_rows(
            ids + extent * apart, row, max_gap_neurons=gap, max_run_neurons=self._max_run_neurons
        )
        extent = np.searchsorted(bounds + np.arange(len(bounds)) * apart, plan.neuron, "right") - 1
        first = None if len(plan.first) == len(plan.row) else plan.first
        stride = self._stride_bytes
        dest_offset = np.maximum(plan.row * stride, SKIP)  # of GAP, which is negative, too
        neuron, length = plan.neuron - extent * apart, plan.count * stride
        await self._read(extent, neuron, first, length, dest_offset, out, prefetch)

    async def _read(
        self,
        extent: I64Array,
        neuron: I64Array,
        first: I64Array | None,
        length: I64Array,
        dest_offset: I64Array,
        out: U8Array,
        prefetch: bool = False,
    ) -> None:
        """Reads that start at ``neuron`` in ``extent``, both ``[n]``; the others as in ``ReadBatch``."""
        assert self._files is not None
        extents = self._extents
        offset = extents.offset_bytes[extent] + (neuron - extents.neuron[extent]) * self._stride_bytes
        dest = out.reshape(-1)
        batch = ReadBatch(offset, length, dest, dest_offset, first, extents.file[extent])
        await self._files.read(batch, prefetch)

    async def _fill(self, runs: Runs, out: U8Array) -> None:
        """Write rows that were left out, without keeping the event loop for long."""
        step = max(1, _FILL_BYTES // self._stride_bytes)
        written = 0
        for row, count in zip(runs.row.tolist(), runs.count.tolist(), strict=True):
            for start in range(row, row + count, step):
                stop = min(start + step, row + count)
                out[start:stop] = self._fill_value
                written += stop - start
                if written >= step:
                    written = 0
                    await asyncio.sleep(0)


class NoRows(RowReader):
    """A layer whose chunks cannot be located.

    Args:
        error: what every read raises.
    """

    def __init__(self, error: FlashdError) -> None:
        self._error = error

    async def read_range(self, start: int, stop: int, out: U8Array, cancel: Cancel) -> None:
        """See ``RowReader.read_range``."""
        raise type(self._error)(str(self._error))

    async def read_rows(
        self, ids: I64Array, rows: I64Array, out: U8Array, cancel: Cancel, prefetch: bool
    ) -> None:
        """See ``RowReader.read_rows``."""
        raise type(self._error)(str(self._error))


class _PackedRows(RowReader):
    """Rows that come a chunk at a time."""

    async def read_range(self, start: int, stop: int, out: U8Array, cancel: Cancel) -> None:
        """See ``RowReader.read_range``."""
        await self._read(Runs.range(start, stop), out, cancel)

    async def read_rows(
        self, ids: I64Array, rows: I64Array, out: U8Array, cancel: Cancel, prefetch: bool
    ) -> None:
        """See ``RowReader.read_rows``."""
        await self._read(Runs.of(ids, rows), out, cancel)

    @abstractmethod
    async def _read(self, runs: Runs, out: U8Array, cancel: Cancel) -> None: ...


class DecodedRows(_PackedRows):
    """Rows in chunks that zarr's codecs decode, each once a call, however many rows are wanted.

    Args:
        table: the chunks.
        first_file: index of the table's first file among all.
        array: who decodes.
        files: who reads.
        threads: where.
        slots: bounds the chunks in memory, of all layers and calls together.
    """

    def __init__(
        self,
        table: ChunkTable,
        first_file: int,
        array: ZarrArray,
        files: ChunkFiles | None,
        threads: ZarrThreads,
        slots: Slots,
    ) -> None:
        self._table = table
        self._first_file = first_file
        self._bounds = np.arange(len(table.file)) * table.layout.chunk_rows
        self._array = array
        self._files = files
        self._threads = threads
        self._slots = slots

    async def _read(self, runs: Runs, out: U8Array, cancel: Cancel) -> None:

        async def chunk(number: int, wanted: Runs) -> None:
            if self._table.file[number] == NO_FILE:
                await self._threads.run(self._fill, wanted, out)
                return
            stored = await self._stored(number)
            await self._threads.run(self._array.decode, number, stored, wanted, out)

        await self._slots.each(self._bounds, runs, chunk, cancel)

    async def _stored(self, number: int) -> U8Array:
        """The bytes of a chunk. They start as far off alignment as in the file, so that the engine can
        read most of a large one in place."""
        assert self._files is not None
        nbytes, offset = (
            self._table.nbytes[number : number + 1],
            self._table.offset_bytes[number : number + 1],
        )
        file = self._table.file[number : number + 1] + self._first_file
        lead = offset % self._files.engine.alignment_bytes
        memory = aligned_empty(int(lead[0] + nbytes[0]), max(4096, self._files.engine.alignment_bytes))
        await self._files.read(ReadBatch(offset, nbytes, memory, lead, None, file))
        return memory[int(lead[0]) :]

    async def _fill(self, runs: Runs, out: U8Array) -> None:
        runs.fill(self._table.layout.fill_value, out)


class ForeignRows(_PackedRows):
    """Rows in a layout that only zarr understands.

    Args:
        array: who reads and decodes.
        n_neurons: of the layer.
        threads: where.
        slots: bounds what is read at once.
    """

    def __init__(self, array: ZarrArray, n_neurons: int, threads: ZarrThreads, slots: Slots) -> None:
        self._array = array
        self._n_neurons = n_neurons
        self._bounds = np.arange(0, n_neurons, array.chunk_rows)
        self._threads = threads
        self._slots = slots

    async def _read(self, runs: Runs, out: U8Array, cancel: Cancel) -> None:
        if len(runs) == 1:  # zarr reads many chunks of a shard in one go
            start, count = int(runs.neuron[0]), int(runs.count[0])
            await self._threads.run(self._array.read, start, start + count, runs, out)
            return

        async def chunk(number: int, wanted: Runs) -> None:
            start = number * self._array.chunk_rows
            stop = min(start + self._array.chunk_rows, self._n_neurons)
            await self._threads.run(self._array.read, start, stop, wanted, out)

        await self._slots.each(self._bounds, runs, chunk, cancel)


class Slots:
    """Chunks that may be in memory at once.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = asyncio.Semaphore(count)

    async def each(
        self,
        bounds: I64Array,
        runs: Runs,
        chunk: Callable[[int, Runs], Awaitable[None]],
        cancel: Cancel,
    ) -> None:
        """Call ``chunk(number, its runs)`` for every chunk that ``runs`` touch.

        All calls have ended when this returns or raises: nothing writes to the rows later.
        """
        index, parts = split_runs(bounds, runs)
        order = np.argsort(index, kind="stable")
        cuts = np.flatnonzero(np.diff(index[order], prepend=-1, append=-1)).tolist()
        jobs = iter(pairwise(cuts))

        async def work() -> None:
            for begin, end in jobs:
                async with self._free:
                    if cancel.stopped:
                        return
                    which = order[begin:end]
                    try:
                        await chunk(int(index[which[0]]), parts.take(which))
                    except BaseException:
                        cancel.stopped = True
                        raise

        workers = (work() for _ in range(min(self._count, len(cuts) - 1)))
        for result in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
