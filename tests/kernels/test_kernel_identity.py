"""The same bits at every number of threads and batch size, for every slicing and order of tokens."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.reference import F32, same
from kernels.strategies import DTYPES, FEW, PROMPTS, SEEDS, THREADS


@FEW
@given(n=st.integers(1, 400), k=st.integers(200, 700), dtype=DTYPES, seed=SEEDS)
def test_gemv(verbs: ModuleType, n: int, k: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, _ = reference.weights(rng, (n, k), dtype)
    x, bias = reference.normal(rng, 16, k), reference.normal(rng, n)
    alone = np.empty((16, 1, n), np.float32)
    verbs.set_threads(1)
    for b in range(16):
        verbs.gemv(w, x[b : b + 1], alone[b], bias)
    for batch in range(1, 17):
        verbs.set_threads(THREADS[batch % len(THREADS)])
        out = np.empty((batch, n), np.float32)
        verbs.gemv(w, x[-batch:], out, bias)
        same(out, alone[-batch:, 0])
    order = rng.permutation(n)
    for threads in THREADS:
        verbs.set_threads(threads)
        out = np.empty((1, n), np.float32)
        verbs.gemv(w[order], x[:1], out, bias[order])
        same(out[0], alone[0, 0, order])


def prompts(rng: np.random.Generator, tokens: int, at_least: int) -> list[np.ndarray]:
    """Selections of a prompt's tokens: other lengths, other places, other orders."""
    few = int(rng.integers(at_least, tokens + 1))
    start = int(rng.integers(0, tokens - few + 1))
    return [np.arange(start, start + few), rng.permutation(tokens), rng.permutation(tokens)[:few]]


def check_tokens(
    verbs: ModuleType, rng: np.random.Generator, at_least: int, compute: Callable[[F32], F32], x: F32
) -> None:
    """``compute`` treats every token of ``x`` alike, at every number of threads."""
    verbs.set_threads(1)
    whole = compute(x)
    for threads in THREADS:
        verbs.set_threads(threads)
        same(compute(x), whole)
        for tokens in prompts(rng, len(x), at_least):
            same(compute(x[tokens]), whole[tokens])
    spoilt = x.copy()
    spoilt[0] = np.nan
    same(compute(spoilt)[1:], whole[1:])


@FEW
@given(n=st.integers(1, 300), k=st.integers(1, 600), tokens=PROMPTS, dtype=DTYPES, seed=SEEDS)
def test_gemm(verbs: ModuleType, n: int, k: int, tokens: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, _ = reference.weights(rng, (n, k), dtype)
    order = rng.permutation(n)

    def compute(x: F32) -> F32:
        out, turned = np.empty((2, len(x), n), np.float32)
        verbs.gemm(w, x, out)
        verbs.gemm(w[order], x, turned)
        same(turned, out[:, order])
        return out

    check_tokens(verbs, rng, 1, compute, reference.normal(rng, tokens, k))


@FEW
@given(
    n=st.integers(2, 300),
    d=st.integers(1, 600),
    dtype=DTYPES,
    gated=st.booleans(),
    activation=st.sampled_from(reference.ACTIVATIONS),
    seed=SEEDS,
)
def test_ffn(verbs: ModuleType, n: int, d: int, dtype: str, gated: bool, activation: str, seed: int) -> None:
    """One call on all rows, and slices of rows one after the other, as they come from flash."""
    rng = np.random.default_rng(seed)
    rows, *_ = reference.rows_of(rng, n, d, gated, dtype, 16)
    x, start = reference.normal(rng, 16, d), reference.normal(rng, 16, d)
    h = np.empty((16, n), np.float32)
    verbs.set_threads(1)
    verbs.ffn_dots(rows, dtype, d, gated, activation, x, h)
    thinned = np.where(rng.random(h.shape) < 0.4, np.float32(0), h)
    acc = start.copy()
    verbs.ffn_down(rows, dtype, d, gated, thinned, acc)
    for threads in THREADS:
        verbs.set_threads(threads)
        cuts = [0, *sorted(rng.integers(0, n + 1, 4).tolist()), n]
        for batch in rng.permutation(np.arange(1, 17))[:4].tolist():
            who = rng.permutation(16)[:batch]
            sliced = start[who]
            for first, last in pairwise(cuts):
                part = np.empty((batch, last - first), np.float32)
                verbs.ffn_dots(rows[first:last], dtype, d, gated, activation, x[who], part)
                same(part, h[who, first:last])
                kept = np.ascontiguousarray(thinned[who, first:last])
                verbs.ffn_down(rows[first:last], dtype, d, gated, kept, sliced)
            same(sliced, acc[who])


@FEW
@given(
    n=st.integers(1, 200),
    d=st.integers(1, 400),
    tokens=PROMPTS,
    dtype=DTYPES,
    gated=st.booleans(),
    seed=SEEDS,
)
def test_ffn_of_a_prompt(
    verbs: ModuleType, n: int, d: int, tokens: int, dtype: str, gated: bool, seed: int
) -> None:
    """Both halves; the slices of rows are cut anew for each selection of tokens."""
    rng = np.random.default_rng(seed)
    rows, *_ = reference.rows_of(rng, n, d, gated, dtype, 16)

    def compute(x: F32) -> F32:
        cuts = [0, *sorted(rng.integers(0, n + 1, 2).tolist()), n]
        h, acc = np.empty((len(x), n), np.float32), np.zeros((len(x), d), np.float32)
        for first, last in pairwise(cuts):
            mine = np.arange(first, last)
            verbs.ffn_dots(rows, dtype, d, gated, "silu", x, h, index=mine, slots=mine, threshold=0.1)
            part = np.ascontiguousarray(h[:, first:last])
            verbs.ffn_down(rows[first:last], dtype, d, gated, part, acc)
        return np.concatenate([h, acc], axis=1)

    check_tokens(verbs, rng, 17, compute, reference.normal(rng, tokens, d))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("n_kv", "group"), [(1, 9), (3, 3), (8, 4)])
