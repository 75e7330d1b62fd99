"""The same bits for every thread count, batch size and slicing (DESIGN promise 2)."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import reference

SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from(["f32", "f16", "bf16"])
THREADS = (1, 2, 3, 7)


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 400), k=st.integers(200, 700), dtype=DTYPES, seed=SEEDS)
def test_gemv(verbs: ModuleType, n: int, k: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, _ = reference.weights(rng, (n, k), dtype)
    x = rng.standard_normal((16, k)).astype(np.float32)
    alone = np.empty((16, 1, n), np.float32)
    verbs.set_threads(1)
    for b in range(16):
        verbs.gemv(w, x[b : b + 1], alone[b])
    for threads in THREADS:
        verbs.set_threads(threads)
        for batch in (1, 2, 3, 4, 5, 7, 16):
            out = np.empty((batch, n), np.float32)
            verbs.gemv(w, x[:batch], out)
            same(out, alone[:batch, 0])
    order = rng.permutation(n)
    out = np.empty((1, n), np.float32)
    verbs.gemv(w[order], x[:1], out)
    same(out[0], alone[0, 0, order])


@settings(max_examples=10, deadline=None)
@given(n=st.integers(2, 300), d=st.integers(1, 600), dtype=DTYPES, gated=st.booleans(), seed=SEEDS)
def test_ffn(verbs: ModuleType, n: int, d: int, dtype: str, gated: bool, seed: int) -> None:
    """One call on all rows, and slices of rows one after the other, as they come from flash."""
    rng = np.random.default_rng(seed)
    rows, *_ = reference.rows_of(rng, n, d, gated, dtype, 16)
    x = rng.standard_normal((5, d)).astype(np.float32)
    h = np.empty((5, n), np.float32)
    acc = np.zeros((5, d), np.float32)
    verbs.set_threads(1)
    verbs.ffn_dots(rows, dtype, d, gated, "silu", x, h)
    h[rng.random(h.shape) < 0.4] = 0
    verbs.ffn_down(rows, dtype, d, gated, h, acc)
    cuts = [0, *sorted(rng.integers(0, n + 1, 4).tolist()), n]
    for threads in THREADS:
        verbs.set_threads(threads)
        for batch in (1, 3, 5):
            sliced = np.zeros((batch, d), np.float32)
            for start, stop in pairwise(cuts):
                part = np.empty((batch, stop - start), np.float32)
                verbs.ffn_dots(rows[start:stop], dtype, d, gated, "silu", x[:batch], part)
                kept = h[:batch, start:stop]
                same(part[kept != 0], kept[kept != 0])
                verbs.ffn_down(rows[start:stop], dtype, d, gated, np.ascontiguousarray(kept), sliced)
            same(sliced, acc[:batch])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("n_kv", "group"), [(1, 9), (3, 3), (8, 4)])
def test_attention(verbs: ModuleType, dtype: type, n_kv: int, group: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((n_kv * group, 72)).astype(np.float32)
    k = rng.standard_normal((n_kv, 400, 72)).astype(dtype)
    v = rng.standard_normal((n_kv, 400, 72)).astype(dtype)
    results = []
    for threads in THREADS:
        verbs.set_threads(threads)
        out = np.empty_like(q)
        verbs.attention(q, k, v, 389, 0.1, out)
        results.append(out)
    for out in results[1:]:
        same(out, results[0])
    head = np.empty((1, 72), np.float32)
    last = n_kv * group - 1
    verbs.attention(q[last:], k[-1:], v[-1:], 389, 0.1, head)
    same(head[0], results[0][last])


def test_run_to_run(verbs: ModuleType) -> None:
    rng = np.random.default_rng(2)
    w, _ = reference.weights(rng, (700, 513), "bf16")
    x = rng.standard_normal((4, 513)).astype(np.float32)
    verbs.set_threads(2)
    first = np.empty((4, 700), np.float32)
    verbs.gemv(w, x, first)
    for _ in range(50):
        out = np.empty_like(first)
        verbs.gemv(w, x, out)
        same(out, first)
