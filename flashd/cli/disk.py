"""``flashd doctor`` and ``flashd bench io``: flags and tables."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from flashd.cli.daemon import JsonOption
from flashd.cli.render import (
    EXIT_FAILURE,
    ByteProgress,
    human_bytes,
    human_duration,
    note,
    print_error,
    print_json,
    table,
)
from flashd.errors import ConfigError

if TYPE_CHECKING:
    from flashd.tools.bench.io import IoReport
    from flashd.tools.doctor_facts import BundleFacts, CurveFacts, DoctorReport
    from flashd.tools.host import LockedMemory, MemoryLimit, Mount

T = TypeVar("T")

_NOTE_INTERVAL_S = 10.0
_SIZE = re.compile(r"(\d+)(?:([KM])(?:i?B)?)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

bench = typer.Typer(name="bench", help="Measure this machine beside its raw figures.", rich_markup_mode=None)


@bench.callback()
def _group() -> None:
    """Measure this machine beside its raw figures."""


def doctor(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Bundle, or any directory on the device [default: the current one].",
                       show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the device's curve again (about 10 s).")
    ] = False,
    no_write: Annotated[
        bool, typer.Option("--no-write", help="Make no temporary file, even where there is none to read.")
    ] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show what flashd can use on this machine, and what keeps it from more.

    With DIR the device's curve is measured once and kept for the daemon.
    """
    from dataclasses import asdict

    from flashd.tools.doctor import doctor as run

    report = run(
        directory or Path(),
        curve=directory is not None,
        measure=measure,
        write=not no_write,
        note=note,
    )
    if as_json:
        print_json(asdict(report))
        return
    table(("FACT", "VALUE"), doctor_rows(report))
    if report.curve is not None:
        print()
        table(*curve_table(report))
    for warning in report.warnings:
        note(f"warning: {warning}")


def doctor_rows(report: DoctorReport) -> list[tuple[str, str]]:
    """What ``doctor`` found, as a table for people; the curve's points apart."""
    engine, kernels = report.engine, report.kernels
    rows = [
        ("flashd", f"{report.flashd}, Python {report.python}"),
        ("kernel", report.kernel),
        ("directory", report.directory),
        ("file system", _or_why(report, "mount", report.mount, _mount_text)),
        ("free space", _or_why(report, "free_bytes", report.free_bytes, human_bytes)),
        (
            "read engine",
            _or_why(
                report, "engine", report.engine, lambda e: f"{e.chosen}, {e.depth} reads at once: {e.reason}"
            ),
        ),
    ]
    for candidate in [] if engine is None else engine.candidates:
        works = "works" if candidate.works else "does not work"
        rows.append((f"  {candidate.name}", f"{works}: {candidate.reason}"))
    rows += [
        (
            "registered buffers",
            _or_why(report, "engine", report.engine, lambda e: e.registered_reason or "work"),
        ),
        (
            "alignment",
            _or_why(
                report,
                "alignment",
                report.alignment,
                lambda a: f"{'none' if a.bytes is None else a.bytes}: {a.how}",
            ),
        ),
        ("io_uring_disabled", _or_why(report, "io_uring_disabled", report.io_uring_disabled, str)),
        ("locked memory", _or_why(report, "locked_memory", report.locked_memory, _locked_text)),
        ("RAM", _or_why(report, "total_ram_bytes", report.total_ram_bytes, human_bytes)),
        ("RAM available", _or_why(report, "available_ram_bytes", report.available_ram_bytes, human_bytes)),
        ("cgroup memory limits", _or_why(report, "memory_limits", report.memory_limits, _limits_text)),
        (
            "transparent huge pages",
            _or_why(report, "transparent_hugepages", report.transparent_hugepages, str),
        ),
        (
            "kernels",
            f"{'native' if kernels.native else 'NumPy'}, {kernels.simd} "
            f"(of {', '.join(kernels.available_simd)}), {kernels.threads} threads",
        ),
        ("native reads", "installed" if kernels.native_reads else "not installed"),
        ("bundle", _or_why(report, "bundle", report.bundle, _bundle_text, "none here")),
        ("device curve", _or_why(report, "curve", report.curve, _curve_text)),
    ]
    return rows


def _or_why(
    report: DoctorReport, fact: str, value: T | None, text: Callable[[T], str], absent: str = ""
) -> str:
    if value is not None:
        return text(value)
    return f"unknown: {report.unknown[fact]}" if fact in report.unknown else absent


def _mount_text(mount: Mount) -> str:
    motor = ", says it rotates" if mount.rotational else ""
    disk = " ".join(filter(None, (mount.disk, mount.model))) or "no disk"
    return f"{mount.file_system} on {mount.source} ({disk}{motor})"


def _locked_text(limits: LockedMemory) -> str:
    soft, hard = (
        "unlimited" if n is None else human_bytes(n) for n in (limits.soft_bytes, limits.hard_bytes)
    )
    return f"{soft} (at most {hard})" + (", but CAP_IPC_LOCK lifts it" * limits.unlimited_by_capability)


def _limits_text(groups: list[MemoryLimit]) -> str:
    texts = []
    for group in groups:
        limits = (("limit", group.limit_bytes), ("throttled from", group.high_bytes))
        said = ", ".join(f"{name} {human_bytes(n)}" for name, n in limits if n is not None)
        texts.append(f"{group.path} (v{group.version}): {said}, {human_bytes(group.usage_bytes)} used")
    return "; ".join(texts) or "none"


def _bundle_text(bundle: BundleFacts) -> str:
    return f"{bundle.store} store, rows {bundle.stride_bytes} bytes apart, read {bundle.layout_note}"


