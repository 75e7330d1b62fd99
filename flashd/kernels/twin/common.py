"""What the twins share: widened weights, blocks that stay in the cache, dot products."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flashd.types import F32Array, I64Array, WeightArray

_BLOCK_ELEMENTS = 1 << 18  # one block of converted weights stays in the L2 cache


def widen(weights: WeightArray) -> F32Array:
    """C-contiguous float32 of weights; a view when they are that already."""
    if weights.dtype == np.uint16:
        widened: F32Array = (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    return np.ascontiguousarray(weights, np.float32).reshape(weights.shape)


def blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Ranges of n rows of k elements, some ``_BLOCK_ELEMENTS`` elements each."""
    step = max(1, _BLOCK_ELEMENTS // max(k, 1))
    for start in range(0, n, step):
        yield start, min(start + step, n)


def dots(block: F32Array, x: F32Array, out: F32Array) -> None:
    """``out[b, i] = block[i] . x[b]``, every one of them summed in the same order."""
    for b in range(len(x)):
        out[b] = np.einsum("nk,k->n", block, x[b])


def linear(w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None) -> None:
    """``out[b] = w @ x[b] + bias`` of arguments that were checked."""
    n, k = w.shape
    for start, stop in blocks(n, k):
        dots(widen(w[start:stop]), x, out[:, start:stop])
    if bias is not None:
        out += bias


def picked(index: I64Array | None, start: int, stop: int) -> I64Array | slice:
    """The listed rows start..stop-1: all rows in their order when there is no list."""
    return slice(start, stop) if index is None else index[start:stop]
