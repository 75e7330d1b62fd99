"""How many CPUs this process may really use: affinity mask and cgroup quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def default_threads(root: Path = Path("/"), affinity: int | None = None) -> int:
    """Threads that can run at once: the affinity mask, cut by the tightest CPU quota.

    Args:
        root: where ``proc`` and ``sys`` are.
        affinity: CPUs in the affinity mask; None asks the kernel.
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0))
    # A quota of 1.5 CPUs is worth two threads: rounding down would waste half a CPU.
    quotas = [-(-quota_us // period_us) for quota_us, period_us in _quotas(root) if quota_us > 0 < period_us]
    return max(1, min([affinity, *quotas]))


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(quota, period) in microseconds of this process's cgroup and all its ancestors, v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            # Hybrid systems mount v2 beside the v1 controllers.
            yield from _walk(base, path)
            yield from _walk(base / "unified", path)
        elif "cpu" in controllers.split(","):
            yield from _walk(base / controllers, path)
            yield from _walk(base / "cpu", path)


def _walk(mount: Path, path: str) -> Iterator[tuple[int, int]]:
    # In a container the path may not exist below the mount; the mount's root then is our cgroup.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        for quota in (_v2(folder), _v1(folder)):
            if quota is not None:
                yield quota


def _v2(folder: Path) -> tuple[int, int] | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (int(quota), int(period))
    except (OSError, ValueError):  # "max 100000": no quota
        return None


def _v1(folder: Path) -> tuple[int, int] | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return (quota, int((folder / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return None
