"""``flashd bench io``: how fast a bundle's files are read, beside fio on the same files.

Throughput over read size and depth is Figure 2b of LLM in a flash. Engines and fio take turns
within every round, and figures are medians over the rounds: whatever else the device is busy with
meets all of them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from flashd.disk.pieces import PIECE_BYTES
from flashd.errors import ConfigError
from flashd.prefetch.stream import RING_BUFFERS, RING_BYTES
from flashd.tools import host
from flashd.tools.bench.fio import Fio, FioError, FioHangs, FioResult
from flashd.tools.bench.measure import MeteredLoop, Sample, batch_reads, measure
from flashd.tools.bench.report import BytesCheck, IoReport, IoRow
from flashd.tools.bench.subjects import (
    ENGINES,
    Point,
    Source,
    Unavailable,
    open_source,
    prepared,
    warm,
)

DEFAULT_DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_SIZES_BYTES = (8 << 10, 16 << 10, 32 << 10)
MAX_DEPTH = 4096
MIN_SIZE_BYTES = 512
MAX_SIZE_BYTES = 16 << 20
# For all reads of a measurement. Deep queues of large reads ask for more than any machine has.
MAX_MEMORY_BYTES = 1 << 30
# Reads in flight of the streaming path: its whole ring, in pieces as the engines cut it.
STREAM_DEPTH = RING_BYTES // PIECE_BYTES
# A larger difference between what was read and what the kernel counted is an error.
_BYTES_TOLERANCE = 0.01
# The kernel also counts what of the program itself has to be read meanwhile.
_OTHER_READS_BYTES = 1 << 20

# Told the phase, bytes done and bytes in all; or points done and points in all.
ByteProgress = Callable[[str, int, int], None]
PointProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class IoOptions:
    """What to measure.

    Attributes:
        sizes_bytes: of random reads, beside the bundle's own row stride.
        depths: of random reads: how many the kernel holds at once.
        engines: some of ``ENGINES``.
        rounds: how often; figures are medians.
        seconds: of each measurement.
        fio: whether to compare with fio, where it is installed.
        fio_best: whether fio is also measured at its best, beside ``uring+registered``.
    """

    sizes_bytes: tuple[int, ...] = DEFAULT_SIZES_BYTES
    depths: tuple[int, ...] = DEFAULT_DEPTHS
    engines: tuple[str, ...] = ENGINES
    rounds: int = 5
    seconds: float = 0.5
    fio: bool = True
    fio_best: bool = True

    def __post_init__(self) -> None:
        for name in self.engines:
            if name not in ENGINES:
                raise ConfigError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
        limits: tuple[tuple[str, Sequence[float], float, float], ...] = (
            ("depth", self.depths, 1, MAX_DEPTH),
            ("rounds", (self.rounds,), 1, 1000),
            ("seconds", (self.seconds,), 0.01, 3600),
        )
        for what, values, low, high in limits:
            for value in values:
                if not low <= value <= high:
                    raise ConfigError(f"{what} is {value}, expected {low} to {high}")
        for size in self.sizes_bytes:
            if not MIN_SIZE_BYTES <= size <= MAX_SIZE_BYTES:
                high_mib = MAX_SIZE_BYTES >> 20
                raise ConfigError(f"size is {size} bytes, expected {MIN_SIZE_BYTES} up to {high_mib} MiB")
        if not self.depths or not self.engines:
            raise ConfigError("nothing to measure: give at least one depth and one engine")
        for size in self.sizes_bytes:
            self.check_memory(size)

    def check_memory(self, size_bytes: int) -> None:
        """Raise ConfigError if random reads of this size at the greatest depth need too much memory."""
        depth = max(self.depths)
        needed = 2 * batch_reads(size_bytes, depth) * size_bytes
        if needed > MAX_MEMORY_BYTES:
            raise ConfigError(
                f"reads of {size_bytes} bytes at depth {depth} need {needed / (1 << 30):.1f} GiB of memory, "
                f"expected at most {MAX_MEMORY_BYTES >> 30} GiB; give a smaller --size or --depth"
            )


# One short round of the bundle's own rows.
_QUICK: dict[str, Any] = {
    "sizes_bytes": (),
    "depths": (1, 32, 128),
    "rounds": 1,
    "seconds": 0.1,
    "fio_best": False,
}
_FIO_BEST = "fio, registered"
_PAGE_CACHE = "buffered"


def io_options(given: Mapping[str, Any], quick: bool, fio: bool) -> IoOptions:
    """Options of which some are given; the others are the defaults, or those of a quick run.

    Raises:
        ConfigError: a value is out of range.
    """
    return IoOptions(**((_QUICK if quick else {}) | dict(given)), fio=fio)


@dataclass
class _Bench:
    """State of one run."""

    options: IoOptions
    runner: asyncio.Runner
    fio: Fio | None
    notes: list[str] = field(default_factory=list)
    samples: dict[tuple[Source, Point, str], list[Sample]] = field(default_factory=dict)
    fio_results: dict[tuple[Source, Point, str], list[FioResult]] = field(default_factory=dict)
    left_out: set[tuple[Source, Point, str]] = field(default_factory=set)
    row_notes: dict[tuple[Source, Point, str], str] = field(default_factory=dict)
    fio_hangs: bool = False

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def visit(self, source: Source, point: Point, turn: int) -> None:
        """One measurement of a point by everybody; who begins changes from turn to turn."""
        everybody = [*self._fios(), *self.options.engines]
        start = turn % len(everybody)
        for name in everybody[start:] + everybody[:start]:
            key = source, point, name
            if key in self.left_out or (self.fio_hangs and name.startswith("fio")):
                continue
            try:
                if name.startswith("fio"):
                    self._run_fio(source, point, name)
                else:
                    sample, note = self.runner.run(self._measure(source, point, name))
                    self.samples.setdefault(key, []).append(sample)
                    self.row_notes[key] = note
            except Unavailable as exc:
                if not any(left[0] is source and left[2] == name for left in self.left_out):
                    self.note(f"{name}, {source.store} store, from {point} on: {exc}")
                self.left_out.add(key)
            except FioError as exc:
                self.note(f"{name}, {point}: {exc}")
                self.left_out.add(key)
                # Once is enough: it would cost as much again at every point.
                self.fio_hangs = self.fio_hangs or isinstance(exc, FioHangs)

    def _fios(self) -> list[str]:
        if self.fio is None:
            return []
        best = self.options.fio_best and "uring+registered" in self.options.engines
        return ["fio", _FIO_BEST] if best else ["fio"]

    async def _measure(self, source: Source, point: Point, name: str) -> tuple[Sample, str]:
        async with prepared(source, point, name) as subject:
            sample = await measure(subject.work, subject.engine, self.options.seconds)
            return sample, subject.note()

    def _run_fio(self, source: Source, point: Point, name: str) -> None:
        assert self.fio is not None
        job = "randread" if point.pattern == "random" else "sequential"
        if name == _FIO_BEST:
            job += "-registered"
        result = self.fio.run(
            job, source.folder, source.files, point.size_bytes, point.depth, self.options.seconds
        )
        self.fio_results.setdefault((source, point, name), []).append(result)


def bench_io(
    directories: Sequence[Path],
    options: IoOptions,
    warming: ByteProgress = lambda phase, done_bytes, total_bytes: None,
    measuring: PointProgress = lambda done, total: None,
) -> IoReport:
    """Measure the bundles in ``directories``, one after the other at each point of a round.

    Args:
        directories: bundles, typically one model in its stores.
        options: what to measure.
        warming: told how far the first pass over the files is.
        measuring: told how many points were measured, each once a round.

    Raises:
        BundleError: a directory is no bundle.
        DiskReadError: the device failed.
        ConfigError: a directory is named twice, or nothing that was asked for can be measured.
    """
    sources = _sources(directories)
    fio, no_fio = _find_fio() if options.fio else (None, "")
    with asyncio.Runner(loop_factory=MeteredLoop) as runner:
        bench = _Bench(options, runner, fio)
        if no_fio:
            bench.note(f"{no_fio}: nothing to compare with")
        visits = [(source, point) for source in sources for point in _points(source, options, bench.note)]
        visits.sort(key=lambda visit: visit[1])  # bundles take turns at each point
        for source in sources:
            runner.run(warm(source, warming))
        # A collector's pass over everything that was imported is no disk work.
        gc.collect()
        gc.freeze()
        turns = len(visits) * options.rounds
        for turn in range(turns):
            measuring(turn, turns)
            bench.visit(*visits[turn % len(visits)], turn // len(visits))
        measuring(turns, turns)
    if not bench.samples:
        raise ConfigError(f"nothing was measured: {'; '.join(bench.notes)}")
    return _report(sources, bench)


def _find_fio() -> tuple[Fio | None, str]:
    """The installed fio, or why there is none to compare with."""
    try:
        fio = Fio.find()
    except FioError as exc:
        return None, f"fio: {exc}"
    return fio, "" if fio else "fio is not installed (Debian, Ubuntu: apt install fio)"


def _sources(directories: Sequence[Path]) -> list[Source]:
    seen: set[Path] = set()
    for directory in directories:
        if directory.resolve() in seen:
            raise ConfigError(f"{directory} is named twice; --also takes another bundle")
        seen.add(directory.resolve())
    return [open_source(directory) for directory in directories]


def _points(source: Source, options: IoOptions, note: Callable[[str], None]) -> list[Point]:
    """What to measure of a bundle, the cheapest to understand first."""
    stride = source.manifest.ffn.stride_bytes
    # Other sizes than a row's are reads of the one file, past the store.
    others = options.sizes_bytes if source.store == "file" else ()
    if source.store == "zarr" and options.sizes_bytes != DEFAULT_SIZES_BYTES and options.sizes_bytes:
        note(f"{source.directory}: a zarr store is read in rows of {stride} bytes; other sizes are left out")
    options.check_memory(stride)
    points = []
    for size in sorted({stride, *others}):
        if size > source.file_bytes:
            note(f"no reads of {size} bytes: the {source.store} store's files have {source.file_bytes}")
            continue
        points += [Point("random", size, depth) for depth in sorted(set(options.depths))]
    slice_bytes = min(RING_BYTES // RING_BUFFERS, source.manifest.ffn.layer_bytes)
    return [*points, Point("sequential", min(PIECE_BYTES, slice_bytes), STREAM_DEPTH)]


def _report(sources: list[Source], bench: _Bench) -> IoReport:
    rows = []
    names = {source: source.directory.resolve().name for source in sources}
    if len(set(names.values())) < len(sources):
        names = {source: str(source.directory) for source in sources}
    for (source, point, name), samples in sorted(
        bench.samples.items(),
        key=lambda item: (sources.index(item[0][0]), item[0][1], ENGINES.index(item[0][2])),
    ):
        note = bench.row_notes[source, point, name]
        plain, best = (bench.fio_results.get((source, point, fio), []) for fio in ("fio", _FIO_BEST))
        rows.append(_row(names[source], source.store, point, name, samples, plain, best, note))
    return IoReport(
        rows=rows,
        directories=[str(source.directory) for source in sources],
        device=_device(sources[0].directory),
        fio=bench.fio.version if bench.fio else None,
        max_callback_cpu_ms=max(row.max_callback_cpu_ms for row in rows),
        bytes_check=check_bytes(bench.samples),
        notes=bench.notes,
    )


def _row(
    bundle: str,
    store: str,
    point: Point,
    name: str,
    samples: list[Sample],
    fio: list[FioResult],
    fio_best: list[FioResult],
    note: str,
) -> IoRow:
    gb_per_s = median(sample.gb_per_s for sample in samples)
    fio_gb_per_s = median(result.gb_per_s for result in fio) if fio else None
    return IoRow(
        bundle=bundle,
        engine=name,
        store=store,
        pattern=point.pattern,
        size_bytes=point.size_bytes,
        depth=point.depth,
        gb_per_s=gb_per_s,
        fio_gb_per_s=fio_gb_per_s,
        fio_best_gb_per_s=median(result.gb_per_s for result in fio_best) if fio_best else None,
        ratio=gb_per_s / fio_gb_per_s if fio_gb_per_s and name != _PAGE_CACHE else None,
        cpu_us_per_read=median(sample.cpu_us_per_read for sample in samples),
        fio_cpu_us_per_read=median(result.cpu_us_per_read for result in fio) if fio else None,
        max_callback_cpu_ms=median(sample.max_callback_cpu_ms for sample in samples),
        max_callback_wall_ms=median(sample.max_callback_wall_ms for sample in samples),
        rounds_gb_per_s=[sample.gb_per_s for sample in samples],
        fio_rounds_gb_per_s=[result.gb_per_s for result in fio],
        note=note,
    )


def check_bytes(samples: dict[tuple[Source, Point, str], list[Sample]]) -> BytesCheck:
    """Compare what engines that pass the page cache by have read with the kernel's own count."""
    worst, where, any_counted = 0.0, "", False
    for (_, point, name), some in samples.items():
        direct = [sample for sample in some if sample.direct]
        if not direct:
            continue
        if any(sample.kernel_bytes is None for sample in direct):
            return BytesCheck(None, None, "/proc/self/io cannot be read here")
        read = sum(sample.engine_bytes for sample in direct)
        counted = sum(sample.kernel_bytes or 0 for sample in direct)
        any_counted = any_counted or counted > 0
        off = max(0, abs(counted - read) - _OTHER_READS_BYTES) / read
        if off >= worst:
            worst, where = off, f"{name}, {point}: {read} bytes read, {counted} counted"
    if not where:
        return BytesCheck(None, None, "no engine here passes the page cache by")
    if not any_counted:
        return BytesCheck(None, None, "the kernel counts no reads of this file system")
    return BytesCheck(worst <= _BYTES_TOLERANCE, 100 * worst, where)


def _device(directory: Path) -> dict[str, str]:
    facts = {"kernel": host.kernel(), "file_system": "", "source": "", "disk": "", "model": ""}
    try:
        mount = host.mount_of(directory)
    except (OSError, ValueError):
        return facts
    return facts | {
        "file_system": mount.file_system,
        "source": mount.source,
        "disk": mount.disk,
        "model": mount.model,
    }
