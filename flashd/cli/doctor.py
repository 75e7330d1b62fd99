"""``flashd doctor``: flags, and progress while the device is measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Self

import typer

from flashd.cli.daemon import JsonOption
from flashd.cli.doctor_report import print_doctor
from flashd.cli.render import EXIT_FAILURE, note, print_json

_DOTS = 60


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
