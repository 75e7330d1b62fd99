"""Blocking reads that end well or with a named error: continued when short, retried once on EIO."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from flashd.errors import BundleCorruptError, DiskReadError


@dataclass(frozen=True)
class OpenFile:
    """What reading from a file needs to know about it."""

    fd: int
    path: str


def open_readonly(path: str, flags: int = 0) -> int:
    """File descriptor for reading; ``DiskReadError`` names the file that cannot be opened."""
    try:
        # Opening a FIFO would wait for a writer. (O_NONBLOCK is no way out: io_uring would then
        # refuse to wait for the device.)
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise DiskReadError(f"{path}: cannot be opened for reading: not a regular file")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as exc:
        raise DiskReadError(f"{path}: cannot be opened for reading: {exc.strerror}") from exc


def read_exactly(file: OpenFile, view: memoryview, offset: int) -> tuple[int, int]:
    """Fill ``view`` from ``offset`` on, through the page cache.

    Returns:
        How often it went on after a short read, and how often it tried again after EIO.

    Raises:
        BundleCorruptError: the file ends earlier.
        DiskReadError: the device failed twice.
    """
    done, calls, retries = 0, 0, 0
    while done < len(view):
        got, again = _preadv(file, view[done:], offset + done)
        if not got:
            raise truncated(file.path, os.fstat(file.fd).st_size, offset + len(view))
        done += got
        calls += 1
        retries += again
    return max(0, calls - 1), retries


def truncated(path: str, size: int, expected: int) -> BundleCorruptError:
    """The error for a file that ends before what it should hold."""
    return BundleCorruptError(
        f"{path}: ends at byte {size}, expected {expected} or more; the file was truncated: "
        "convert the model again"
    )


def read_failed(path: str, nbytes: int, offset: int, reason: str) -> DiskReadError:
    """The error for a read that the device or file system refused."""
    return DiskReadError(
        f"{path}: reading {nbytes} bytes at offset {offset} failed: {reason}; check the device (dmesg), "
        "then `flashd verify` the bundle"
    )


def _preadv(file: OpenFile, view: memoryview, offset: int) -> tuple[int, bool]:
    """One read; EIO, which some devices report once and then recover from, is tried again."""
    try:
        return os.preadv(file.fd, (view,), offset), False
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise read_failed(file.path, len(view), offset, exc.strerror or str(exc)) from exc
    try:
        return os.preadv(file.fd, (view,), offset), True
    except OSError as exc:
        raise read_failed(file.path, len(view), offset, exc.strerror or str(exc)) from exc
