"""Store ``zarr``: the same rows as a zarr group, one uint8 array ``layers/{i}`` per layer of
shape ``[n_neurons, stride_bytes]``, in whatever chunks, shards and codecs zarr-python reads.

zarr itself is imported only where it is needed, that is for packed chunks and unusual layouts: it
costs a second and 60 MB, and what `flashd convert` writes is raw.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from flashd.disk.curve import load_curve
from flashd.disk.engine import ReadEngine
from flashd.disk.probe import open_engine
from flashd.errors import BundleCorruptError, ConfigError, DiskReadError, FlashdError
from flashd.stats import ReadStats
from flashd.store.base import WeightStore
from flashd.store.zarr_chunks import ChunkTable, in_layer, locate_layers, raw_layouts
from flashd.store.zarr_layout import ZarrLayout
from flashd.store.zarr_readers import (
    Cancel,
    ChunkFiles,
    DecodedRows,
    ForeignRows,
    NoRows,
    RawRows,
    RowReader,
    Slots,
    gone,
)
from flashd.types import FFNGeometry, I64Array, U8Array

if TYPE_CHECKING:  # it imports zarr
    from flashd.store.zarr_codecs import ZarrArray, ZarrThreads

Way = Literal["raw", "decoded", "generic"]

# A codec fills a core; more threads would only take turns.
_MAX_THREADS = 4
# Decoded chunks at once, all calls together.
_CHUNK_MEMORY_BYTES = 64 << 20


class _Options(NamedTuple):
    """Of ``ZarrStore.open``."""

    backend: str
    depth: int | None
    max_gap_bytes: int | None
    keep_damaged: bool


class ZarrStore(WeightStore):
    """Neuron rows of a zarr group; open it with ``await ZarrStore.open(path, geometry)``.

    Attributes:
        name: ``zarr/`` and the engine's name if every row is read in place, else ``zarr/decoded``, or
            ``zarr/generic`` where zarr does the reading; the slowest way of any layer counts.
        ways: per layer: ``raw``, ``decoded`` or ``generic``.
        engine: how chunks are read; None where there are none, or zarr reads all of them. Closed with
            the store.
    """

    alignment_bytes = 1

    def __init__(
        self,
        geometry: FFNGeometry,
        layers: Sequence[tuple[Way, RowReader]],
        engine: ReadEngine | None,
        threads: ZarrThreads | None,
    ) -> None:
        self.geometry = geometry
        self.engine = engine
        self.ways: tuple[Way, ...] = tuple(way for way, _ in layers)
        packed = [way for way in ("generic", "decoded") if way in self.ways]
        self.name = f"zarr/{packed[0] if packed else engine.name if engine else 'empty'}"
        self._readers = [reader for _, reader in layers]
        self._threads = threads
        self._reading: set[asyncio.Future[None]] = set()
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        root: Path,
        geometry: FFNGeometry,
        backend: str = "auto",
        *,
        depth: int | None = None,
        max_gap_bytes: int | None = None,
        keep_damaged: bool = False,
    ) -> ZarrStore:
        """Open the group, check every layer's array against ``geometry`` and find all chunks.

        Args:
            root: the group's directory.
            geometry: what it must hold.
            backend: as for ``open_engine``.
            depth: as for ``open_engine``.
            max_gap_bytes: longest gap between two wanted rows to read over; by default the break-even of
                the device's measured curve, if there is one.
            keep_damaged: open all the same where a shard's index is damaged, or a chunk has a size that
                it cannot have; reads of that layer raise then. For looking at the others.

        Raises:
            BundleCorruptError: no zarr group, arrays of another shape or dtype, damaged shard indexes.
            ConfigError: a backend that is unknown, does not work here, or cannot read these chunks.
            DiskReadError: the device failed.
        """
        layouts = await asyncio.to_thread(raw_layouts, root, geometry)
        options = _Options(backend, depth, max_gap_bytes, keep_damaged)
        if layouts is not None:
            return await cls._open(root, geometry, options, layouts, None, [])
        threads = await asyncio.to_thread(_start_zarr)
        try:
            from flashd.store.zarr_codecs import open_arrays

            arrays = await threads.run(open_arrays, root, geometry)
            foreign = [layer for layer, array in enumerate(arrays) if array.layout is None]
            if foreign and backend != "auto":
                raise ConfigError(
                    f"{root}: backend {backend!r} cannot read layers/{foreign[0]}, whose chunks only zarr "
                    "understands; use auto or memory, or convert the model again"
                )
            return await cls._open(root, geometry, options, [a.layout for a in arrays], threads, arrays)
        except BaseException:
            await asyncio.to_thread(threads.close)
            raise

    @classmethod
    async def _open(
        cls,
        root: Path,
        geometry: FFNGeometry,
        options: _Options,
        layouts: Sequence[ZarrLayout | None],
        threads: ZarrThreads | None,
        arrays: Sequence[ZarrArray],
    ) -> ZarrStore:
        tables = await asyncio.to_thread(locate_layers, root, layouts, geometry)
        for layer, table in enumerate(tables):
            if isinstance(table, FlashdError) and not options.keep_damaged:
                raise in_layer(table, layer) from table
        paths = [path for table in tables if isinstance(table, ChunkTable) for path in table.paths]
        try:
            engine = await open_engine(paths, options.backend, depth=options.depth) if paths else None
        except DiskReadError as exc:
            raise gone(exc) from exc
        files = ChunkFiles(engine) if engine else None
        max_gap_bytes = options.max_gap_bytes
        if max_gap_bytes is None:
            curve = load_curve(root, engine.name) if engine else None
            max_gap_bytes = curve.break_even_bytes() if curve else 0
        layers = _readers(tables, geometry, files, max_gap_bytes, threads, arrays)
        return cls(geometry, layers, engine, threads)

    @property
    def reason(self) -> str:
        """See ``WeightStore.reason``."""
        return self.engine.reason if self.engine is not None else ""

    @property
    def read_stats(self) -> ReadStats | None:
        """See ``WeightStore.read_stats``; None where zarr reads all layers."""
        return self.engine.stats if self.engine else None

    def register(self, memory: U8Array) -> str:
        """See ``WeightStore.register``."""
        return super().register(memory) if self.engine is None else self.engine.register(memory)

    def unregister(self, memory: U8Array) -> None:
        """See ``WeightStore.unregister``."""
        if self.engine is not None:
            self.engine.unregister(memory)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        self.check_request(layer, start, stop - 1, stop - start, out)
        self._check_open()
        if start < stop:
            cancel = Cancel()
            await self._guarded(layer, self._readers[layer].read_range(start, stop, out, cancel), cancel)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``. A packed chunk is decoded once per call, however many of its
        neurons are wanted."""
        self.check_rows(layer, ids, out, rows)
        self._check_open()
        if len(ids):
            cancel = Cancel()
            rows = np.arange(len(ids)) if rows is None else rows
            read = self._readers[layer].read_rows(ids, rows, out, cancel, prefetch)
            await self._guarded(layer, read, cancel)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise ValueError("the zarr store is closed")

    async def _guarded(self, layer: int, read: Coroutine[Any, Any, None], cancel: Cancel) -> None:
        """Run a read so that ``close`` waits for it; where threads write to the rows, also when it is
        cancelled. What fails names the layer beside file and offset."""
        try:
            await (self._plain(read) if self.ways[layer] == "raw" else self._shielded(read, cancel))
        except (BundleCorruptError, DiskReadError) as exc:
            raise in_layer(exc, layer) from exc

    async def _plain(self, read: Coroutine[Any, Any, None]) -> None:
        """The engine waits for reads in flight itself."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading.add(done)
        try:
            await read
        finally:
            self._reading.discard(done)
            done.cancel()

    async def _shielded(self, read: Coroutine[Any, Any, None], cancel: Cancel) -> None:
        done = asyncio.create_task(read)
        self._reading.add(done)
        done.add_done_callback(self._reading.discard)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            cancel.stopped = True
            raise

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._reading:
            await asyncio.wait(set(self._reading))
        if self.engine is not None:
            await self.engine.close()
        if self._threads is not None:
            await asyncio.to_thread(self._threads.close)


def _start_zarr() -> ZarrThreads:
    """Import zarr, which takes a second: in a worker thread."""
    from flashd.store.zarr_codecs import ZarrThreads

    return ZarrThreads(min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def _readers(
    tables: Sequence[ChunkTable | FlashdError | None],
    geometry: FFNGeometry,
    files: ChunkFiles | None,
    max_gap_bytes: int,
    threads: ZarrThreads | None,
    arrays: Sequence[ZarrArray],
) -> list[tuple[Way, RowReader]]:
    """The way to each layer's rows."""
    chunk_bytes = max((array.chunk_rows for array in arrays), default=1) * geometry.stride_bytes
    slots = Slots(max(1, min(2 * _MAX_THREADS, _CHUNK_MEMORY_BYTES // chunk_bytes)))
    readers: list[tuple[Way, RowReader]] = []
    first_file = 0
    for layer, table in enumerate(tables):
        if table is None:
            assert threads is not None
            readers.append(("generic", ForeignRows(arrays[layer], geometry.n_neurons, threads, slots)))
            continue
        if isinstance(table, FlashdError):
            readers.append(("raw", NoRows(table)))
            continue
        if table.layout.raw:
            raw = RawRows(table, first_file, geometry.stride_bytes, files, max_gap_bytes)
            readers.append(("raw", raw))
        else:
            assert threads is not None
            decoded = DecodedRows(table, first_file, arrays[layer], files, threads, slots)
            readers.append(("decoded", decoded))
        first_file += len(table.paths)
        # Only the engine needs the names from here on.
        table.paths.clear()
    return readers
