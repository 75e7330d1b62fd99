from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch
from flashd.disk.pieces import PIECE_BYTES, SCRATCH_PIECE_BYTES, cut_evenly, plan_pieces

READS = st.lists(
    st.tuples(
        st.integers(0, 1 << 40),
        st.one_of(st.integers(0, 9000), st.integers(0, 3 << 20)),
        st.integers(0, 5000),
    ),
    max_size=8,
)


def batch_of(reads: list[tuple[int, int, int]], grain: int, base: int) -> ReadBatch:
    """Reads with gaps between their destinations; offsets are multiples of ``grain``."""
    offset = np.array([r[0] // grain * grain for r in reads], np.int64)
    length = np.array([r[1] // grain * grain for r in reads], np.int64)
    gap = np.array([r[2] // grain * grain for r in reads], np.int64)
    at = np.cumsum(gap + length) - length
    total = int((gap + length).sum())
    return ReadBatch(offset, length, aligned_empty(total + base)[base:], at)


@settings(deadline=None)
@given(READS, st.sampled_from([1, 512, 4096]), st.sampled_from([1, 512, 4096]), st.sampled_from([0, 1, 512]))
def test_pieces_are_the_batch_cut_up(
    reads: list[tuple[int, int, int]], alignment: int, grain: int, base: int
) -> None:
    batch = batch_of(reads, grain, base)
    pieces = plan_pieces(batch, alignment)
    columns = (batch.dest_offset_bytes, batch.length_bytes, batch.offset_bytes)
    wanted = glued(zip(*(column.tolist() for column in columns), strict=True))
    assert (
        glued(zip(pieces.dest_offset_bytes, pieces.length_bytes, pieces.offset_bytes, strict=True)) == wanted
    )
    address = batch.dest.ctypes.data
    for i in range(len(pieces)):
        n = pieces.length_bytes[i]
        if pieces.direct[i]:
            assert 0 < n <= PIECE_BYTES
            for value in (n, pieces.offset_bytes[i], pieces.dest_offset_bytes[i] + address):
                assert value % alignment == 0
        else:
            assert 0 < n <= SCRATCH_PIECE_BYTES


def glued(reads: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Reads (destination, length, offset) in the order of destinations, those that go on where the
    one before ends put together, empty ones left out."""
    whole: list[tuple[int, int, int]] = []
    for at, length, offset in sorted(reads):
        if not length:
            continue
        if whole:
            last_at, last_length, last_offset = whole[-1]
            if (last_at + last_length, last_offset + last_length) == (at, offset):
                whole[-1] = (last_at, last_length + length, last_offset)
                continue
        whole.append((at, length, offset))
    return whole


def test_only_the_edges_of_a_large_read_go_through_scratch() -> None:
    dest = aligned_empty(4 << 20)
    batch = ReadBatch(np.array([512]), np.array([3 << 20]), dest, np.array([512]))
    pieces = plan_pieces(batch, 4096)
    through_scratch = [n for n, direct in zip(pieces.length_bytes, pieces.direct, strict=True) if not direct]
    assert sorted(through_scratch) == [512, 3584]
    assert pieces.scratch_reads == 2


def test_runs_are_even() -> None:
    assert cut_evenly(0, 4) == []
    assert cut_evenly(3, 8) == [(0, 1), (1, 2), (2, 3)]
    assert cut_evenly(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
