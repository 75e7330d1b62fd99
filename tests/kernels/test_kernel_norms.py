"""rmsnorm and layernorm against float64."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import EXAMPLES, SEEDS, SIZES

TOKENS = st.integers(0, 20) | st.just(70)
EPSILONS = st.sampled_from([0.0, 1e-6, 1e-5, 0.1])


@EXAMPLES
@given(tokens=TOKENS, d=SIZES, eps=EPSILONS, in_place=st.booleans(), seed=SEEDS)
def test_rmsnorm(verbs: ModuleType, tokens: int, d: int, eps: float, in_place: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = 3 * reference.normal(rng, tokens, d), reference.normal(rng, d)
    wide = x.astype(np.float64)
    value = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + eps) * weight
    out = x if in_place else np.full(x.shape, np.nan, np.float32)
    verbs.rmsnorm(x, weight, eps, out)
    reference.Near(value, reference.EPS * (2 + np.sqrt(d)) * np.abs(value)).check(out)


@EXAMPLES
@given(
    tokens=TOKENS,
    d=SIZES,
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    shift=st.sampled_from([0.0, 0.0, 10.0, -300.0]),
    biased=st.booleans(),
    in_place=st.booleans(),
    seed=SEEDS,
)
def test_layernorm(
    verbs: ModuleType,
    tokens: int,
    d: int,
    eps: float,
    shift: float,
    biased: bool,
    in_place: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = reference.normal(rng, tokens, d) + np.float32(shift)
    weight = reference.normal(rng, d)
    bias = reference.normal(rng, d) if biased else None
    wide = x.astype(np.float64)
    differs = wide - wide.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt(np.square(differs).mean(axis=1, keepdims=True) + eps)
    value = differs * scale * weight
    # The mean is wrong by its own size; so are the differences, and by less their squares' mean.
    size = (np.abs(differs) + np.abs(wide).mean(axis=1, keepdims=True)) * scale * np.abs(weight)
    if bias is not None:
        value, size = value + bias, size + np.abs(bias)
    out = x if in_place else np.full(x.shape, np.nan, np.float32)
    verbs.layernorm(x, weight, bias, eps, out)
    reference.Near(value, reference.EPS * (2 + np.sqrt(d)) * size).check(out)


def test_layernorm_far_from_zero(verbs: ModuleType) -> None:
    """The mean of squares less the squared mean would leave nothing of this in float32."""
    x = np.float32(8192) + np.tile(np.array([1, -1], np.float32), (3, 40))
    out = np.empty_like(x)
    verbs.layernorm(x, np.ones(80, np.float32), None, 1e-5, out)
    np.testing.assert_allclose(out, np.tile([1, -1], (3, 40)), rtol=1e-5)


@pytest.mark.parametrize("shift", [1e3, -1e5, 1e7])
def test_layernorm_of_small_differences(verbs: ModuleType, shift: float) -> None:
    """The mean itself, rounded to float32, would be off by more than the values differ."""
    x = (np.random.default_rng(0).standard_normal((3, 575)) + shift).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True)
    verbs.layernorm(x, np.ones(575, np.float32), None, 0.0, x)
    np.testing.assert_allclose(x, expected, atol=1e-6)


@pytest.mark.parametrize("size", [1e-37, 1e-23, 1e-15, 1e15, 1e18, 1e37])
def test_norms_of_small_and_large_values(verbs: ModuleType, size: float) -> None:
    """Squares of these are no float32."""
    x = np.tile(np.array([size, -size, size], np.float32), (2, 11))
    out = np.empty_like(x)
    verbs.rmsnorm(x, np.full(33, 2, np.float32), 0.0, out)
    np.testing.assert_allclose(out, np.copysign(2, x), rtol=1e-6)
    verbs.layernorm(x, np.ones(33, np.float32), None, 0.0, out)
    np.testing.assert_allclose(out[:, :2], [[8**-0.5 * 2, -(2**0.5)]] * 2, rtol=1e-6)


def test_zeros_stay_zero(verbs: ModuleType) -> None:
    x, ones = np.zeros((2, 33), np.float32), np.ones(33, np.float32)
    verbs.rmsnorm(x, ones, 1e-5, x)
    np.testing.assert_array_equal(x, np.zeros((2, 33)))
    verbs.layernorm(x, ones, ones, 1e-5, x)
    np.testing.assert_array_equal(x, np.ones((2, 33)))


@pytest.mark.parametrize("place", [0, 17, 36])
def test_nan_and_inf(verbs: ModuleType, place: int) -> None:
    """NaN spoils its token, infinity its own value; other tokens stay as they are."""
    ones = np.ones(37, np.float32)
    for value in (np.nan, np.inf, -np.inf):
        x = np.ones((3, 37), np.float32)
        x[1, place] = value
        out = np.empty_like(x)
        verbs.rmsnorm(x, ones, 0.0, out)
        np.testing.assert_allclose(out[[0, 2]], 1, rtol=1e-6)
        assert np.isnan(out[1, place])
        if np.isnan(value):
            assert np.isnan(out[1]).all()
        verbs.layernorm(x, ones, None, 1e-5, out)
        np.testing.assert_allclose(out[[0, 2]], 0, atol=1e-6)
        assert np.isnan(out[1]).all()
    weight = ones.copy()
    weight[place] = np.nan
    verbs.rmsnorm(np.ones((1, 37), np.float32), weight, 0.0, out[:1])
    assert np.isnan(out[0]).nonzero()[0].tolist() == [place]
