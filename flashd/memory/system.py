"""How much memory there is: for this process to take, and taken by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flashd.memory.cgroups import ROOT, memory_cgroups, memory_limits

SYSTEM = "system"
# Who moves this process to another cgroup is noticed after so long.
_REGROUP_S = 5.0


@dataclass(frozen=True)
class Reading:
    """Memory at one moment.

    Attributes:
        at_s: when, in seconds of a clock that never goes back.
        available_bytes: how much more this process can take; swap is no room.
        limit_bytes: of the machine or cgroup that says so: all its memory.
        source: ``system``, or that cgroup's path.
        footprint_bytes: what this process has of its own; files that are mapped are not among it.
        stalled: share of the time since the last reading in which somebody waited for memory (PSI ``some``,
            of the machine or this process's cgroup); None where the kernel does not say.
    """

    at_s: float
    available_bytes: int
    limit_bytes: int
    source: str
    footprint_bytes: int
    stalled: float | None = None


@dataclass(frozen=True)
class _Room:
    available_bytes: int
    limit_bytes: int
    source: str


class SystemMemory:
    """Reads memory from the kernel; a reading takes a fraction of a millisecond.

    Args:
        root: where ``proc`` and ``sys`` are; the machine's own figures are psutil's wherever it is.
        clock: seconds.
    """

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._stalls: tuple[float, int] | None = None  # when, and microseconds until then
        self._groups: list[tuple[int, Path, str]] = []
        self._looked_s = float("-inf")  # for them

    def read(self) -> Reading:
        """Memory now."""
        now_s = self._clock()
        if now_s - self._looked_s >= _REGROUP_S:
            self._looked_s = now_s
            with suppress(OSError, ValueError):
                self._groups = list(memory_cgroups(self._root))
        room = _tightest(self._root, self._groups)
        return Reading(
            at_s=now_s,
            available_bytes=room.available_bytes,
            limit_bytes=room.limit_bytes,
            source=room.source,
            footprint_bytes=footprint_bytes(),
            stalled=self._stalled(now_s),
        )

    def _stalled(self, now_s: float) -> float | None:
        files = _pressure_files(self._root, self._groups)
        stalls_us = [us for us in map(_stalls_us, files) if us is not None]
        if not stalls_us:
            return None
        before, self._stalls = self._stalls, (now_s, max(stalls_us))
        if before is None or now_s <= before[0]:
            return 0.0
        return min(1.0, max(0.0, (max(stalls_us) - before[1]) / 1e6 / (now_s - before[0])))


def available_bytes() -> int:
    """How much more memory this process can take: the machine's, or less in a cgroup."""
    return _tightest(ROOT, None).available_bytes


def footprint_bytes() -> int:
    """Memory of this process's own: anonymous and shared pages, those pinned for reads among them."""
    return status_bytes("RssAnon", "RssShmem")


def status_bytes(*names: str) -> int:
    """Lines of ``/proc/self/status`` added up."""
    wanted = tuple(f"{name}:" for name in names)
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(wanted))


def _tightest(root: Path, groups: list[tuple[int, Path, str]] | None) -> _Room:
    machine = psutil.virtual_memory()
    rooms = [_Room(machine.available, machine.total, SYSTEM)]
    with suppress(OSError, ValueError):
        for group in memory_limits(root, groups):
            rooms.append(_Room(group.available_bytes, group.least_bytes, group.path))
    return min(rooms, key=lambda room: room.available_bytes)


def _pressure_files(root: Path, groups: list[tuple[int, Path, str]]) -> list[Path]:
    """Of the machine, and of this process's cgroup in the unified hierarchy."""
    unified = [mount / path.lstrip("/") for version, mount, path in groups if version == 2 and path != "/"]
    return [root / "proc/pressure/memory", *(folder / "memory.pressure" for folder in unified)]


def _stalls_us(path: Path) -> int | None:
    """Microseconds in which some task waited for memory, ever."""
    with suppress(OSError, ValueError, IndexError):
        some = path.read_text().splitlines()[0].split()
        if some[0] == "some":
            return int(some[-1].removeprefix("total="))
    return None
