"""Attention and rotary embeddings against float64."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import EXAMPLES, SEEDS


@EXAMPLES
@given(
    n_kv=st.integers(1, 5),
    group=st.sampled_from([1, 2, 3, 4, 7, 9]),
    width=st.integers(1, 40) | st.sampled_from([64, 80, 128]),
    tokens=st.integers(1, 3) | st.sampled_from([16, 17, 37]),
    before=st.integers(0, 40) | st.just(257),
    spare=st.integers(0, 9),
    half=st.booleans(),
    seed=SEEDS,
)
def test_attention(
    verbs: ModuleType,
    n_kv: int,
    group: int,
    width: int,
    tokens: int,
    before: int,
    spare: int,
    half: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    dtype = "f16" if half else "f32"
    length = before + tokens
    q = reference.normal(rng, tokens, n_kv * group, width)
    k, exact_k = reference.weights(rng, (n_kv, length + spare, width), dtype)
    v, exact_v = reference.weights(rng, (n_kv, length + spare, width), dtype)
    k[:, length:] = np.nan  # behind the sequence's end: must not be read
    v[:, length:] = np.nan
    out = np.full(q.shape, np.nan, np.float32)
    verbs.attention(q, k, v, length, 0.3, out)
    reference.attention(q, exact_k, exact_v, length, 0.3).check(out)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_attention_over_a_long_cache(verbs: ModuleType, tokens: int, dtype: str) -> None:
    """Longer than any block of positions."""
    rng = np.random.default_rng(3)
    q = reference.normal(rng, tokens, 4, 64)
    k, exact_k = reference.weights(rng, (2, 2100, 64), dtype)
    v, exact_v = reference.weights(rng, (2, 2100, 64), dtype)
    out = np.empty_like(q)
    verbs.attention(q, k, v, 2083, 0.125, out)
    reference.attention(q, exact_k, exact_v, 2083, 0.125).check(out)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(verbs: ModuleType, tokens: int, sign: int) -> None:
    """Far beyond what exp can hold, on either side."""
    q = np.full((tokens, 1, 8), sign * 1e4, np.float32)
    k = np.ones((1, 50, 8), np.float32)
    k[0, 1] = 1 + sign
    v = np.arange(400, dtype=np.float32).reshape(1, 50, 8)
    out = np.empty_like(q)
    verbs.attention(q, k, v, 50, 1.0, out)
    np.testing.assert_array_equal(out[:, 0], np.tile(v[0, 1], (tokens, 1)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_nan_and_inf(verbs: ModuleType, value: float, place: int, tokens: int) -> None:
    length, at = tokens + 4, tokens + 1  # the last three positions see it: at most 3 queries
    blind = max(0, tokens - 3)
    q = np.ones((tokens, 1, 37), np.float32)
    k, v = np.ones((1, length, 37), np.float32), np.ones((1, length, 37), np.float32)
    k[0, at, place] = value
    out = np.zeros_like(q)
    verbs.attention(q, k, v, length, 1.0, out)
    np.testing.assert_allclose(out[:blind], 1.0, rtol=1e-6)
    if value == -np.inf:
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)  # a position that nobody looks at
    else:
        assert np.isnan(out[blind:]).all()

    k[0, at, place] = 1
    v[0, at, place] = value
    verbs.attention(q, k, v, length, 1.0, out)
    np.testing.assert_array_equal(out[blind:, 0, place], np.full(tokens - blind, value))
    np.testing.assert_allclose(np.delete(out, place, axis=2), 1.0, rtol=1e-6)
    np.testing.assert_allclose(out[:blind], 1.0, rtol=1e-6)

    q[0, 0, place] = value
    verbs.attention(q, k, np.ones_like(v), length, 1.0, out)
    assert np.isnan(out[0]).all()
    np.testing.assert_allclose(out[1:], 1.0, rtol=1e-6)


@EXAMPLES
@given(tokens=st.integers(0, 40), heads=st.integers(0, 5), half=st.integers(0, 40) | st.just(64), seed=SEEDS)
def test_rope(verbs: ModuleType, tokens: int, heads: int, half: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = reference.normal(rng, tokens, heads, 2 * half)
    angle = rng.uniform(0, 6.3, (tokens, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    c, s = cos.astype(np.float64)[:, None], sin.astype(np.float64)[:, None]
    low, high = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    value = np.concatenate([low * c - high * s, high * c + low * s], axis=-1)
    size = np.concatenate([np.abs(low * c) + np.abs(high * s), np.abs(high * c) + np.abs(low * s)], axis=-1)
    verbs.rope(x, cos, sin)
    reference.Near(value, 2e-7 * size).check(x)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rope_with_nan_and_inf(verbs: ModuleType, value: float) -> None:
    """It reaches the pair that it belongs to."""
    x = np.ones((3, 2, 34), np.float32)
    x[1, 0, 16] = value
    verbs.rope(x, np.full((3, 17), 0.8, np.float32), np.full((3, 17), 0.6, np.float32))
    np.testing.assert_array_equal(x[1, 0, [16, 33]], [value, value])
    x[1, 0, [16, 33]] = 1
    assert np.isfinite(x).all()
