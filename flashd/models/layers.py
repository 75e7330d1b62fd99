"""The parts a transformer layer is made of, on float32 activations.

Up to ``MAX_BATCH`` tokens go through the native kernels, whose sums don't depend on the batch;
longer spans (a prompt's chunks) go through BLAS on blocks of weights converted to float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashd import kernels
from flashd.config import MAX_BATCH
from flashd.types import F32Array, WeightArray

_BLOCK_BYTES = 8 << 20  # float32 bytes of weights converted at a time


def empty(*shape: int) -> F32Array:
    """Uninitialised float32 array."""
    return np.empty(shape, np.float32)


def as_f32(w: WeightArray) -> F32Array:
    """Float32 values of f32, f16 or bf16 (uint16) weights; f32 is returned as it is."""
    if w.dtype == np.float32:
        same: F32Array = w
        return same
    out = np.empty(w.shape, np.float32)
    kernels.to_f32(np.ascontiguousarray(w), out)
    return out


class Linear:
    """``y = x W^T + b`` with ``W [out, in]`` in any weight dtype."""

    def __init__(self, weight: WeightArray, bias: F32Array | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: F32Array) -> F32Array:
        """``[tokens, in] -> [tokens, out]``."""
        out = empty(x.shape[0], self.weight.shape[0])
        if x.shape[0] <= MAX_BATCH:
            kernels.gemv(self.weight, x, out, self.bias)
            return out
        rows = max(1, _BLOCK_BYTES // (4 * x.shape[1]))
        for start in range(0, self.weight.shape[0], rows):
            block = as_f32(self.weight[start : start + rows])
            np.matmul(x, block.T, out=out[:, start : start + rows])
        if self.bias is not None:
            out += self.bias
        return out


class Norm:
    """LayerNorm or RMSNorm over the last axis."""

    def __init__(self, weight: F32Array, bias: F32Array | None, eps: float, rms: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = np.float32(eps)
        self.rms = rms

    def __call__(self, x: F32Array) -> F32Array:
        """Normed copy of ``[tokens, d]``."""
        if not self.rms:
            x = x - x.mean(axis=-1, keepdims=True, dtype=np.float32)
        scale = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)
        out: F32Array = x * (np.float32(1.0) / np.sqrt(scale + self.eps))
        out *= self.weight
        if self.bias is not None:
            out += self.bias
        return out


def rotation(inv_freq: F32Array, positions: npt.NDArray[Any]) -> tuple[F32Array, F32Array]:
    """Cosines and sines ``[tokens, 1, d_head / 2]`` of rotary position embeddings (RoFormer)."""
    angle = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    return np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]


def rotate(x: F32Array, cos: F32Array, sin: F32Array) -> F32Array:
    """Rotate ``[tokens, heads, d_head]``, halves paired as Hugging Face pairs them."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    np.subtract(low * cos, high * sin, out=out[..., :half])
    np.add(high * cos, low * sin, out=out[..., half:])
    return out


def attend(q: F32Array, k: npt.NDArray[Any], v: npt.NDArray[Any], start: int, scale: float) -> F32Array:
    """Causal attention of one sequence's newest tokens over everything before them.

    Args:
        q: ``[tokens, n_heads, d_head]``, positions ``start ..``.
        k: ``[n_kv_heads, capacity, d_head]`` f32 or f16, holding ``start + tokens`` positions.
        v: like ``k``.
        start: position of the first query.
        scale: factor on the scores.

    Returns:
        ``[tokens, n_heads, d_head]``.
    """
    if q.shape[0] == 1:
        out = np.empty_like(q)
        kernels.attention(q[0], k, v, start + 1, scale, out[0])
        return out
    return _attend_many(q, k, v, start, scale)


def _attend_many(q: F32Array, k: npt.NDArray[Any], v: npt.NDArray[Any], start: int, scale: float) -> F32Array:
    tokens, heads, d_head = q.shape
    group, length = heads // k.shape[0], start + tokens
    future = np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)[:, None, :]
    out = np.empty_like(q)
    for head in range(k.shape[0]):
        mine = slice(head * group, (head + 1) * group)
        queries = np.ascontiguousarray(q[:, mine]).reshape(tokens * group, d_head)
        scores = (queries @ as_f32(k[head, :length]).T).reshape(tokens, group, length)
        scores *= np.float32(scale)
        scores[:, :, start:] += future
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        weighted = scores.reshape(tokens * group, length) @ as_f32(v[head, :length])
        out[:, mine] = weighted.reshape(tokens, group, d_head)
    return out
