"""Who says that memory gets short, between two looks at it: the kernel, of a cgroup that has a limit.

v1 has an event for usage that crosses a threshold, v2 counts in ``memory.events`` how often a limit was met
and says when the file changes. Of the machine as a whole nobody says it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flashd.memory.cgroups import ROOT, memory_cgroups, memory_limits

log = logging.getLogger("flashd.memory")

# Of the limit: usage that crosses these shares of it is told (v1). It counts the page cache, so that a group
# that reads files is at its limit all the time: then it is the regular looks that see what is available.
THRESHOLDS = (0.80, 0.90, 0.95)


class MemoryWake:
    """Calls back when a cgroup of this process comes near its limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._fds: list[int] = []
        self._v1: list[int] = []
        self._stop_read = self._stop_write = -1
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[], None]) -> None:
        """Begin; ``tell`` is called on this event loop. What cannot be watched is left out."""
        loop = asyncio.get_running_loop()
        v2 = []
        with suppress(OSError, ValueError):
            for folder, version, limit_bytes in _groups(self._root):
                if version == 1:
                    self._v1 += _thresholds(folder, limit_bytes)
                else:
                    with suppress(OSError):
                        v2.append(os.open(folder / "memory.events", os.O_RDONLY | os.O_CLOEXEC))
        for fd in self._v1:
            loop.add_reader(fd, _told, fd, tell)
        self._fds = [*self._v1, *v2]
        if v2:
            self._watch(v2, lambda: loop.call_soon_threadsafe(tell))

    def _watch(self, fds: list[int], tell: Callable[[], object]) -> None:
        """A changed file of this kind is an exceptional condition, which event loops do not wait for."""
        self._stop_read, self._stop_write = os.pipe()
        args = (fds, self._stop_read, tell)
        self._thread = threading.Thread(target=_poll, args=args, name="flashd-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and give everything back."""
        if self._thread is not None:
            os.close(self._stop_write)
            self._thread.join()
            os.close(self._stop_read)
            self._thread = None
        loop = asyncio.get_running_loop()
        for fd in self._v1:
            loop.remove_reader(fd)
        for fd in self._fds:
            os.close(fd)
        self._fds, self._v1 = [], []


def _groups(root: Path) -> list[tuple[Path, int, int]]:
    """Folder, version and limit of each group that has one."""
    mounts = {version: mount for version, mount, _ in memory_cgroups(root)}
    return [
        (mounts[group.version] / group.path.lstrip("/"), group.version, group.least_bytes)
        for group in memory_limits(root)
    ]


def _thresholds(folder: Path, limit_bytes: int) -> list[int]:
    """Event descriptors of a v1 group; none where it may not be asked."""
    fds = []
    for share in THRESHOLDS:
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            usage = os.open(folder / "memory.usage_in_bytes", os.O_RDONLY | os.O_CLOEXEC)
            try:
                request = f"{event} {usage} {int(share * limit_bytes)}"
                (folder / "cgroup.event_control").write_text(request)
            finally:
                os.close(usage)
        except OSError as exc:
            os.close(event)
            log.debug("%s: no events: %s", folder, exc)
            break
        fds.append(event)
    return fds


def _told(fd: int, tell: Callable[[], None]) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
    tell()


def _poll(fds: list[int], stop: int, tell: Callable[[], object]) -> None:
    poll = select.poll()
    for fd in fds:
        os.pread(fd, 4096, 0)  # the kernel tells changes since the last time
        poll.register(fd, select.POLLPRI)
    poll.register(stop, select.POLLIN | select.POLLHUP)
    while True:
        for fd, _ in poll.poll():
            if fd == stop:
                return
            os.pread(fd, 4096, 0)
        with suppress(RuntimeError):  # the loop has ended
            tell()
