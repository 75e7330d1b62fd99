"""Each verb against float64, for odd sizes, every dtype, every SIMD level and the twin."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import reference

DTYPES = st.sampled_from(["f32", "f16", "bf16"])
WIDTHS = st.integers(0, 70) | st.sampled_from([127, 128, 129, 255, 576, 1000])
SEEDS = st.integers(0, 2**32 - 1)
# Around the vector widths 4, 8 and 16 and their multiples, and beyond one chunk.
SIZES = WIDTHS.filter(bool)
COUNTS = st.one_of(st.integers(0, 20), st.sampled_from([64, 301]))
BATCHES = st.integers(1, 16)
EXAMPLES = settings(max_examples=60, deadline=None)
EPS = 1e-6  # of the sum of absolute products: some float32 roundings


@EXAMPLES
@given(n=COUNTS, k=WIDTHS, batch=BATCHES, dtype=DTYPES, biased=st.booleans(), seed=SEEDS)
def test_gemv(verbs: ModuleType, n: int, k: int, batch: int, dtype: str, biased: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, exact = reference.weights(rng, (n, k), dtype)
    x = rng.standard_normal((batch, k)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if biased else None
    out = np.full((batch, n), np.nan, np.float32)
    verbs.gemv(w, x, out, bias)
    expected = x.astype(np.float64) @ exact.T + (0 if bias is None else bias)
    size = np.abs(x).astype(np.float64) @ np.abs(exact).T + 1
    assert (np.abs(out - expected) <= 4 * EPS * size).all()


@EXAMPLES
@given(
    n=COUNTS,
    d=SIZES,
    batch=BATCHES,
    dtype=DTYPES,
    gated=st.booleans(),
    activation=st.sampled_from(["relu", "silu", "gelu", "gelu_tanh"]),
    biased=st.booleans(),
    padding=st.integers(0, 64),
    seed=SEEDS,
)
def test_ffn_dots(
    verbs: ModuleType,
    n: int,
    d: int,
    batch: int,
    dtype: str,
    gated: bool,
    activation: str,
    biased: bool,
    padding: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    rows, up, gate, _ = reference.rows_of(rng, n, d, gated, dtype, padding)
    x = rng.standard_normal((batch, d)).astype(np.float32)
    up_bias = rng.standard_normal(n).astype(np.float32) if biased else None
    gate_bias = rng.standard_normal(n).astype(np.float32) if biased and gated else None
    out = np.full((batch, n), np.nan, np.float32)
    verbs.ffn_dots(rows, dtype, d, gated, activation, x, out, up_bias, gate_bias)
    u = x.astype(np.float64) @ up.T + (0 if up_bias is None else up_bias)
    g = x.astype(np.float64) @ gate.T + (0 if gate_bias is None else gate_bias)
    expected = reference.activate(activation, g) * u if gated else reference.activate(activation, u)
    # An error of the gate is scaled by up, and the activations' slopes stay below 1.2.
    size = np.abs(x).astype(np.float64) @ np.abs(up).T + 2
    if gated:
        size = size * (np.abs(x).astype(np.float64) @ np.abs(gate).T + 2)
    assert (np.abs(out - expected) <= 4 * EPS * size).all()


@EXAMPLES
@given(
    n=COUNTS,
    d=SIZES,
    batch=BATCHES,
    dtype=DTYPES,
    gated=st.booleans(),
    padding=st.integers(0, 64),
    seed=SEEDS,
)
def test_ffn_down(
    verbs: ModuleType, n: int, d: int, batch: int, dtype: str, gated: bool, padding: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows, _, _, down = reference.rows_of(rng, n, d, gated, dtype, padding)
    h = rng.standard_normal((batch, n)).astype(np.float32)
    h[rng.random(h.shape) < 0.5] = 0
    start = rng.standard_normal((batch, d)).astype(np.float32)
    acc = start.copy()
    verbs.ffn_down(rows, dtype, d, gated, h, acc)
    expected = start + h.astype(np.float64) @ down
    size = np.abs(start) + np.abs(h).astype(np.float64) @ np.abs(down) + 1
    assert (np.abs(acc - expected) <= 10 * EPS * size).all()


@EXAMPLES
@given(
    n_kv=st.integers(1, 5),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    width=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128])),
    length=st.one_of(st.integers(1, 40), st.just(257)),
    spare=st.integers(0, 9),
    half=st.booleans(),
    seed=SEEDS,
)
def test_attention(
    verbs: ModuleType, n_kv: int, group: int, width: int, length: int, spare: int, half: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dtype = "f16" if half else "f32"
    q = rng.standard_normal((n_kv * group, width)).astype(np.float32)
    k, exact_k = reference.weights(rng, (n_kv, length + spare, width), dtype)
    v, exact_v = reference.weights(rng, (n_kv, length + spare, width), dtype)
    k[:, length:] = np.nan  # behind the sequence's end: must not be read
    v[:, length:] = np.nan
    out = np.full(q.shape, np.nan, np.float32)
    verbs.attention(q, k, v, length, 0.3, out)
    expected = reference.attention(q.astype(np.float64), exact_k, exact_v, length, 0.3)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-5)


def test_attention_survives_large_scores(verbs: ModuleType) -> None:
    q = np.full((1, 8), 1e4, np.float32)
    k = np.ones((1, 3, 8), np.float32)
    k[0, 1] = 2
    v = np.arange(24, dtype=np.float32).reshape(1, 3, 8)
    out = np.empty_like(q)
    verbs.attention(q, k, v, 3, 1.0, out)
    np.testing.assert_array_equal(out[0], v[0, 1])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
def test_nan_and_inf_reach_the_output(verbs: ModuleType, value: float, place: int) -> None:
    w = np.ones((7, 37), np.float16)
    w[3, place] = value
    x = np.ones((2, 37), np.float32)
    out = np.zeros((2, 7), np.float32)
    verbs.gemv(w, x, out)
    assert np.isfinite(out[:, [0, 1, 2, 4, 5, 6]]).all()
    np.testing.assert_array_equal(out[:, 3], [value, value])

    rows = np.ones((7, 74), np.float16)
    rows[3, place] = value
    verbs.ffn_dots(rows.view(np.uint8), "f16", 37, False, "relu", x, out)
    expected = 0.0 if value == -np.inf else value
    np.testing.assert_array_equal(out[:, 3], [expected, expected])

    h = np.ones((1, 7), np.float32)
    h[0, 3] = value
    acc = np.zeros((1, 37), np.float32)
    verbs.ffn_down(np.ones((7, 74), np.float16).view(np.uint8), "f16", 37, False, h, acc)
    np.testing.assert_array_equal(acc, np.full((1, 37), value))

    keys = np.ones((1, 5, 37), np.float32)
    keys[0, 2, place] = value
    mixed = np.zeros((1, 37), np.float32)
    verbs.attention(x[:1], keys, np.ones((1, 5, 37), np.float32), 5, 1.0, mixed)
    if value == -np.inf:
        np.testing.assert_allclose(mixed, 1.0)  # a position that nobody looks at
    else:
        assert np.isnan(mixed).all()


def test_rows_that_did_not_fire_are_not_read(verbs: ModuleType) -> None:
    rows = np.full((5, 32), np.nan, np.float32)
    rows[1] = 1.0
    h = np.zeros((2, 5), np.float32)
    h[0, 1] = 2.0
    h[1, 3] = -0.0
    acc = np.zeros((2, 16), np.float32)
    verbs.ffn_down(rows.view(np.uint8), "f32", 16, False, h, acc)
    np.testing.assert_array_equal(acc[0], np.full(16, 2.0))
    np.testing.assert_array_equal(acc[1], np.zeros(16))
