"""What ``bench io`` measures: a bundle's rows, a pattern of reads, an engine that serves them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.pieces import PIECE_BYTES
from flashd.disk.probe import open_engine
from flashd.errors import ConfigError
from flashd.layout.manifest import BUNDLE, ZARR, Manifest
from flashd.prefetch.stream import RING_BUFFERS, RING_BYTES
from flashd.store.base import WeightStore
from flashd.store.bundle_file import BundleFileStore
from flashd.store.open import open_manifest
from flashd.store.zarr_store import ZarrStore
from flashd.tools.bench.measure import RandomReads, RandomRows, Stream, Work
from flashd.tools.reasons import why_not

_REGISTERED = "+registered"
ENGINES = ("uring", f"uring{_REGISTERED}", "threads", "buffered")
_WARM_PIECES = 16


class Unavailable(Exception):
    """This engine, or this way of using it, does not work here; the text says why."""


@dataclass(frozen=True, eq=False)
class Source:
    """A bundle whose rows are read.

    Attributes:
        directory: the bundle.
        manifest: its manifest.
        store: ``file`` or ``zarr``.
        folder: where the files with rows are.
        files: their names relative to ``folder``, the largest first.
        file_bytes: size of the largest.
    """

    directory: Path
    manifest: Manifest
    store: str
    folder: Path
    files: tuple[str, ...]
    file_bytes: int

    @property
    def paths(self) -> list[Path]:
        """The files with rows."""
        return [self.folder / name for name in self.files]


@dataclass(frozen=True, order=True)
class Point:
    """Pattern (``random``, ``sequential``), bytes of each read, reads that the kernel holds."""

    pattern: str
    size_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.pattern} reads of {self.size_bytes} bytes at depth {self.depth}"


@dataclass(frozen=True)
class Subject:
    """An open engine with endless work for it.

    Attributes:
        work: the batches.
        store: whom they are asked of.
        engine: who reads; None where the store doesn't show it.
    """

    work: Work
    store: WeightStore
    engine: ReadEngine | None

    def note(self) -> str:
        """What one should know about a figure that was measured with this."""
        if self.engine is None:
            return f"through {self.store.name}"
        if not self.engine.direct:
            return "through the page cache, emptied before each measurement: partly RAM, so no ratio"
        share = self.engine.stats.scratch_reads / max(1, self.engine.stats.reads)
        return f"{share:.0%} of the reads through scratch: not aligned" if share > 0.01 else ""


def open_source(directory: Path) -> Source:
    """Find a bundle's row files.

    Raises:
        BundleError: the directory is no bundle, or incomplete.
    """
    manifest = open_manifest(directory)
    name = BUNDLE if manifest.store == "file" else ZARR
    folder = directory if manifest.store == "file" else directory / ZARR
    found = [entry for entry in manifest.files if entry.name == name or entry.name.startswith(f"{name}/")]
    found.sort(key=lambda entry: (-entry.size_bytes, entry.name))
    # The small ones of a zarr store are metadata.
    largest = found[0].size_bytes
    files = tuple(entry.name.removeprefix(f"{ZARR}/") for entry in found if 2 * entry.size_bytes >= largest)
    return Source(directory, manifest, manifest.store, folder, files, largest)


@asynccontextmanager
async def prepared(source: Source, point: Point, name: str) -> AsyncIterator[Subject]:
    """Open what serves a point's reads with one of ``ENGINES``; closed at the end of the block.

    Raises:
        Unavailable: it does not work here.
    """
    backend = name.removesuffix(_REGISTERED)
    try:
        store, engine = await _open(source, backend, point.depth)
    except ConfigError as exc:
        raise Unavailable(why_not(exc)) from exc
    try:
        work = _work(source, point, store, engine)
        if backend == "buffered":
            _forget(source)
        if name == backend:
            yield Subject(work, store, engine)
            return
        why = "its store shows no engine" if engine is None else engine.register(work.memory)
        if engine is None or why:
            raise Unavailable(f"no registered memory: {why}")
        yield Subject(work, store, engine)
    finally:
        # After Ctrl-C reads may still be with the kernel. Closing waits for them and gives registered
        # memory back; `unregister` before that would be refused.
        await store.close()


async def _open(source: Source, backend: str, depth: int) -> tuple[WeightStore, ReadEngine | None]:
    """The store, and the engine below it where there is one."""
    geometry = source.manifest.ffn
    if source.store == "file":
        engine = await open_engine(source.paths[0], backend, depth=depth)
        return BundleFileStore(engine, geometry, source.manifest.layer_offset_bytes), engine
    store = await ZarrStore.open(source.folder, geometry, backend, depth=depth, max_gap_bytes=0)
    return store, store.engine


def _work(source: Source, point: Point, store: WeightStore, engine: ReadEngine | None) -> Work:
    if point.pattern == "sequential":
        return Stream(store, RING_BYTES, RING_BUFFERS, PIECE_BYTES)
    if point.size_bytes == source.manifest.ffn.stride_bytes:
        return RandomRows(store, point.depth)
    assert engine is not None, "other sizes are read from bundle files only"
    return RandomReads(engine, source.file_bytes, point.size_bytes, point.depth)


def _forget(source: Source) -> None:
    """Empty the page cache of the files, so that reads through it reach the device."""
    for path in source.paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


async def warm(source: Source, progress: Callable[[str, int, int], None]) -> None:
    """Read all files once: the first pass over a file may be ten times slower than the second."""
    sizes = [path.stat().st_size for path in source.paths]
    memory = aligned_empty(_WARM_PIECES * PIECE_BYTES)
    dest = np.arange(_WARM_PIECES) * PIECE_BYTES
    done, total = 0, sum(sizes)
    for path, size in zip(source.paths, sizes, strict=True):
        engine = await open_engine(path)
        try:
            for start in range(0, size, memory.size):
                offset = start + dest[: -(-(size - start) // PIECE_BYTES)]
                length = np.minimum(size - offset, PIECE_BYTES)
                progress("warming", done, total)
                await engine.read(ReadBatch(offset, length, memory, dest[: len(offset)]))
                done += int(length.sum())
        finally:
            await engine.close()
    progress("warming", done, total)