@pytest.mark.parametrize(("tokens", "least"), [(16, 1), (61, 17)])
def test_attention(verbs: ModuleType, n_kv: int, group: int, dtype: str, tokens: int, least: int) -> None:
    """A query alone, among others at any place, at any number of threads; a head without the others."""
    rng = np.random.default_rng(1)
    length, width = 250 + tokens, 72
    q = reference.normal(rng, tokens, n_kv * group, width)
    k, _ = reference.weights(rng, (n_kv, 350, width), dtype)
    v, _ = reference.weights(rng, (n_kv, 350, width), dtype)
    verbs.set_threads(1)
    whole = np.empty_like(q)
    verbs.attention(q, k, v, length, 0.1, whole)
    for threads in THREADS:
        verbs.set_threads(threads)
        for first, last in (
            (0, tokens),
            (0, least),
            (tokens - least, tokens),
            (tokens // 4, tokens // 4 + least),
        ):
            out = np.empty_like(q[first:last])
            verbs.attention(q[first:last], k, v, length - tokens + last, 0.1, out)
            same(out, whole[first:last])
    mine = np.ascontiguousarray(q[:, -1:])
    head = np.empty_like(mine)
    verbs.attention(mine, k[-1:], v[-1:], length, 0.1, head)
    same(head, whole[:, -1:])


@pytest.mark.parametrize("tokens", [16, 61])
def test_attention_ignores_what_comes_later(verbs: ModuleType, tokens: int) -> None:
    """Neither later keys and values nor later queries change a bit, even if they are NaN."""
    rng = np.random.default_rng(4)
    q, k, v = (reference.normal(rng, *shape) for shape in ((tokens, 4, 24), (2, 90, 24), (2, 90, 24)))
    out, other = np.empty((2, *q.shape), np.float32)
    verbs.attention(q, k, v, 80, 0.2, out)
    q[9:], k[:, 80 - tokens + 9 :], v[:, 80 - tokens + 9 :] = np.nan, np.nan, np.nan
    verbs.attention(q, k, v, 80, 0.2, other)
    same(other[:9], out[:9])
    assert np.isnan(other[9:]).all()


@FEW
@given(d=st.integers(1, 700), tokens=PROMPTS, seed=SEEDS)
def test_norms(verbs: ModuleType, d: int, tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, bias = reference.normal(rng, 2, d)

    def compute(x: F32) -> F32:
        out = np.empty((2, *x.shape), np.float32)
        verbs.rmsnorm(x, weight, 1e-5, out[0])
        verbs.layernorm(x, weight, bias, 1e-5, out[1])
        return np.concatenate(out, axis=1)

    check_tokens(verbs, rng, 1, compute, reference.normal(rng, tokens, d))


@FEW
@given(half=st.integers(1, 70), tokens=PROMPTS, heads=st.integers(1, 5), seed=SEEDS)
def test_rope(verbs: ModuleType, half: int, tokens: int, heads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def compute(x: F32) -> F32:
        turned = np.ascontiguousarray(x[:, : heads * 2 * half]).reshape(len(x), heads, 2 * half)
        cos, sin = (np.ascontiguousarray(x[:, at:][:, :half]) for at in (-2 * half, -half))
        verbs.rope(turned, cos, sin)
        return turned

    check_tokens(verbs, rng, 1, compute, reference.normal(rng, tokens, (2 * heads + 2) * half))


@FEW
@given(d=st.integers(1, 300), rank=st.integers(1, 140), n=st.integers(1, 300), dtype=DTYPES, seed=SEEDS)
def test_predict_and_topk_union(verbs: ModuleType, d: int, rank: int, n: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w1, _ = reference.weights(rng, (rank, d), dtype)
    w2, _ = reference.weights(rng, (n, rank), dtype)
    b1, b2 = reference.normal(rng, rank), reference.normal(rng, n)
    k = int(rng.integers(1, n + 1))

    def compute(x: F32) -> F32:
        scores = np.empty((len(x), n), np.float32)
        chosen = np.zeros((2, len(x), n), np.float32)
        for which, (ids, mask) in enumerate(
            (verbs.predict(w1, w2, x, 0.5, b1, b2, scores), verbs.topk_union(scores, k))
        ):
            chosen[which][:, ids] = mask
        return np.concatenate([scores, *chosen], axis=1)

    check_tokens(verbs, rng, 1, compute, reference.normal(rng, 16, d))


def test_run_to_run(verbs: ModuleType) -> None:
    """Many times on two threads, so that every share of the work occurs."""
    rng = np.random.default_rng(2)
    w, _ = reference.weights(rng, (700, 513), "bf16")
    x = reference.normal(rng, 40, 513)
    rows, *_ = reference.rows_of(rng, 700, 256, False, "f16", 0)
    verbs.set_threads(2)
    first: list[F32] = []
    for _ in range(30):
        gemv, gemm = np.empty((4, 700), np.float32), np.empty((40, 700), np.float32)
        few, many = np.zeros((4, 256), np.float32), np.zeros((40, 256), np.float32)
        verbs.gemv(w, x[:4], gemv)
        verbs.gemm(w, x, gemm)
        verbs.ffn_down(rows, "f16", 256, False, gemv, few)
        verbs.ffn_down(rows, "f16", 256, False, gemm, many)
        results = [gemv, gemm, few, many]
        first = first or results
        for got, expected in zip(results, first, strict=True):
            same(got, expected)
