from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import SKIP, ReadBatch
from flashd.disk.pieces import PIECE_BYTES, SCRATCH_PIECE_BYTES, Pieces, cut_evenly, plan_pieces
from flashd.testing.engine_suite import random_batch

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
    file = np.arange(len(reads), dtype=np.int64) % 2
    return ReadBatch(offset, length, aligned_empty(total + base)[base:], at, None, file)


def check_limits(batch: ReadBatch, pieces: Pieces, alignment: int) -> None:
    """What the native side takes for granted."""
    assert len(pieces.first) == len(pieces) + 1
    assert (np.diff(pieces.first) >= 1).all()
    address = batch.dest.ctypes.data
    for i in range(len(pieces)):
        places = range(pieces.first[i], pieces.first[i + 1])
        total = sum(int(pieces.length_bytes[p]) for p in places)
        if not pieces.in_place[i]:
            assert 0 < total <= SCRATCH_PIECE_BYTES
            continue
        assert pieces.offset_bytes[i] % alignment == 0
        assert len(places) > 1 or total <= PIECE_BYTES
        for p in places:
            assert pieces.length_bytes[p] > 0
            assert pieces.length_bytes[p] % alignment == 0
            if pieces.dest_offset_bytes[p] != SKIP:
                assert (pieces.dest_offset_bytes[p] + address) % alignment == 0


@settings(deadline=None)
@given(READS, st.sampled_from([1, 512, 4096]), st.sampled_from([1, 512, 4096]), st.sampled_from([0, 1, 512]))
def test_pieces_are_the_batch_cut_up(
    reads: list[tuple[int, int, int]], alignment: int, grain: int, base: int
) -> None:
    batch = batch_of(reads, grain, base)
    pieces = plan_pieces(batch, alignment)
    assert batch.file is not None
    columns = (batch.dest_offset_bytes, batch.length_bytes, batch.offset_bytes, batch.file)
    wanted = glued(zip(*(column.tolist() for column in columns), strict=True))
    got = (pieces.dest_offset_bytes, pieces.length_bytes, pieces.offset_bytes, pieces.file)
    assert glued(zip(*(column.tolist() for column in got), strict=True)) == wanted
    check_limits(batch, pieces, alignment)


def glued(reads: Iterable[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Reads (destination, length, offset, file) in the order of destinations, those that go on where
    the one before ends put together, empty ones left out."""
    whole: list[tuple[int, int, int, int]] = []
    for at, length, offset, file in sorted(reads):
        if not length:
            continue
        if whole:
            last_at, last_length, last_offset, last_file = whole[-1]
            if (last_at + last_length, last_offset + last_length, last_file) == (at, offset, file):
                whole[-1] = (last_at, last_length + length, last_offset, file)
                continue
        whole.append((at, length, offset, file))
    return whole


@pytest.mark.parametrize("alignment", [1, 512, 4096])
@pytest.mark.parametrize("grain", [1, 512, 4096])
@pytest.mark.parametrize("scatter", [True, False])
def test_reads_with_several_places(alignment: int, grain: int, scatter: bool) -> None:
    """Carrying out the pieces by hand gives what the batch asks for."""
    rng = np.random.default_rng(alignment + grain)
    content = rng.integers(0, 256, 1 << 20, np.uint8)
    for _ in range(20):
        batch, expected = random_batch(rng, content, grain, int(rng.integers(0, 12)), 40_000)
        pieces = plan_pieces(batch, alignment, scatter=scatter)
        check_limits(batch, pieces, alignment)
        if not scatter:
            assert len(pieces.length_bytes) == len(pieces)
        for i in range(len(pieces)):
            offset = int(pieces.offset_bytes[i])
            for p in range(pieces.first[i], pieces.first[i + 1]):
                at, length = int(pieces.dest_offset_bytes[p]), int(pieces.length_bytes[p])
                if at != SKIP:
                    batch.dest[at : at + length] = content[offset : offset + length]
                offset += length
        np.testing.assert_array_equal(batch.dest, expected)


def test_an_aligned_read_into_many_rows_is_one_piece() -> None:
    dest = aligned_empty(8 * 4096, 4096)
    at = np.array([0, SKIP, 3, 2, SKIP]) * 4096
    at[[1, 4]] = SKIP
    batch = ReadBatch(np.array([4096]), np.full(5, 4096), dest, at, np.array([0]))
    assert len(plan_pieces(batch, 4096)) == 1
    assert len(plan_pieces(batch, 4096, scatter=False)) == 3


def test_only_the_edges_of_a_large_read_go_through_scratch() -> None:
    dest = aligned_empty(4 << 20)
    batch = ReadBatch(np.array([512]), np.array([3 << 20]), dest, np.array([512]))
    pieces = plan_pieces(batch, 4096)
    assert sorted(pieces.length_bytes[~pieces.in_place].tolist()) == [512, 3584]


def test_runs_are_even() -> None:
    assert cut_evenly(0, 4) == []
    assert cut_evenly(3, 8) == [(0, 1), (1, 2), (2, 3)]
    assert cut_evenly(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
