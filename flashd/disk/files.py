"""The open files of an engine: all of them at once, or the last used of very many."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Sequence

import numpy as np

from flashd.disk.blocking import open_readonly
from flashd.types import I64Array

# An unsharded zarr store has a file for every chunk, and a process may have 1024 open by default.
MAX_OPEN_FILES = 512


class FileTable:
    """File descriptors by index, opened when needed and closed when others need the room.

    Args:
        paths: the files.
        flags: for ``open``, beside read-only.
        moved: told ``(index, fd)`` when a file is opened, and ``(index, -1)`` before it is closed.
        max_open: descriptors to keep; exceeded only while reads that have begun need more files at once. By
            default ``MAX_OPEN_FILES``, or half of what the process may have, if that is less.

    Raises:
        DiskReadError: a file cannot be opened. Few files are all opened now.
    """

    def __init__(
        self,
        paths: Sequence[str],
        flags: int = 0,
        moved: Callable[[int, int], None] = lambda index, fd: None,
        max_open: int | None = None,
    ) -> None:
        self._fds: dict[int, int] = {}  # in the order of use
        self.paths = tuple(paths)
        max_open = max_open or max_open_files()
        self._flags = flags
        self._moved = moved
        self._max_open = max_open
        self._holders: dict[int, int] = {}
        self._opening = asyncio.Lock()
        try:
            for index in range(len(paths) if len(paths) <= max_open else 0):
                self._add(index, open_readonly(self.paths[index], flags))
        except BaseException:
            self.close()
            raise

    def fd(self, index: int) -> int:
        """Descriptor of a file that is held."""
        return self._fds[index]

    async def hold(self, file: I64Array) -> list[int]:
        """Open the files that ``file`` names (any order, repeats allowed) and keep them so.

        Returns:
            What ``release`` wants.

        Raises:
            DiskReadError: a file cannot be opened.
            ValueError: an index that does not exist.
        """
        wanted: list[int] = np.unique(file).tolist() if len(self.paths) > 1 else [0]
        if wanted and wanted[-1] >= len(self.paths):
            raise ValueError(f"a read names file {wanted[-1]} of {len(self.paths)}")
        while any(index not in self._fds for index in wanted):
            await self._open(wanted)
        for index in wanted:
            self._holders[index] = self._holders.get(index, 0) + 1
            self._fds[index] = self._fds.pop(index)
        return wanted

    def release(self, files: list[int]) -> None:
        """The reads that needed ``files`` have ended."""
        for index in files:
            self._holders[index] -= 1
        if len(self._fds) > self._max_open:
            idle = [index for index in self._fds if not self._holders.get(index)]
            for index in idle[: len(self._fds) - self._max_open]:
                os.close(self._forget(index))

    async def _open(self, wanted: list[int]) -> None:
        async with self._opening:
            missing = [index for index in wanted if index not in self._fds]
            kept = set(wanted)
            idle = [i for i in self._fds if not self._holders.get(i) and i not in kept]
            unused = [self._forget(i) for i in idle[: max(0, len(self._fds) + len(missing) - self._max_open)]]
            paths = [self.paths[index] for index in missing]
            # Shielded: descriptors opened by a thread that nobody waits for would leak.
            opened = asyncio.ensure_future(asyncio.to_thread(_exchange, unused, paths, self._flags))
            try:
                fds = await asyncio.shield(opened)
            except asyncio.CancelledError:
                opened.add_done_callback(_close_all)
                raise
            for index, fd in zip(missing, fds, strict=True):
                self._add(index, fd)

    def _add(self, index: int, fd: int) -> None:
        self._fds[index] = fd
        self._moved(index, fd)

    def _forget(self, index: int) -> int:
        """The descriptor, which is the caller's to close now."""
        self._moved(index, -1)
        return self._fds.pop(index)

    def __del__(self) -> None:
        self.close()  # of an engine that nobody closed

    def close(self) -> None:
        """Close what is open. No read may be in flight."""
        for index in list(self._fds):
            os.close(self._forget(index))


def max_open_files() -> int:
    """Descriptors that an engine keeps."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else max(1, min(MAX_OPEN_FILES, soft // 2))


def _exchange(unused: list[int], paths: list[str], flags: int) -> list[int]:
    """Close descriptors, open files."""
    for fd in unused:
        os.close(fd)
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(open_readonly(path, flags))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _close_all(opened: asyncio.Future[list[int]]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        for fd in opened.result():
            os.close(fd)
