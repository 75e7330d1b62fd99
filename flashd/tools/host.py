"""Facts about this machine, read from ``/proc`` and ``/sys``. Changes nothing.

Every function raises ``OSError`` or ``ValueError`` where its fact cannot be had; ``root`` is where
``proc`` and ``sys`` are.
"""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashd.disk import device

_ROOT = Path("/")
_CAP_IPC_LOCK = 14
# cgroup v1 says "no limit" with a page-rounded 2^63; nothing real is that large.
_NO_LIMIT_BYTES = 1 << 60
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """Where a file lies.

    Attributes:
        file_system: its type, e.g. ``ext4``.
        source: what is mounted, e.g. ``/dev/nvme0n1p2``.
        disk: the kernel's name of the disk, e.g. ``nvme0n1``; empty for what has no block device.
        model: what the disk calls itself; empty if it says nothing.
        rotational: whether it has a motor; None if unknown.
    """

    file_system: str
    source: str
    disk: str
    model: str
    rotational: bool | None


@dataclass(frozen=True)
class MemoryLimit:
    """A cgroup that limits this process's memory.

    Attributes:
        path: of the cgroup, below its hierarchy's mount.
        version: 1 or 2.
        limit_bytes: the hard limit; None for a group that only throttles.
        high_bytes: where the kernel begins to throttle (v2); None without.
        usage_bytes: what the group uses now, page cache included.
    """

    path: str
    version: int
    limit_bytes: int | None
    high_bytes: int | None
    usage_bytes: int


@dataclass(frozen=True)
class LockedMemory:
    """How much memory this process may pin.

    Attributes:
        soft_bytes, hard_bytes: ``ulimit -l``; None is unlimited.
        unlimited_by_capability: CAP_IPC_LOCK, with which the limit doesn't count.
    """

    soft_bytes: int | None
    hard_bytes: int | None
    unlimited_by_capability: bool


def kernel() -> str:
    """``Linux 6.1.0 x86_64``."""
    name = os.uname()
    return f"{name.sysname} {name.release} {name.machine}"


def mount_of(path: Path) -> Mount:
    """The mount that holds ``path``, and the disk below it."""
    real = path.resolve(strict=True)
    file_system, source = device.mount_of(str(real), Path("/proc/self/mountinfo").read_text())
    block = device.block_device(real.stat().st_dev)
    if block is None:  # btrfs has numbers of its own; others have no disk
        try:
            info = os.stat(source)
        except (OSError, ValueError):
            info = None
        block = device.block_device(info.st_rdev) if info and stat.S_ISBLK(info.st_mode) else None
    if block is None:
        return Mount(file_system, source, "", "", None)
    spins = _line(block / "queue/rotational")
    return Mount(
        file_system,
        source,
        disk=block.name,
        model=_line(block / "device/model") or _line(block / "dm/name"),
        rotational=None if spins not in ("0", "1") else spins == "1",
    )


def _unescape(text: str) -> str:
    """Spaces and the like are octal in mountinfo."""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8)), text)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def locked_memory(root: Path = _ROOT) -> LockedMemory:
    """Limits of pinned memory, which io_uring's registered buffers count against."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    status = (root / "proc/self/status").read_text()
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return LockedMemory(soft, hard, bool(int(effective, 16) >> _CAP_IPC_LOCK & 1))


def memory_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """Every cgroup from this process's own upwards that limits memory, v2 and v1."""
    found = []
    for version, mount, path in memory_cgroups(root):
        # In a container the path may not exist below the mount; the mount's root then is our cgroup.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            limit = (_limit_v2 if version == 2 else _limit_v1)(mount.joinpath(*parts[:depth]))
            if limit is not None:
                hard, high, usage = limit
                found.append(MemoryLimit("/" + "/".join(parts[:depth]), version, hard, high, usage))
    return found


def memory_cgroups(root: Path = _ROOT) -> Iterator[tuple[int, Path, str]]:
    """(version, mount, path below it) of the hierarchies that may limit this process's memory."""
    mounts: dict[int, Path] = {}
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        tail = right.split()
        point = root / _unescape(left.split()[4]).lstrip("/")
        if tail[0] == "cgroup2":
            mounts.setdefault(2, point)
        elif tail[0] == "cgroup" and "memory" in tail[-1].split(","):
            mounts.setdefault(1, point)
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2 if not controllers else 0
        if version in mounts:
            yield version, mounts[version], path


def _limit_v2(folder: Path) -> tuple[int | None, int | None, int] | None:
    hard, high = (_number(folder / name) for name in ("memory.max", "memory.high"))
    if hard is None and high is None:
        return None
    return hard, high, _number(folder / "memory.current") or 0


def _limit_v1(folder: Path) -> tuple[int | None, int | None, int] | None:
    hard = _number(folder / "memory.limit_in_bytes")
    if hard is None or hard >= _NO_LIMIT_BYTES:
        return None
    return hard, None, _number(folder / "memory.usage_in_bytes") or 0


def _number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.isdecimal() else None  # "max": no limit


def io_uring_disabled(root: Path = _ROOT) -> int:
    """The sysctl: 0 everybody may use io_uring, 1 only the group ``io_uring_group`` and privileged
    ones, 2 nobody. Kernels before 6.6 do not have it (``FileNotFoundError``)."""
    return int((root / "proc/sys/kernel/io_uring_disabled").read_text())


def transparent_hugepages(root: Path = _ROOT) -> str:
    """``always``, ``madvise`` or ``never``."""
    text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        raise ValueError(f"not understood: {text.strip()!r}")
    return chosen.group(1)
