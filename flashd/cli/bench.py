"""``flashd bench io`` and ``flashd bench kernels``: flags and progress."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from flashd.cli.bench_report import print_io, print_kernels
from flashd.cli.daemon import JsonOption
from flashd.cli.render import EXIT_FAILURE, ByteProgress, note, print_error, print_json
from flashd.errors import ConfigError
from flashd.tools.bench.kernels.legend import HELP
from flashd.tools.bench.kernels.options import VERBS, KernelOptions

_NOTE_INTERVAL_S = 10.0
# The first few measurements say little about the others.
_MIN_DONE = 5
_MIN_SHARE = 0.1
_SIZE = re.compile(r"(\d+)(?:([KM])(?:i?B)?)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

bench = typer.Typer(name="bench", help="Measure how fast this machine is.", rich_markup_mode=None)


@bench.callback()
def _group() -> None:
    """Measure how fast this machine is."""


AlsoOption = Annotated[
    list[Path] | None,
    typer.Option(help="Another bundle to measure in turn with it, e.g. its zarr twin.", show_default=False),
]
SizeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="BYTES,...", help="Bytes of a random read, beside the bundle's own row, e.g. 8K,16K "
                 "[default: 8K,16K,32K].", show_default=False),
]  # fmt: skip
DepthOption = Annotated[
    list[str] | None,
    typer.Option(metavar="N,...", help="Random reads in flight, e.g. 32,64 [default: 1,2,4 ... 256].",
                 show_default=False),
]  # fmt: skip
EngineOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,...", help="Some of uring,uring+registered,threads,buffered [default: all].",
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
        "sizes_bytes": None if size is None else tuple(map(parse_size, _items("--size", size))),
        "depths": _numbers("--depth", depth, "reads such as 64"),
        "engines": parse_names("--engine", engine),
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
        countdown = Countdown(begins=stack.close)
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


VerbOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,...", help=f"Some of {', '.join(VERBS)} [default: all].", show_default=False),
]
TypeOption = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="NAME,...", help="Some of f32,f16,bf16,u8 (bytes) [default: all].",
                 show_default=False),
]  # fmt: skip
BatchOption = Annotated[
    list[str] | None,
    typer.Option(metavar="N,...", show_default=False,
                 help="Some numbers of sequences, or of a prompt's tokens, e.g. 1,4 [default: all]."),
]  # fmt: skip


@bench.command("kernels", help=HELP)
def bench_kernels(
    verb: VerbOption = None,
    dtype: TypeOption = None,
    batch: BatchOption = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="How often; medians count [default: 5; 1 if quick].", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Of the kernels, torch and NumPy [default, and most: all usable CPUs].", show_default=False
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round on little memory: no figures to quote.")
    ] = False,
    no_torch: Annotated[bool, typer.Option("--no-torch", help="Don't compare with torch.")] = False,
    as_json: JsonOption = False,
) -> None:
    """See ``legend.HELP``, which is what ``--help`` shows."""
    from dataclasses import asdict

    from flashd.tools.bench.kernels.run import bench_kernels as run

    options = KernelOptions(
        verbs=parse_names("--verb", verb),
        dtypes=parse_names("--dtype", dtype),
        batches=_numbers("--batch", batch, "sequences such as 4"),
        rounds=rounds if rounds is not None else 1 if quick else 5,
        threads=threads,
        quick=quick,
        torch=not no_torch,
    )
    times = f"{options.rounds} round{'s' * (options.rounds > 1)}"
    report = run(options, Countdown(lambda: note(f"measuring, {times}; leave the machine alone meanwhile")))
    for text in report.notes:
        note(text)
    if as_json:
        print_json(asdict(report))
    else:
        print_kernels(report)


class Countdown:
    """Says on stderr now and then how many measurements are still to come."""

    def __init__(self, begins: Callable[[], None] = lambda: None) -> None:
        self._begins = begins
        self._start_s = self._said_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` are measured; 0 starts the clock."""
        now_s = time.monotonic()
        if not done:
            self._begins()
            self._start_s = self._said_s = now_s
        elif done < total and now_s - self._said_s > _NOTE_INTERVAL_S:
            left_s = (now_s - self._start_s) / done * (total - done)
            known = done >= _MIN_DONE or done >= _MIN_SHARE * total
            left = f", about {_rounded(left_s)} left" if known else ""
            note(f"{done} of {total} measurements done{left}")
            self._said_s = now_s


def _rounded(seconds: float) -> str:
    """``75.2`` -> ``1 min 15 s``, never less than a second."""
    minutes, rest = divmod(max(1, round(seconds)), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _items(option: str, given: Sequence[str]) -> list[str]:
    """An option that is repeated, takes a list with commas, or both; each item once."""
    items = list(dict.fromkeys(item.strip() for text in given for item in text.split(",")))
    if "" in items:
        raise ConfigError(f"{option} has an empty item: {','.join(given)!r}")
    return items


def parse_names(option: str, given: Sequence[str] | None) -> tuple[str, ...] | None:
    """Values of an option that may be repeated and may hold commas; None if it is not given."""
    return None if given is None else tuple(_items(option, given))


def _numbers(option: str, given: Sequence[str] | None, example: str) -> tuple[int, ...] | None:
    """Numbers; ``example`` says of what, and shows one."""
    if given is None:
        return None
    return tuple(_number(option, text, example) for text in _items(option, given))


def _number(option: str, text: str, example: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{option} is {text!r}, expected a number of {example}")
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
