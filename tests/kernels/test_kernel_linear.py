"""gemv and gemm against float64."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import BATCHES, COUNTS, DTYPES, EXAMPLES, PROMPTS, SEEDS, WIDTHS


def check(
    verbs: ModuleType, verb: str, n: int, k: int, vectors: int, dtype: str, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w, exact = reference.weights(rng, (n, k), dtype)
    x = reference.normal(rng, vectors, k)
    bias = reference.normal(rng, n) if biased else None
    out = np.full((vectors, n), np.nan, np.float32)
    getattr(verbs, verb)(w, x, out, bias)
    reference.linear(exact, x, bias).check(out)


@EXAMPLES
@given(n=COUNTS, k=WIDTHS, batch=BATCHES, dtype=DTYPES, biased=st.booleans(), seed=SEEDS)
def test_gemv(verbs: ModuleType, n: int, k: int, batch: int, dtype: str, biased: bool, seed: int) -> None:
    check(verbs, "gemv", n, k, batch, dtype, biased, seed)


@EXAMPLES
@given(n=COUNTS, k=WIDTHS, tokens=st.one_of(BATCHES, PROMPTS), dtype=DTYPES, biased=st.booleans(), seed=SEEDS)
def test_gemm(verbs: ModuleType, n: int, k: int, tokens: int, dtype: str, biased: bool, seed: int) -> None:
    check(verbs, "gemm", n, k, tokens, dtype, biased, seed)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_gemm_of_a_long_prompt(verbs: ModuleType, dtype: str) -> None:
    """Wider and longer than any block of the panels."""
    check(verbs, "gemm", 333, 2100, 301, dtype, True, 5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
@pytest.mark.parametrize(("verb", "vectors"), [("gemv", 2), ("gemv", 16), ("gemm", 3), ("gemm", 40)])
def test_nan_and_inf(verbs: ModuleType, verb: str, vectors: int, value: float, place: int) -> None:
    """They reach what they touch, from weights, inputs and biases, and nothing else."""
    w, x, out = np.ones((7, 37), np.float16), np.ones((vectors, 37), np.float32), np.zeros((vectors, 7))
    out = out.astype(np.float32)
    w[3, place] = value
    getattr(verbs, verb)(w, x, out)
    np.testing.assert_array_equal(out[:, 3], np.full(vectors, value))
    np.testing.assert_array_equal(np.delete(out, 3, axis=1), np.full((vectors, 6), 37))

    w[3, place] = 1
    x[1, place] = value
    getattr(verbs, verb)(w, x, out)
    np.testing.assert_array_equal(out[1], np.full(7, value))
    np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.full((vectors - 1, 7), 37))

    bias = np.zeros(7, np.float32)
    bias[2] = value
    getattr(verbs, verb)(w, np.ones_like(x), out, bias)
    np.testing.assert_array_equal(out[:, 2], np.full(vectors, value))
