"""Files of a bundle being written: appended, hashed on the way, made durable; errors translated."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flashd.errors import ConversionError, OutOfSpaceError
from flashd.layout.manifest import FileEntry
from flashd.types import U8Array

_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would pass the largest size allowed (ulimit -f, or the file system's own limit)",
}
_REHASH_BYTES = 4 << 20


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Translate what the file system says while writing under ``path``.

    Raises:
        OutOfSpaceError: the disk is full; what is written so far stays for the next run.
        ConversionError: anything else the system refuses.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise OutOfSpaceError(
                f"{path}: {_FULL[exc.errno]}; free some space and run the same command again, it resumes "
                "where it stopped"
            ) from exc
        reason = exc.strerror or str(exc)
        raise ConversionError(
            f"cannot write {path}: {reason}; check the path, permissions and the disk"
        ) from exc


class HashedFile:
    """An append-only file whose SHA-256 is computed as it grows.

    Args:
        path: created if missing; anything behind ``durable_bytes`` is cut off.
        durable_bytes: what an earlier run is known to have written. It is read again, because
            SHA-256 states cannot be stored.
        on_rehash: called with each block of that prefix, in order, while it is read.
    """

    def __init__(
        self, path: Path, durable_bytes: int = 0, on_rehash: Callable[[bytes], None] | None = None
    ) -> None:
        self.path = path
        self.size_bytes = durable_bytes
        self._sha = hashlib.sha256()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._fd, durable_bytes)
            self._rehash(on_rehash)
        except BaseException:
            self.close()
            raise

    def _rehash(self, on_rehash: Callable[[bytes], None] | None) -> None:
        done = 0
        while done < self.size_bytes:
            block = os.read(self._fd, min(_REHASH_BYTES, self.size_bytes - done))
            if not block:
                raise ConversionError(
                    f"{self.path}: ends at byte {done}, expected {self.size_bytes}; run again"
                )
            self._sha.update(block)
            done += len(block)
            if on_rehash is not None:
                on_rehash(block)

    def write(self, data: bytes | U8Array) -> None:
        """Append bytes, or a C-contiguous uint8 array."""
        view = (memoryview(data) if isinstance(data, bytes) else data.data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(self._fd, view[done:])
        self._sha.update(view)
        self.size_bytes += len(view)

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        os.fdatasync(self._fd)

    def entry(self, root: Path) -> FileEntry:
        """Name relative to ``root``, size and hash of what is in it now."""
        return FileEntry(self.path.relative_to(root).as_posix(), self.size_bytes, self._sha.hexdigest())

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_path(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def hash_file(path: Path, root: Path) -> FileEntry:
    """Entry of a small file that is already complete."""
    data = path.read_bytes()
    return FileEntry(path.relative_to(root).as_posix(), len(data), hashlib.sha256(data).hexdigest())


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file as a whole: it has the old content or the new one, never half."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_path(path.parent)
