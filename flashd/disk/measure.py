"""Measuring a device's curve: random reads of many sizes at many depths, within some seconds."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.curve import CurvePoint, DeviceCurve
from flashd.disk.device import device_identity
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.probe import open_engine
from flashd.errors import ConfigError
from flashd.types import I64Array, U8Array

SIZES_BYTES = tuple(4096 << doubled for doubled in range(9))
# Deepest first: what the gaps are decided by comes first, in case the time does not suffice.
DEPTHS = (128, 64, 32, 16, 8, 4, 2, 1)

_GRAIN_BYTES = 4096
# Enough different reads of a size for random ones to mean anything.
_MIN_PLACES = 4
_POOL_BYTES = 32 << 20
# Reads go to this much of a large file, in parts all over it: as much as can be read once beforehand,
# because the first pass over a file may be ten times slower (a host's cache, mappings of the flash).
_PARTS, _PART_BYTES = 32, 16 << 20
_WARM_SHARE = 0.25
_MAX_BATCH_READS = 4096


@dataclass(frozen=True)
class _Source:
    """The parts of a file that are read: ``parts`` of ``part_bytes``, ``step_bytes`` apart."""

    parts: int
    part_bytes: int
    step_bytes: int

    def random_offsets(self, rng: np.random.Generator, count: int, size: int, grain: int) -> I64Array:
        """``[count]`` offsets of reads of ``size`` bytes, multiples of ``grain``."""
        places = (self.part_bytes - size) // grain + 1
        return rng.integers(0, self.parts, count) * self.step_bytes + rng.integers(0, places, count) * grain


async def measure_curve(
    path: str | os.PathLike[str],
    backend: str = "auto",
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    depths: Sequence[int] = DEPTHS,
    limit_s: float = 10.0,
    point_limit_s: float = 0.3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DeviceCurve:
    """Measure the device below a file with random reads all over it.

    Takes ``limit_s`` and at most one batch of reads more: points that a slow device leaves no time for
    are missing, and so are sizes that the file is too small for or that the device cannot read unaligned.

    Args:
        path: a file with real data, best of ``MIN_FILE_BYTES`` or more. It is only read.
        backend: as for ``open_engine``.
        sizes_bytes: of the reads, multiples of 4096.
        depths: reads outstanding; engines may hold fewer.
        limit_s: for everything.
        point_limit_s: for one size and depth.
        progress: told how many of the points are done.

    Raises:
        ConfigError: the file is too small, or has holes, which no device is asked for.
        DiskReadError: it cannot be opened or read.
        BundleCorruptError: it was truncated meanwhile.
    """
    start_s = time.perf_counter()
    end_s = start_s + limit_s
    points: dict[tuple[int, int], CurvePoint] = {}
    pool = aligned_empty(_POOL_BYTES, huge_pages=True)
    for at, depth in enumerate(depths):
        if points and time.perf_counter() >= end_s:
            break
        engine = await open_engine(path, backend, depth=depth)
        try:
            if at == 0:
                # The same one for all points, whatever becomes of the memory-lock limit meanwhile.
                backend = engine.name
                source, file_bytes, sizes = _source(engine, sizes_bytes)
                await _warm(engine, source, pool, start_s + _WARM_SHARE * limit_s)
            for number, size in enumerate(sizes):
                left_s = end_s - time.perf_counter()
                left = (len(depths) - at) * len(sizes) - number
                if (size, engine.depth) in points or (points and left_s <= 0):
                    continue
                slice_s = min(point_limit_s, left_s / left)
                points[size, engine.depth] = await _measure(engine, source, size, pool, slice_s)
                progress(at * len(sizes) + number + 1, len(depths) * len(sizes))
        finally:
            await engine.close()
    return DeviceCurve(
        points=tuple(points.values()),
        engine=engine.name,
        direct=engine.direct,
        kernel=os.uname().release,
        device=device_identity(path),
        measured_unix_s=int(time.time()),
        file_bytes=file_bytes,
    )


def _source(engine: ReadEngine, sizes_bytes: Sequence[int]) -> tuple[_Source, int, list[int]]:
    """What to read, the file's size, and the sizes of reads that fit both file and device."""
    path = engine.paths[0]
    info = os.stat(path)
    grain = max(_GRAIN_BYTES, engine.alignment_bytes)
    sizes = [s for s in sizes_bytes if s % grain == 0 and s + (_MIN_PLACES - 1) * grain <= info.st_size]
    if not sizes:
        raise ConfigError(
            f"{path}: {info.st_size} bytes, too small for random reads of {min(sizes_bytes)} bytes or more "
            f"aligned to {grain}; measure on a larger file"
        )
    if info.st_blocks * 512 < info.st_size // 2:
        raise ConfigError(
            f"{path}: {info.st_blocks * 512} of {info.st_size} bytes are on the device, the rest are holes; "
            "measure on a file with data"
        )
    if info.st_size <= _PARTS * _PART_BYTES:
        return _Source(1, info.st_size, 0), info.st_size, sizes
    step = info.st_size // _PARTS // grain * grain
    return _Source(_PARTS, _PART_BYTES, step), info.st_size, sizes


async def _warm(engine: ReadEngine, source: _Source, pool: U8Array, until_s: float) -> None:
    """Read the source once in large reads, as far as the time goes."""
    size = SIZES_BYTES[-1]
    for part in range(source.parts):
        for start in range(0, source.part_bytes // size * size, pool.size):
            if time.perf_counter() >= until_s:
                return
            stop = min(start + pool.size, source.part_bytes // size * size)
            offset = np.arange(start, stop, size)
            await engine.read(_batch(part * source.step_bytes + offset, size, pool, 0))


async def _measure(
    engine: ReadEngine, source: _Source, size: int, pool: U8Array, slice_s: float
) -> CurvePoint:
    """Keep the queue full for some time. A batch that takes longer than that is the measurement."""
    rng = np.random.default_rng()
    grain = max(_GRAIN_BYTES, engine.alignment_bytes)

    async def read(count: int) -> None:
        offset = source.random_offsets(rng, count, size, grain)
        await engine.read(_batch(offset, size, pool, int(rng.integers(pool.size // size))))

    start_s = time.perf_counter()
    await read(engine.depth)
    elapsed_s, reads = time.perf_counter() - start_s, engine.depth
    if elapsed_s < slice_s:
        # Two batches outstanding, so that the queue is full while one ends and the next is prepared.
        count = max(engine.depth, min(_MAX_BATCH_READS, int(reads / elapsed_s * slice_s / 6)))
        start_s, reads = start_s + elapsed_s, 0

        async def keep_reading() -> None:
            nonlocal reads
            while time.perf_counter() < start_s + slice_s:
                await read(count)
                reads += count

        # Both end before an error goes on: the engine is closed then.
        for failed in await asyncio.gather(keep_reading(), keep_reading(), return_exceptions=True):
            if failed is not None:
                raise failed
        elapsed_s = time.perf_counter() - start_s
    gb_per_s = reads * size / elapsed_s / 1e9
    return CurvePoint(size, engine.depth, gb_per_s, min(engine.depth, reads) * elapsed_s / reads * 1e6)


def _batch(offset: I64Array, size: int, pool: U8Array, first_slot: int) -> ReadBatch:
    """Reads of one size into slots of the pool, from ``first_slot`` on and around: nobody looks at the
    bytes, so that reads may share a slot."""
    slot = (first_slot + np.arange(len(offset))) % (pool.size // size)
    return ReadBatch(offset, np.full(len(offset), size), pool, slot * size)
