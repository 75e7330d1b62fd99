"""Choosing a backend by what really works on a file, not by what ought to."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Sequence

import numpy as np

from flashd.disk import native_engine
from flashd.disk.blocking import open_readonly
from flashd.disk.buffered import BufferedEngine
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.pieces import MAX_ALIGNMENT_BYTES
from flashd.errors import BundleCorruptError, ConfigError, DiskReadError

# Fastest first: what ``auto`` tries.
ENGINES = ("uring", "threads", "buffered")
BACKENDS = ("auto", *ENGINES)
MAX_DEPTH = 4096
PROBED_ALIGNMENTS_BYTES = (512, 4096, MAX_ALIGNMENT_BYTES)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEM_ALIGN_AT = 152  # stx_dio_mem_align, stx_dio_offset_align: two u32 in struct statx

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


async def open_engine(paths: Paths, backend: str = "auto", *, depth: int | None = None) -> ReadEngine:
    """Open files with the named backend, after a real read with it.

    Args:
        paths: one file, or several of one mount; a batch names them by index.
        backend: ``auto`` (the first of ``ENGINES`` that works on these files) or one of them.
        depth: reads that the kernel holds at once; the backend's own default by default.

    Raises:
        ConfigError: an unknown backend, or one that does not work here.
        DiskReadError: a file cannot be opened.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if backend not in BACKENDS:
        raise ConfigError(f"unknown read backend {backend!r}; known: {', '.join(BACKENDS)}")
    if not names:
        raise ValueError("no file to read")
    if depth is not None and not 1 <= depth <= MAX_DEPTH:
        raise ConfigError(f"read depth is {depth}, expected 1 to {MAX_DEPTH}")
    reasons: list[str] = []
    for name in ENGINES if backend == "auto" else (backend,):
        engine, why = await _open(name, names, depth, reasons)
        if engine is not None:
            return engine
        reasons.append(f"{name}: {why}")
    if backend == "auto":
        raise DiskReadError(f"{names[0]}: no way of reading works here: {'; '.join(reasons)}")
    raise ConfigError(f"{names[0]}: backend {reasons[0]}; use backend auto")


async def _open(
    name: str, paths: list[str], depth: int | None, reasons: list[str]
) -> tuple[ReadEngine | None, str]:
    """An engine that has read from the largest file; else None and why not."""
    because = f" ({'; '.join(reasons)})" if reasons else ""
    if name == "buffered":
        options = {} if depth is None else {"depth": depth}
        cached = await asyncio.to_thread(BufferedEngine, paths, f"page cache{because}", **options)
        return await _tried(cached, 0, 1)
    if not native_engine.AVAILABLE:
        return None, "the native module is not installed"
    sizes = await asyncio.to_thread(_sizes, paths)  # of tens of thousands of chunks, perhaps
    sample = max(paths, key=lambda path: sizes[path])
    alignment, why = probe_direct(sample)
    if alignment is None:
        return None, why
    try:
        engine = await asyncio.to_thread(
            native_engine.open_native, name, paths, alignment, why + because, depth
        )
    except OSError as exc:
        hint = "; the limit of locked memory (ulimit -l) may be too low" if exc.errno == errno.ENOMEM else ""
        return None, f"{exc.strerror or exc}{hint}"
    return await _tried(engine, paths.index(sample), sizes[sample])


async def _tried(engine: ReadEngine, file: int, file_bytes: int) -> tuple[ReadEngine | None, str]:
    problem = await try_engine(engine, file, file_bytes)
    if problem is None:
        return engine, ""
    await engine.close()
    return None, problem


def _sizes(paths: list[str]) -> dict[str, int]:
    sizes = {}
    for path in paths:
        try:
            sizes[path] = os.stat(path).st_size
        except OSError as exc:
            raise DiskReadError(f"{path}: cannot be opened for reading: {exc.strerror}") from exc
    return sizes


async def try_engine(engine: ReadEngine, file: int, file_bytes: int) -> str | None:
    """Read the start of a file with an engine; None if that works, else the error."""
    nbytes = min(max(engine.alignment_bytes, 4096), file_bytes)
    batch = ReadBatch(
        np.array([0]), np.array([nbytes]), aligned_empty(nbytes), np.array([0]), None, np.array([file])
    )
    try:
        await engine.read(batch)
    except BundleCorruptError:
        pass  # shrinking at this moment: the read that needs the bytes will say so
    except DiskReadError as exc:
        # A bad sector is no question of the backend.
        if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno != errno.EIO:
            return str(exc)
    return None


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