def _curve_text(curve: CurveFacts) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(curve.measured_unix_s))
    kept = f"not kept: {curve.not_kept}" if curve.not_kept else f"kept in {curve.stored_in}"
    return (
        f"measured {when} with {curve.engine}, {kept}; gaps up to {human_bytes(curve.break_even_bytes)} "
        "are read over"
    )


def curve_table(report: DoctorReport) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the curve in GB/s: sizes downwards, depths across."""
    assert report.curve is not None
    speed = {(point.size_bytes, point.depth): point.gb_per_s for point in report.curve.points}
    sizes, depths = sorted({size for size, _ in speed}), sorted({depth for _, depth in speed})
    headers = ["GB/s AT DEPTH", *map(str, depths)]
    rows = []
    for size in sizes:
        cells = [f"{speed[size, depth]:.3f}" if (size, depth) in speed else "" for depth in depths]
        rows.append([human_bytes(size), *cells])
    return headers, rows


AlsoOption = Annotated[
    list[Path] | None,
    typer.Option(help="Another bundle to measure in turn with it, e.g. its zarr twin.", show_default=False),
]
SizeOption = Annotated[
    list[str] | None,
    typer.Option(help="Bytes of a random read, beside the bundle's own row, e.g. 16K; repeat it "
                 "[default: 8K, 16K, 32K].", show_default=False),
]  # fmt: skip
DepthOption = Annotated[
    list[int] | None,
    typer.Option(help="Random reads in flight; repeat it [default: 1, 2, 4 ... 256].", show_default=False),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(help="uring, uring+registered, threads or buffered; repeat it [default: all].",
                 show_default=False),
]  # fmt: skip
RoundsOption = Annotated[
    int | None, typer.Option(help="How often; medians count [default: 5].", show_default=False)
]
SecondsOption = Annotated[
    float | None, typer.Option(help="Of each measurement [default: 0.5].", show_default=False)
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="One short round of the bundle's own row at depths 1, 32 and 128.")
]
PlotOption = Annotated[
    Path | None, typer.Option(help="PNG file to draw into (needs matplotlib).", show_default=False)
]


@bench.command("io")
def bench_io(
    directory: Annotated[Path, typer.Argument(help="Bundle directory.")],
    also: AlsoOption = None,
    size: SizeOption = None,
    depth: DepthOption = None,
    engine: EngineOption = None,
    rounds: RoundsOption = None,
    seconds: SecondsOption = None,
    quick: QuickOption = False,
    no_fio: Annotated[bool, typer.Option("--no-fio", help="Don't compare with fio.")] = False,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a bundle's files are read, beside fio on the same files.

    Random reads over size and depth (Figure 2b of LLM in a flash) and sequential streaming, for every
    engine that works here. Don't use the machine meanwhile.
    """
    from dataclasses import asdict

    from flashd.tools.bench import io
    from flashd.tools.bench import plot as drawing

    given = {
        "sizes_bytes": None if size is None else tuple(map(parse_size, size)),
        "depths": None if depth is None else tuple(depth),
        "engines": None if engine is None else tuple(engine),
        "rounds": rounds,
        "seconds": seconds,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    options = io.io_options(chosen, quick, not no_fio)
    if plot is not None:
        drawing.check_plot(plot)
    with ByteProgress() as bytes_read:
        report = io.bench_io([directory, *(also or [])], options, bytes_read, _Countdown())
    for text in report.notes:
        note(text)
    if plot is not None:
        drawing.plot(report.rows, report.title(), plot)
    if as_json:
        print_json(asdict(report))
    else:
        print_io(report)
    if report.bytes_check.ok is False:
        print_error(f"the engines did not read what they say: {report.bytes_check.detail}")
        sys.exit(EXIT_FAILURE)


class _Countdown:
    """Says on stderr now and then how many measurements are still to come."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._said_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if not done:
            self._start_s = now_s
        elif done < total and now_s - self._said_s > _NOTE_INTERVAL_S:
            left_s = (now_s - self._start_s) / done * (total - done)
            note(f"{done} of {total} points measured, about {human_duration(left_s)} left")
            self._said_s = now_s


def parse_size(text: str) -> int:
    """``16K``, ``16KiB`` or ``16384`` -> 16384.

    Raises:
        ConfigError: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--size is {text!r}, expected bytes such as 16384, 16K or 1M")
    return int(match.group(1)) * _UNITS[(match.group(2) or "").lower()]


def print_io(report: IoReport) -> None:
    """The result for people."""
    headers = (
        "STORE",
        "PATTERN",
        "SIZE",
        "DEPTH",
        "ENGINE",
        "GB/s",
        "FIO GB/s",
        "RATIO",
        "CPU us/READ",
        "NOTE",
    )
    rows = [
        (
            row.store,
            row.pattern,
            human_bytes(row.size_bytes),
            row.depth,
            row.engine,
            f"{row.gb_per_s:.3f}",
            "-" if row.fio_gb_per_s is None else f"{row.fio_gb_per_s:.3f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.cpu_us_per_read:.1f}",
            row.note,
        )
        for row in report.rows
    ]
    table(headers, rows)
    print()
    check = report.bytes_check
    verdict = {True: "right", False: "WRONG", None: "unknown"}[check.ok]
    worst = "" if check.worst_percent is None else f", at most {check.worst_percent:.2f} % off"
    facts = [
        ("bytes read, by the kernel's count", f"{verdict}{worst} ({check.detail})"),
        ("longest callback on the event loop", f"{report.max_callback_cpu_ms:.2f} ms of CPU time"),
        ("device", report.title()),
        ("fio", report.fio or "took no part"),
    ]
    table(("FACT", "VALUE"), facts)
