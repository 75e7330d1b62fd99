"""Memory cgroups that this process is in, v2 and v1, from its own upwards.

``root`` is where ``proc`` and ``sys`` are. What cannot be read raises ``OSError`` or ``ValueError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
# cgroup v1 says "no limit" with a page-rounded 2^63; nothing real is that large.
_NO_LIMIT_BYTES = 1 << 60
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MemoryLimit:
    """A cgroup that limits this process's memory.

    Attributes:
        path: of the cgroup, below its hierarchy's mount.
        version: 1 or 2.
        limit_bytes: the hard limit; None for a group that only throttles.
        high_bytes: where the kernel begins to throttle (v2); None without.
        usage_bytes: what the group uses now, page cache included.
        reclaimable_bytes: of that, file cache that the kernel takes back at once: neither dirty nor being
            written.
    """

    path: str
    version: int
    limit_bytes: int | None
    high_bytes: int | None
    usage_bytes: int
    reclaimable_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """The lower of its limits."""
        return min(limit for limit in (self.limit_bytes, self.high_bytes) if limit is not None)

    @property
    def available_bytes(self) -> int:
        """How much more its processes may take."""
        return max(0, self.least_bytes - self.usage_bytes + self.reclaimable_bytes)


def memory_limits(
    root: Path = ROOT, groups: Iterable[tuple[int, Path, str]] | None = None
) -> list[MemoryLimit]:
    """Every cgroup from this process's own upwards that limits memory, v2 and v1.

    Args:
        root: where ``proc`` and ``sys`` are.
        groups: what ``memory_cgroups`` gives, if that is known.
    """
    found = []
    for version, mount, path in memory_cgroups(root) if groups is None else groups:
        # In a container the path may not exist below the mount; the mount's root then is our cgroup.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            limit = (_limit_v2 if version == 2 else _limit_v1)(folder, "/" + "/".join(parts[:depth]))
            if limit is not None:
                found.append(limit)
    return found


def memory_cgroups(root: Path = ROOT) -> Iterator[tuple[int, Path, str]]:
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


def _unescape(text: str) -> str:
    """Spaces and the like are octal in mountinfo."""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 8)), text)


def _limit_v2(folder: Path, path: str) -> MemoryLimit | None:
    hard, high = (_number(folder / name) for name in ("memory.max", "memory.high"))
    if hard is None and high is None:
        return None
    usage = _number(folder / "memory.current") or 0
    return MemoryLimit(path, 2, hard, high, usage, _reclaimable(folder, ""))


def _limit_v1(folder: Path, path: str) -> MemoryLimit | None:
    hard = _number(folder / "memory.limit_in_bytes")
    if hard is None or hard >= _NO_LIMIT_BYTES:
        return None
    usage = _number(folder / "memory.usage_in_bytes") or 0
    return MemoryLimit(path, 1, hard, None, usage, _reclaimable(folder, "total_"))


def _reclaimable(folder: Path, prefix: str) -> int:
    """File cache of a group and those below it that can go at once; zero where nothing is said of it.

    v1 counts children in lines of their own name, v2 in all.
    """
    values: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            values[name.removeprefix(prefix)] = int(value)
    dirty = ("dirty", "writeback") if prefix else ("file_dirty", "file_writeback")
    clean = values.get("inactive_file", 0) + values.get("active_file", 0)
    return max(0, clean - sum(values.get(name, 0) for name in dirty))


def _number(path: Path) -> int | None:
    """What a file says; None where there is none, or it says ``max``: no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
