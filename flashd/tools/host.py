"""Facts about this machine, read from ``/proc`` and ``/sys``. Changes nothing.

Every function raises ``OSError`` or ``ValueError`` where its fact cannot be had; ``root`` is where
``proc`` and ``sys`` are.
"""

from __future__ import annotations

import os
import re
import resource
import stat
from dataclasses import dataclass
from pathlib import Path

from flashd.disk import device

_ROOT = Path("/")
_CAP_IPC_LOCK = 14


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
