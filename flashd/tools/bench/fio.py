"""fio on the bundle's own files: what the device gives to a program that only reads."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from flashd.tools.bench.child import child

_NAMES = ("randread", "sequential", "randread-registered", "sequential-registered")
JOBS = {name: Path(__file__).with_name(f"{name}.fio") for name in _NAMES}
# fio 3.33 has no option for transparent huge pages; its C library does.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
# fio splits names at colons and takes a line of limited length; some dozens of files are as good as all.
MAX_FILES = 64
# What fio may take beside the time it reads for, and for telling its version.
_START_TIMEOUT_S = 15.0
_VERSION_TIMEOUT_S = 5.0


class FioError(Exception):
    """fio is there and could not read; the text says why."""


class FioHangs(FioError):
    """fio did not end in time."""


@dataclass(frozen=True)
class FioResult:
    """One run of fio.

    Attributes:
        gb_per_s: 1e9 bytes a second.
        cpu_us_per_read: CPU time of its thread.
    """

    gb_per_s: float
    cpu_us_per_read: float


class Fio:
    """The installed fio.

    Attributes:
        version: as it calls itself, e.g. ``fio-3.33``.
    """

    def __init__(self, program: str, version: str) -> None:
        self._program = program
        self.version = version

    @classmethod
    def find(cls) -> Fio | None:
        """The fio on PATH; None if there is none that runs.

        Raises:
            FioError: there is one, which hangs, crashes or says something odd.
        """
        program = shutil.which("fio")
        if program is None:
            return None
        try:
            said = _run([program, "--version"], None, os.environ, _VERSION_TIMEOUT_S)
        except OSError:
            return None
        if said.returncode != 0:
            return None
        version = _text(said.stdout).strip()
        if not version.isprintable():
            raise FioError(f"what it says to --version is not understood: {version[:80]!r}")
        return cls(program, version)

    def run(
        self, job: str, folder: Path, files: Sequence[str], size_bytes: int, depth: int, seconds: float
    ) -> FioResult:
        """Run one of ``JOBS`` and wait for its end.

        Args:
            job: a name; those with ``-registered`` are given huge pages, too.
            folder: where the files are.
            files: names relative to ``folder``, which fio takes as they are: no colons.
            size_bytes: of each read.
            depth: reads in flight.
            seconds: how long.

        Raises:
            FioError: it failed or read nothing; ``FioHangs`` if it does not end. It never outlives this.
        """
        values = {
            "FILES": ":".join(files[:MAX_FILES]),
            "SIZE": str(size_bytes),
            "DEPTH": str(depth),
            "RUNTIME": f"{max(1, round(seconds * 1000))}ms",
        }
        if job.endswith("-registered"):
            values["GLIBC_TUNABLES"] = _HUGE_PAGES
        try:
            done = _run(
                [self._program, "--readonly", "--output-format=json", str(JOBS[job])],
                folder,
                os.environ | values,
                seconds + _START_TIMEOUT_S,
            )
        except OSError as exc:
            raise FioError(str(exc)) from exc
        return _parse(_text(done.stdout), done.stderr.decode(errors="replace"))


def _run(
    command: Sequence[str], folder: Path | None, env: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a program with all that it starts; nothing of it is left at the end, however that comes."""
    with child(command, folder, env, subprocess.PIPE) as process:
        try:
            output, complaints = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as exc:
            what = "`fio --version`" if folder is None else "fio"
            raise FioHangs(f"{what} hangs: killed after {limit_s:.3g} s") from exc
    if process.returncode < 0:
        raise FioError(f"it was killed by {_signal_name(-process.returncode)}")
    return subprocess.CompletedProcess(command, process.returncode, output, complaints)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _text(output: bytes) -> str:
    try:
        return output.decode()
    except UnicodeDecodeError as exc:
        raise FioError(f"its output is not UTF-8: {output[exc.start : exc.start + 16]!r}") from exc


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _parse(output: str, complaints: str) -> FioResult:
    """Figures of fio's JSON; some versions print their complaints in front of it."""
    start = output.find("{")
    complaint = next(
        (line for line in (complaints + output[: max(start, 0)]).splitlines() if line.strip()), ""
    )
    try:
        job = json.loads(output[start:], parse_constant=_no_number)["jobs"][0]
        read = job["read"]
        reads, error = int(read["total_ios"]), int(job["error"])
        gb_per_s = float(read["bw_bytes"]) / 1e9
        cpu_share = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100
        cpu_us = cpu_share * float(read["runtime"]) * 1000
        reason = os.strerror(error)
        if not all(math.isfinite(value) and value >= 0 for value in (reads, gb_per_s, cpu_us)):
            raise ValueError(f"{reads} reads, {gb_per_s} GB/s, {cpu_us} us")
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as exc:
        raise FioError(complaint or f"its output is not understood: {exc!r}") from exc
    if error or not reads:
        raise FioError(complaint or reason if error else complaint or "it read nothing")
    return FioResult(gb_per_s, cpu_us / reads)
