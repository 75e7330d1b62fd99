"""Files that are read once and should not stay in the page cache."""

from __future__ import annotations

import os
from types import TracebackType

from flashd.disk.blocking import OpenFile, open_readonly, read_exactly
from flashd.types import U8Array

_CHUNK_BYTES = 8 << 20


class ReadOnce:
    """A file read by blocking calls, for start-up and tools; a context manager.

    Each chunk's pages are dropped as soon as they are copied: a model must not lie in RAM twice,
    once in the process and once in the page cache.

    Attributes:
        size_bytes: the file's size when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        self._file = OpenFile(open_readonly(name), name)
        self.size_bytes = os.fstat(self._file.fd).st_size
        os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> ReadOnce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file.fd)

    def read_into(self, offset_bytes: int, out: U8Array) -> None:
        """Fill ``out`` (``[nbytes]`` uint8, contiguous) from ``offset_bytes`` on.

        Raises:
            BundleCorruptError: the file ends earlier.
            DiskReadError: the device failed.
        """
        view = out.data
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            read_exactly(self._file, chunk, offset_bytes + start)
            os.posix_fadvise(self._file.fd, offset_bytes + start, len(chunk), os.POSIX_FADV_DONTNEED)
