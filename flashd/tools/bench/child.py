"""Programs that a benchmark runs: whatever ends the benchmark ends them, too."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # looked up now: little may be done between fork and exec


@contextmanager
def child(
    command: Sequence[str],
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, in a process group of its own: Ctrl-C is for us, who end it.

    Args:
        command: program and arguments.
        folder: where it runs.
        env: its environment; None: ours.
        stderr: as ``subprocess.Popen`` takes it.

    Yields:
        The process, its output in a pipe. At the end of the block nothing is left of it and of all that
        it has started; should this process be killed, nothing is left of the process either.

    Raises:
        OSError: it cannot be run.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        # SIGKILL leaves no time for anything.
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        process_group=0,
        preexec_fn=die_with_parent,  # no lock is taken in it, and nothing is imported
    ) as process:
        try:
            yield process
        finally:
            # The whole group: what it started holds the pipes, and would go on.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """In the block SIGTERM raises ``SystemExit``: what is to be removed at the end is, as with Ctrl-C.
    For the main thread."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
