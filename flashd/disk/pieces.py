"""From a batch to system calls. Pure.

A piece goes to its destinations directly when offset, lengths and addresses are aligned. Anything
else is read as the aligned superset through scratch and copied::

    file     |----a----|----a----|----a----|      a = alignment
    wanted        [###################]
    scratch  [=============================]  one aligned read, then a copy of the middle
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flashd.disk.engine import SKIP, ReadBatch
from flashd.types import BoolArray, I64Array

# Longer reads into one place are spread over the queue; 1 MiB reaches the device's sequential speed.
# (Reads into several places are as long as who planned them wanted.)
PIECE_BYTES = 1 << 20
# Smaller, because every read in flight may hold a scratch buffer of this size.
SCRATCH_PIECE_BYTES = 128 << 10
MAX_ALIGNMENT_BYTES = 64 << 10


@dataclass(frozen=True)
class Pieces:
    """System calls to make, in order. ``n`` pieces with ``m`` destinations in all.

    Attributes:
        file: ``[n]``, index of the file.
        offset_bytes: ``[n]``, where in the file.
        first: ``[n + 1]``, index of each piece's first destination, and ``m``.
        length_bytes: ``[m]``, bytes for each destination.
        dest_offset_bytes: ``[m]``, where in the batch's memory, or ``SKIP``.
        in_place: ``[n]``, False where the piece goes through scratch.
    """

    file: I64Array
    offset_bytes: I64Array
    first: I64Array
    length_bytes: I64Array
    dest_offset_bytes: I64Array
    in_place: BoolArray

    def __len__(self) -> int:
        return len(self.offset_bytes)


# File, offset, length, destination: one destination a read.
_Columns = tuple[I64Array, I64Array, I64Array, I64Array]


def plan_pieces(batch: ReadBatch, alignment_bytes: int, *, scatter: bool = True) -> Pieces:
    """Cut a batch into pieces.

    Args:
        batch: the reads.
        alignment_bytes: what the files need of offset, length and address; a power of two.
        scatter: whether one piece may have several destinations.
    """
    low_bits = alignment_bytes - 1
    address = np.where(batch.dest_offset_bytes == SKIP, 0, batch.dest_offset_bytes + batch.dest.ctypes.data)
    misaligned = (batch.length_bytes | address) & low_bits
    aligned = not low_bits or not (misaligned.any() or (batch.offset_bytes & low_bits).any())
    n = len(batch.offset_bytes)
    file = np.zeros(n, np.int64) if batch.file is None else batch.file
    if batch.first is not None and scatter and aligned:
        return _drop_empty(file, batch)
    if batch.first is not None or (batch.dest_offset_bytes == SKIP).any():
        columns = _one_place_each(file, batch)
    else:
        columns = (file, batch.offset_bytes, batch.length_bytes, batch.dest_offset_bytes)
    if aligned:
        return _pieces(_split(columns, PIECE_BYTES), None)
    return _unaligned(columns, batch.dest.ctypes.data, low_bits)


def _drop_empty(file: I64Array, batch: ReadBatch) -> Pieces:
    """Reads with several destinations as they are; the kernel refuses nothing but reads of nothing."""
    assert batch.first is not None
    first = np.append(batch.first, len(batch.length_bytes))
    length, dest, offset = batch.length_bytes, batch.dest_offset_bytes, batch.offset_bytes
    filled = length > 0
    if not filled.all():
        before = np.concatenate(([0], np.cumsum(filled)))
        first = before[first]
        length, dest = length[filled], dest[filled]
        some = np.diff(first) > 0
        file, offset = file[some], offset[some]
        first = np.append(first[:-1][some], first[-1])
    return Pieces(file, offset, first, length, dest, np.ones(len(offset), np.bool_))


def _one_place_each(file: I64Array, batch: ReadBatch) -> _Columns:
    """Every destination a read of its own, those to skip left out: where rows need scratch, each is
    copied anyway, and one superset for all of them might be larger than a scratch buffer."""
    m = len(batch.length_bytes)
    first = np.arange(m) if batch.first is None else batch.first
    read = np.repeat(np.arange(len(first)), np.diff(first, append=m))
    before = np.cumsum(batch.length_bytes) - batch.length_bytes
    offset = batch.offset_bytes[read] + before - before[first][read]
    wanted = batch.dest_offset_bytes != SKIP
    return (
        file[read][wanted],
        offset[wanted],
        batch.length_bytes[wanted],
        batch.dest_offset_bytes[wanted],
    )


def _unaligned(columns: _Columns, base: int, low_bits: int) -> Pieces:
    file, offset, length, dest = columns
    head, body, tail = _cut(offset, length, dest + base, low_bits)
    direct = _split((file, offset + head, body, dest + head), PIECE_BYTES)
    edges = [(file, offset, head, dest), (file, offset + head + body, tail, dest + head + body)]
    return _pieces(direct, _concatenate([_split(edge, SCRATCH_PIECE_BYTES) for edge in edges]))


def _cut(
    offset: I64Array, length: I64Array, address: I64Array, low_bits: int
) -> tuple[I64Array, I64Array, I64Array]:
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
    file, offset, length, dest = columns
    parts = -(-length // limit_bytes)
    total = int(parts.sum())
    if total == len(parts) and (parts == 1).all():
        return columns
    read = np.repeat(np.arange(len(parts)), parts)
    skip = (np.arange(total) - np.repeat(np.cumsum(parts) - parts, parts)) * limit_bytes
    return file[read], offset[read] + skip, np.minimum(length[read] - skip, limit_bytes), dest[read] + skip


def _concatenate(many: list[_Columns]) -> _Columns:
    file, offset, length, dest = (np.concatenate(column) for column in zip(*many, strict=True))
    return file, offset, length, dest


def _pieces(direct: _Columns, scratch: _Columns | None) -> Pieces:
    if scratch is None or not len(scratch[0]):
        file, offset, length, dest = direct
        return Pieces(file, offset, np.arange(len(file) + 1), length, dest, np.ones(len(file), np.bool_))
    is_direct = np.arange(len(direct[0]) + len(scratch[0])) < len(direct[0])
    file, offset, length, dest = _concatenate([direct, scratch])
    order = np.lexsort((offset, file))
    return Pieces(
        file[order],
        offset[order],
        np.arange(len(file) + 1),
        length[order],
        dest[order],
        is_direct[order],
    )


def cut_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """At most ``parts`` runs ``(start, stop)`` of nearly equal length that cover ``count``."""
    parts = min(count, parts)
    bounds = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return list(pairwise(bounds))
