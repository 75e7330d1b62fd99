"""From a batch to system calls: cutting reads into pieces, and reading a run of pieces.

A piece goes to its destination directly when offset, length and address are aligned. Anything
else is read as the aligned superset through scratch and copied::

    file     |----a----|----a----|----a----|      a = alignment
    wanted        [###################]
    scratch  [=============================]  one aligned read, then a copy of the middle
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from flashd.disk.engine import ReadBatch
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.layout.geometry import round_up
from flashd.types import I64Array

# Large reads are spread over threads; 1 MiB reaches the device's sequential speed (DESIGN 9).
PIECE_BYTES = 1 << 20
# Smaller, because every thread may hold a scratch buffer of this size.
SCRATCH_PIECE_BYTES = 128 << 10
MAX_ALIGNMENT_BYTES = 64 << 10


@dataclass(frozen=True)
class Pieces:
    """System calls to make, in order: parallel lists of one length.

    ``direct[i]`` is False where the piece goes through scratch.
    """

    offset_bytes: list[int]
    length_bytes: list[int]
    dest_offset_bytes: list[int]
    direct: list[bool]

    def __len__(self) -> int:
        return len(self.offset_bytes)

    @property
    def scratch_reads(self) -> int:
        """Pieces that go through scratch."""
        return self.direct.count(False)


_Columns = tuple[I64Array, I64Array, I64Array]


def plan_pieces(batch: ReadBatch, alignment_bytes: int) -> Pieces:
    """Cut a batch into pieces. Pure.

    Args:
        batch: the reads.
        alignment_bytes: what the file needs of offset, length and address; a power of two.
    """
    columns = (batch.offset_bytes, batch.length_bytes, batch.dest_offset_bytes)
    if alignment_bytes == 1:
        return _pieces(_split(columns, PIECE_BYTES), None)
    offset, length, dest = columns
    address = dest + batch.dest.ctypes.data
    low_bits = alignment_bytes - 1
    if not ((offset | length | address) & low_bits).any():
        return _pieces(_split(columns, PIECE_BYTES), None)
    head, body, tail = _cut(offset, length, address, low_bits)
    direct = _split((offset + head, body, dest + head), PIECE_BYTES)
    edges = [(offset, head, dest), (offset + head + body, tail, dest + head + body)]
    scratch = [_split(edge, SCRATCH_PIECE_BYTES) for edge in edges]
    return _pieces(direct, _concatenate(scratch))


def _cut(offset: I64Array, length: I64Array, address: I64Array, low_bits: int) -> _Columns:
    """Bytes of each read before, in and behind its directly readable middle."""
    in_phase = ((offset ^ address) & low_bits) == 0
    head = np.minimum(-offset & low_bits, length)
    body = (length - head) & ~np.int64(low_bits)
    # One scratch read beats a direct read with an edge on each side, unless the read is large.
    aligned = (head == 0) & (body == length)
    direct = in_phase & (aligned | (length > SCRATCH_PIECE_BYTES))
    head = np.where(direct, head, length)
    body = np.where(direct, body, 0)
    return head, body, length - head - body


def _split(columns: _Columns, limit_bytes: int) -> _Columns:
    """Cut reads longer than ``limit_bytes``; drop empty ones."""
    offset, length, dest = columns
    parts = -(-length // limit_bytes)
    total = int(parts.sum())
    if total == len(parts) and (parts == 1).all():
        return columns
    read = np.repeat(np.arange(len(parts)), parts)
    skip = (np.arange(total) - np.repeat(np.cumsum(parts) - parts, parts)) * limit_bytes
    return offset[read] + skip, np.minimum(length[read] - skip, limit_bytes), dest[read] + skip


def _concatenate(many: list[_Columns]) -> _Columns:
    offset, length, dest = (np.concatenate(column) for column in zip(*many, strict=True))
    return offset, length, dest


def _pieces(direct: _Columns, scratch: _Columns | None) -> Pieces:
    if scratch is None or not len(scratch[0]):
        offset, length, dest = (column.tolist() for column in direct)
        return Pieces(offset, length, dest, [True] * len(offset))
    kind: npt.NDArray[np.bool_] = np.arange(len(direct[0]) + len(scratch[0])) < len(direct[0])
    offsets, lengths, dests = _concatenate([direct, scratch])
    order = np.argsort(offsets, kind="stable")
    return Pieces(
        offsets[order].tolist(), lengths[order].tolist(), dests[order].tolist(), kind[order].tolist()
    )


def cut_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """At most ``parts`` runs ``(start, stop)`` of nearly equal length that cover ``count``."""
    parts = min(count, parts)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return list(pairwise(bounds))


@dataclass(frozen=True)
class OpenFile:
    """What reading a piece needs to know about the file."""

    fd: int
    path: str
    alignment_bytes: int


def read_pieces(
    file: OpenFile,
    pieces: Pieces,
    start: int,
    stop: int,
    dest: memoryview,
    scratch: Callable[[], memoryview],
    stopped: Callable[[], bool],
) -> None:
    """Read pieces ``start..stop-1``: one Python call for a whole run of system calls.

    Args:
        file: the open file.
        pieces: from ``plan_pieces``.
        start: first piece.
        stop: one past the last piece.
        dest: the batch's destination.
        scratch: gives this thread's aligned scratch, ``scratch_bytes`` long.
        stopped: asked before each piece; True drops the rest.
    """
    for i in range(start, stop):
        if stopped():
            return
        offset, length, at = pieces.offset_bytes[i], pieces.length_bytes[i], pieces.dest_offset_bytes[i]
        if pieces.direct[i]:
            read_at_least(file, dest[at : at + length], offset, length)
            continue
        low = offset - offset % file.alignment_bytes
        high = round_up(offset + length, file.alignment_bytes)
        view = scratch()[: high - low]
        read_at_least(file, view, low, offset + length - low)
        dest[at : at + length] = view[offset - low : offset - low + length]


def scratch_bytes(alignment_bytes: int) -> int:
    """Size of the scratch that ``read_pieces`` needs: a piece and its aligned surroundings."""
    return SCRATCH_PIECE_BYTES + 2 * alignment_bytes


def read_at_least(file: OpenFile, view: memoryview, offset: int, need: int) -> None:
    """Fill at least the first ``need`` bytes of ``view``; what follows may be behind the end."""
    done = _preadv(file, view, offset)
    while done < need:
        # O_DIRECT goes on from an aligned offset only: a ragged short read is partly read again.
        resume = done - done % file.alignment_bytes
        reached = resume + _preadv(file, view[resume:], offset + resume)
        if reached <= done:
            raise BundleCorruptError(
                f"{file.path}: ends at byte {os.fstat(file.fd).st_size}, expected {offset + need} or more; "
                "the file was truncated: convert the model again"
            )
        done = reached


def _preadv(file: OpenFile, view: memoryview, offset: int) -> int:
    """One read; EIO, which some devices report once and then recover from, is tried again."""
    try:
        return os.preadv(file.fd, (view,), offset)
    except OSError as exc:
        if exc.errno != errno.EIO:
            raise _failed(file, view, offset, exc) from exc
    try:
        return os.preadv(file.fd, (view,), offset)
    except OSError as exc:
        raise _failed(file, view, offset, exc) from exc


def _failed(file: OpenFile, view: memoryview, offset: int, exc: OSError) -> DiskReadError:
    return DiskReadError(
        f"{file.path}: reading {len(view)} bytes at offset {offset} failed: {exc.strerror}; check the "
        "device (dmesg), then `flashd verify` the bundle"
    )
