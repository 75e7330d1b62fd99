"""fio on the bundle's own files: what the device gives to a program that only reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("randread", "sequential", "randread-registered", "sequential-registered")
JOBS = {name: Path(__file__).with_name(f"{name}.fio") for name in _NAMES}
# fio 3.33 has no option for transparent huge pages; its C library does.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
# fio splits names at colons and takes a line of limited length; some dozens of files are as good as all.
MAX_FILES = 64
_START_TIMEOUT_S = 60.0


class FioError(Exception):
    """fio is there and could not read; the text says why."""


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
        """The fio on PATH; None if there is none that runs."""
        program = shutil.which("fio")
        if program is None:
            return None
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return None
        return cls(program, said.stdout.strip()) if said.returncode == 0 else None

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
            FioError: it failed or read nothing.
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
            done = subprocess.run(
                [self._program, "--readonly", "--output-format=json", str(JOBS[job])],
                cwd=folder,
                env=os.environ | values,
                capture_output=True,
                text=True,
                timeout=seconds + _START_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError) as exc:
            raise FioError(str(exc)) from exc
        return _parse(done.stdout, done.stderr)


def _parse(output: str, complaints: str) -> FioResult:
    """Figures of fio's JSON; some versions print their complaints in front of it."""
    start = output.find("{")
    complaint = next(
        (line for line in (complaints + output[: max(start, 0)]).splitlines() if line.strip()), ""
    )
    try:
        job = json.loads(output[start:])["jobs"][0]
        read = job["read"]
        reads, error = int(read["total_ios"]), int(job["error"])
        gb_per_s = float(read["bw_bytes"]) / 1e9
        cpu_share = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100
        cpu_us = cpu_share * float(read["runtime"]) * 1000
    except (ValueError, LookupError, TypeError) as exc:
        raise FioError(complaint or f"its output is not understood: {exc!r}") from exc
    if error or not reads:
        raise FioError(complaint or os.strerror(error) if error else complaint or "it read nothing")
    return FioResult(gb_per_s, cpu_us / reads)
