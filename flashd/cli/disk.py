"""``flashd doctor`` and ``flashd bench io``: flags and tables."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Self

import typer

from flashd.cli.daemon import JsonOption
from flashd.cli.disk_report import print_doctor, print_io
from flashd.cli.render import EXIT_FAILURE, ByteProgress, note, print_error, print_json
from flashd.errors import ConfigError

_NOTE_INTERVAL_S = 10.0
_DOTS = 60
_SIZE = re.compile(r"(\d+)(?:([KM])(?:i?B)?)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

bench = typer.Typer(name="bench", help="Measure how fast this machine is.", rich_markup_mode=None)


@bench.callback()
def _group() -> None:
    """Measure how fast this machine is."""


def doctor(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", show_default=False,
                       help="Bundle, or any directory on the device [default: the current one]."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the device's curve again (about 10 s).")
    ] = False,
    no_write: Annotated[
        bool, typer.Option("--no-write",
                           help="Write nothing: no temporary file to read, and no curve to keep.")
    ] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show what flashd can use on this machine, and what keeps it from more.

    With DIR the device's curve is measured once and kept for the daemon. The exit code is 1 if DIR is a
    bundle that cannot be used, if no read engine works, or if --measure failed; else 0.
    """
    from dataclasses import asdict

    from flashd.tools.doctor import doctor as run

    with _Dots() as dots:
        report = run(
            directory or Path(),
            curve=directory is not None,
            measure=measure,
            write=not no_write,
            note=note,
            progress=dots,
        )
    if as_json:
        print_json(asdict(report))
    else:
        print_doctor(report)
    if report.failed:
        sys.exit(EXIT_FAILURE)


class _Dots:
    """A dot on the terminal for every point that was measured."""

    def __init__(self) -> None:
        self._drawn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._drawn:
            print(file=sys.stderr)

    def __call__(self, done: int, total: int) -> None:
        dots = done * _DOTS // total
        if sys.stderr.isatty() and dots > self._drawn:
            print("." * (dots - self._drawn), end="", file=sys.stderr, flush=True)
            self._drawn = dots


AlsoOption = Annotated[
    list[Path] | None,
    typer.Option(help="Another bundle to measure in turn with it, e.g. its zarr twin.", show_default=False),
]
SizeOption = Annotated[
    list[str] | None,
    typer.Option(help="Bytes of a random read, beside the bundle's own row, e.g. 8K,16K "
                 "[default: 8K,16K,32K].", show_default=False),
]  # fmt: skip
DepthOption = Annotated[
    list[str] | None,
    typer.Option(help="Random reads in flight, e.g. 32,64 [default: 1,2,4 ... 256].", show_default=False),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(help="Some of uring,uring+registered,threads,buffered [default: all].",
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
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")],
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
        "sizes_bytes": None if size is None else tuple(map(parse_size, _items(size))),
        "depths": None if depth is None else tuple(map(_parse_depth, _items(depth))),
        "engines": None if engine is None else tuple(_items(engine)),
        "rounds": rounds,
        "seconds": seconds,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    options = io.io_options(chosen, quick, not no_fio)
    if plot is not None:
        drawing.check_plot(plot)
    with ExitStack() as stack:
        bytes_read = stack.enter_context(ByteProgress())
        # The bar ends with the first pass: drawing would take CPU time from what is measured.
        countdown = _Countdown(begins=stack.close)
        report = io.bench_io([directory, *(also or [])], options, bytes_read, countdown)
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

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._start_s = self._said_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if not done:
            self._begins()
            self._start_s = self._said_s = now_s
        elif done < total and now_s - self._said_s > _NOTE_INTERVAL_S:
            left_s = (now_s - self._start_s) / done * (total - done)
            note(f"{done} of {total} measurements done, about {_rounded(left_s)} left")
            self._said_s = now_s


def _rounded(seconds: float) -> str:
    """``75.2`` -> ``1 min 15 s``, never less than a second."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _items(given: Sequence[str]) -> list[str]:
    """An option that is repeated, takes a list with commas, or both; each item once."""
    return list(dict.fromkeys(item.strip() for text in given for item in text.split(",")))


def _parse_depth(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--depth is {text!r}, expected a number of reads such as 64")
    return int(text)


def parse_size(text: str) -> int:
    """``16K``, ``16KiB`` or ``16384`` -> 16384.

    Raises:
        ConfigError: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--size is {text!r}, expected bytes such as 16384, 16K or 1M")
    return int(match.group(1)) * _UNITS[(match.group(2) or "").lower()]
