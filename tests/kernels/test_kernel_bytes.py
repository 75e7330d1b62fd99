"""Conversions bit by bit over all 16-bit values, and checksums."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import reference

ALL_16 = np.arange(1 << 16, dtype=np.uint16)


def test_every_float16_widens_exactly_and_comes_back(verbs: ModuleType) -> None:
    half = ALL_16.view(np.float16)
    wide = np.empty(half.shape, np.float32)
    verbs.to_f32(half, wide)
    np.testing.assert_array_equal(wide, half.astype(np.float32))
    assert (np.signbit(wide) == np.signbit(half)).all()
    back = np.empty_like(half)
    verbs.from_f32(wide, back)
    finite = ~np.isnan(half)
    np.testing.assert_array_equal(back.view(np.uint16)[finite], ALL_16[finite])
    assert np.isnan(back[~finite]).all()


def test_every_bfloat16_widens_exactly_and_comes_back(verbs: ModuleType) -> None:
    wide = np.empty(ALL_16.shape, np.float32)
    verbs.to_f32(ALL_16, wide)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(wide.view(np.uint32)[~nan], ALL_16[~nan].astype(np.uint32) << 16)
    assert nan.sum() == 2 * 127
    back = np.empty_like(ALL_16)
    verbs.from_f32(wide, back)
    np.testing.assert_array_equal(back[~nan], ALL_16[~nan])
    np.testing.assert_array_equal(back[nan], ALL_16[nan] | 0x40)


def test_ties_go_to_even(verbs: ModuleType) -> None:
    below = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    above = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (below + above) / 2
    for values in (
        middle,
        np.nextafter(middle, np.float32(0)),
        np.nextafter(middle, np.float32(1e9)),
        -middle,
    ):
        out = np.empty(values.shape, np.float16)
        verbs.from_f32(values, out)
        np.testing.assert_array_equal(out.view(np.uint16), values.astype(np.float16).view(np.uint16))

    low = np.arange(0x7F7F, dtype=np.uint32) << 16
    halfway = (low | 0x8000).view(np.float32)
    out = np.empty(halfway.shape, np.uint16)
    verbs.from_f32(halfway, out)
    np.testing.assert_array_equal(out, (low >> 16) + ((low >> 16) & 1))


@pytest.mark.parametrize("dtype", [np.float16, np.uint16, np.float32])
def test_extremes(verbs: ModuleType, dtype: type) -> None:
    src = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e-45], np.float32)
    out = np.empty(src.shape, dtype)
    verbs.from_f32(src, out)
    wide = np.empty_like(src)
    verbs.to_f32(out, wide)
    if dtype is np.float32:
        np.testing.assert_array_equal(wide, src)
    else:
        np.testing.assert_array_equal(wide, [0, -0.0, np.inf, -np.inf, np.nan, np.inf, -np.inf, 0])
    np.testing.assert_array_equal(np.signbit(wide)[:2], [False, True])


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(width=32), max_size=40),
    target=st.sampled_from([np.float16, np.float32]),
)
def test_any_float(verbs: ModuleType, values: list[float], target: type) -> None:
    src = np.array(values, np.float32)
    out = np.empty(src.shape, target)
    verbs.from_f32(src, out)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, src.astype(target))


def test_conversion_of_many_elements_in_any_shape(verbs: ModuleType) -> None:
    verbs.set_threads(3)
    src = np.resize(ALL_16, (3, 50_001))
    wide = np.empty(src.shape, np.float32)
    verbs.to_f32(src, wide)
    np.testing.assert_array_equal(wide, (src.astype(np.uint32) << 16).view(np.float32))
    empty = np.empty((0, 4), np.float32)
    verbs.to_f32(np.empty((0, 4), np.uint16), empty)
    scalar = np.zeros((), np.float32)
    verbs.to_f32(np.array(1.5, np.float16), scalar)
    assert scalar == 1.5


def test_crc32c_of_the_standard_vectors(verbs: ModuleType) -> None:
    """RFC 3720, appendix B.4."""
    vectors = {
        b"123456789": 0xE3069283,
        bytes(32): 0x8A9136AA,
        b"\xff" * 32: 0x62A8AB43,
        bytes(range(32)): 0x46DD794E,
        bytes(range(31, -1, -1)): 0x113FDB5C,
    }
    for data, expected in vectors.items():
        out = np.zeros(1, np.uint32)
        verbs.crc32c(np.frombuffer(data, np.uint8)[None], out)
        assert out[0] == expected


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 13),
    stride=st.one_of(st.integers(0, 70), st.just(512)),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 3),
)
def test_crc32c(verbs: ModuleType, n: int, stride: int, seed: int, threads: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (n, stride), np.uint8)
    out = np.zeros(n, np.uint32)
    verbs.set_threads(threads)
    verbs.crc32c(rows, out)
    expected = [reference.crc32c(row.tobytes()) for row in rows]
    assert out.tolist() == expected
    index = np.random.default_rng(seed).integers(0, max(1, n), 2 * n)
    listed = np.zeros(2 * n, np.uint32)
    verbs.crc32c(rows, listed, index)
    assert listed.tolist() == [expected[row] for row in index]


def test_crc32c_of_many_rows(verbs: ModuleType) -> None:
    rows = np.zeros((200, 4096), np.uint8)
    rows[np.arange(200), np.arange(200)] = 1
    out = np.zeros(200, np.uint32)
    verbs.set_threads(2)
    verbs.crc32c(rows, out)
    assert len(set(out.tolist())) == 200
    assert out[137] == reference.crc32c(rows[137].tobytes())


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 200) | st.sampled_from([4095, 4096, 100_003]),
    offset=st.integers(0, 8),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 3),
)
def test_read_all(verbs: ModuleType, n: int, offset: int, seed: int, threads: int) -> None:
    """Wherever the bytes start: the words count from the first of them."""
    memory = np.random.default_rng(seed).integers(0, 256, n + offset, np.uint8)[offset:]
    verbs.set_threads(threads)
    data, expected = memory.tobytes(), 0
    for start in range(0, n, 8):
        expected ^= int.from_bytes(data[start : start + 8], "little")
    assert verbs.read_all(memory) == expected
