"""How the commands print: one-line errors, byte counts, progress bars, tables, JSON.

Facts go to stdout, everything about them (progress, notes, errors) to stderr. rich is imported
only where something is drawn: most commands start faster without it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
# C0 and C1 controls and DEL, but not tab and newline.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN_INTERVAL_S = 10.0


def fail(message: object, exit_code: int = EXIT_FAILURE) -> NoReturn:
    """Print one line on stderr and leave the program, inside or outside of a command.

    Args:
        message: text or exception; line breaks in it become spaces.
        exit_code: 1 for what went wrong, ``EXIT_USAGE`` for wrong arguments.
    """
    print_error(message)
    sys.exit(exit_code)


def print_error(message: object) -> None:
    """Print one line on stderr, for a command that goes on."""
    _stderr_line("error", message)


def note(message: object) -> None:
    """Print one line on stderr that is no error."""
    _stderr_line("note", message)


def _stderr_line(kind: str, message: object) -> None:
    line = " ".join(str(message).split())
    print(f"flashd: {kind}: {safe_text(line)}", file=sys.stderr, flush=True)


def safe_text(text: str) -> str:
    """Text without control characters: what a model writes must not steer the terminal."""
    return _CONTROLS.sub("", text)


def paragraph(text: str) -> None:
    """Print a sentence on stdout, broken between words on a terminal."""
    text = safe_text(" ".join(text.split()))
    if sys.stdout.isatty():
        text = textwrap.fill(text, shutil.get_terminal_size().columns - 1, subsequent_indent="  ")
    print(text)


def human_bytes(n_bytes: int) -> str:
    """``1536`` -> ``1.5 KiB``; binary units, three significant digits."""
    if abs(n_bytes) < 1024:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in _UNITS:
        value /= 1024
        if abs(value) < 1023.5 or unit == _UNITS[-1]:
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            text = f"{value:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
    raise AssertionError("the last unit takes everything")


def human_duration(seconds: float) -> str:
    """``0.0123`` -> ``12 ms``, ``75`` -> ``1 min 15 s``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def print_json(value: Any) -> None:
    """Print facts as JSON on stdout; dataclasses are objects, paths are strings."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=_jsonable), flush=True)


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "item"):  # a NumPy scalar
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout: drawn on a terminal, tab-separated lines elsewhere.

    Columns in which every cell is a number (or a number with a unit) are right-aligned.
    """
    cells = [[safe_text(str(cell)) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in [list(headers), *cells]:
            print("\t".join(cell.replace("\t", " ") for cell in row))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(header_style="bold")
    for index, header in enumerate(headers):
        numeric = bool(cells) and all(row[index][:1].isdigit() for row in cells)
        drawn.add_column(escape(header), justify="right" if numeric else "left")
    for row in cells:
        drawn.add_row(*map(escape, row))
    Console().print(drawn)


class ByteCount(Protocol):
    """How far a phase is, as ``convert`` reports it."""

    @property
    def phase(self) -> str:
        """Name of the phase."""
        ...

    @property
    def done_bytes(self) -> int:
        """Bytes done."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes in all."""
        ...


class ByteProgress:
    """Progress of ``convert`` and ``verify`` on stderr: phase, bytes, speed and time left.

    A context manager that is called with ``(phase, done_bytes, total_bytes)``, the bytes being
    those of all phases. On a terminal it draws a bar; elsewhere it prints a line when a phase
    begins and every ten seconds.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase: str | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        if self._enabled and sys.stderr.isatty():
            self._bar = _byte_bar()
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, phase: str | ByteCount, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Show that ``done_bytes`` of ``total_bytes`` of a phase are done; callable at any rate.

        Takes the three values, or one object that has them as attributes.
        """
        if not isinstance(phase, str):
            count = phase
            phase, done_bytes, total_bytes = count.phase, count.done_bytes, count.total_bytes
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(safe_text(phase), total=total_bytes)
            self._bar.update(
                self._task, description=safe_text(phase), completed=done_bytes, total=total_bytes
            )
        elif self._enabled:
            self._plain(phase, done_bytes, total_bytes)

    def _plain(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if phase == self._phase and now_s < self._next_line_s:
            return
        self._phase, self._next_line_s = phase, now_s + _PLAIN_INTERVAL_S
        note(f"{phase}: {human_bytes(done_bytes)} of {human_bytes(total_bytes)}")


def _byte_bar() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=Console(stderr=True),
    )
