"""Choosing a backend by what really works on a file, not by what ought to."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from flashd.disk.buffered import BufferedEngine
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadEngine
from flashd.disk.pieces import MAX_ALIGNMENT_BYTES
from flashd.disk.pooled import open_readonly
from flashd.disk.threads import ThreadsEngine
from flashd.errors import ConfigError

BACKENDS = ("auto", "direct", "buffered")
PROBED_ALIGNMENTS_BYTES = (512, 4096, MAX_ALIGNMENT_BYTES)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEM_ALIGN_AT = 152  # stx_dio_mem_align, stx_dio_offset_align: two u32 in struct statx


async def open_engine(path: str | os.PathLike[str], backend: str = "auto") -> ReadEngine:
    """Open a file with the named backend.

    Args:
        path: the file.
        backend: ``auto`` (direct if a real O_DIRECT read works on this file, else buffered),
            ``direct`` or ``buffered``.

    Raises:
        ConfigError: an unknown backend, or ``direct`` where it does not work.
        DiskReadError: the file cannot be opened.
    """
    name = os.fspath(path)
    if backend not in BACKENDS:
        raise ConfigError(f"unknown read backend {backend!r}; known: {', '.join(BACKENDS)}")
    if backend == "buffered":
        return await BufferedEngine.open(name)
    alignment, why = probe_direct(name)
    if alignment is not None:
        return ThreadsEngine(name, alignment, why)
    if backend == "direct":
        raise ConfigError(f"{name}: direct reads do not work here: {why}; use backend auto or buffered")
    return await BufferedEngine.open(name, f"direct reads do not work here: {why}")


def probe_direct(path: str) -> tuple[int | None, str]:
    """Alignment in bytes that O_DIRECT reads of this file need, and how that is known.

    Returns:
        ``(None, why)`` where direct reads do not work.

    Raises:
        DiskReadError: the file cannot be opened at all.
    """
    os.close(open_readonly(path))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as exc:
        return None, f"open with O_DIRECT: {exc.strerror}"
    try:
        stated = statx_alignment(fd)
        if stated is not None and 0 < stated <= MAX_ALIGNMENT_BYTES and try_direct(fd, stated) is None:
            return stated, f"O_DIRECT, alignment {stated} stated by statx"
        why = "statx says no O_DIRECT" if stated == 0 else ""
        for alignment in PROBED_ALIGNMENTS_BYTES:
            error = try_direct(fd, alignment)
            if error is None:
                return alignment, f"O_DIRECT, alignment {alignment} found by reading"
            why = f"reading with O_DIRECT: {error}"
        return None, why
    finally:
        os.close(fd)


def statx_alignment(fd: int) -> int | None:
    """What STATX_DIOALIGN says (Linux 6.1): the larger of memory and offset alignment, 0 for a
    file that cannot do direct reads, None where kernel, C library or file system say nothing."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    raw = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, raw) != 0:
        return None
    (mask,) = struct.unpack_from("=I", raw)
    memory, offset = struct.unpack_from("=II", raw, _MEM_ALIGN_AT)
    if not mask & _STATX_DIOALIGN:
        return None
    return 0 if not (memory and offset) else max(memory, offset)


def try_direct(fd: int, alignment_bytes: int) -> str | None:
    """Real reads at the start and one alignment on, into memory that is aligned just so.

    Returns:
        None if they work, else the error.
    """
    memory = aligned_empty(3 * alignment_bytes, 2 * max(alignment_bytes, 4096)).data
    view = memory[alignment_bytes : 2 * alignment_bytes]
    for offset in (0, alignment_bytes):
        try:
            os.preadv(fd, (view,), offset)
        except OSError as exc:
            # A bad sector is no question of alignment: the read that needs it will say so.
            if exc.errno != errno.EIO:
                return exc.strerror or str(exc)
    return None
