"""A cgroup of a worker's own, so that its budget is enforced and not only kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from flashd.memory import cgroups

_NAME = "flashd-bench-"
# Limit, and swap and memory together where that is counted, by version of the hierarchy.
_FILES = {1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), 2: ("memory.max", "memory.swap.max")}


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[tuple[Path | None, str]]:
    """A new memory cgroup below this process's own, removed at the end of the block.

    Args:
        limit_bytes: its hard limit.

    Yields:
        Its directory and nothing, or None and why there is none.
    """
    why = "this process is in no memory cgroup that can be seen"
    made = None
    try:
        for version, mount, path in cgroups.memory_cgroups():
            # In a container the path may not exist below the mount; the mount's root then is our cgroup.
            own = mount.joinpath(path.lstrip("/"))
            made, why = _make(version, own if own.is_dir() else mount, limit_bytes)
            if made is not None:
                break
    except (OSError, ValueError) as exc:
        why = str(exc)
    try:
        yield made, "" if made is not None else why
    finally:
        if made is not None:
            with suppress(OSError):
                made.rmdir()


def _make(version: int, parent: Path, limit_bytes: int) -> tuple[Path | None, str]:
    group = parent / f"{_NAME}{os.getpid()}"
    limit, swap = _FILES[version]
    _remove_abandoned(parent)
    try:
        group.mkdir(exist_ok=True)  # a process of the same number may have been killed
    except OSError as exc:
        return None, f"{parent}: no cgroup can be made ({exc.strerror})"
    try:
        (group / limit).write_text(str(limit_bytes))
        with suppress(OSError):  # swap isn't counted everywhere
            (group / swap).write_text(str(limit_bytes) if version == 1 else "0")
    except OSError as exc:
        group.rmdir()
        return None, f"{parent}: memory cannot be limited ({exc.strerror})"
    return group, ""


def _remove_abandoned(parent: Path) -> None:
    """Groups of benchmarks that were killed."""
    for group in parent.glob(f"{_NAME}*"):
        number = group.name.removeprefix(_NAME)
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            with suppress(OSError):  # somebody is in it still, or it is not ours
                group.rmdir()


def join_group(group: Path) -> None:
    """Move this process, all threads, into a cgroup.

    Raises:
        OSError: it may not.
    """
    (group / "cgroup.procs").write_text(str(os.getpid()))
