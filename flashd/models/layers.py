"""The parts a transformer layer is made of, on float32 activations: thin callers of the kernels.

Up to ``MAX_BATCH`` tokens go through kernels that read each weight once; more (a prompt's chunk) through
kernels that are bound by arithmetic. Neither depends on what else is computed with a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashd import kernels
from flashd.config import MAX_BATCH
from flashd.types import F32Array, WeightArray


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
        multiply = kernels.gemv if x.shape[0] <= MAX_BATCH else kernels.gemm
        multiply(self.weight, x, out, self.bias)
        return out


class Norm:
    """LayerNorm or RMSNorm over the last axis."""

    def __init__(self, weight: F32Array, bias: F32Array | None, eps: float, rms: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.rms = rms

    def __call__(self, x: F32Array) -> F32Array:
        """Normed copy of ``[tokens, d]``."""
        out = np.empty_like(x)
        if self.rms:
            kernels.rmsnorm(x, self.weight, self.eps, out)
        else:
            kernels.layernorm(x, self.weight, self.bias, self.eps, out)
        return out


def rotation(inv_freq: F32Array, positions: npt.NDArray[Any]) -> tuple[F32Array, F32Array]:
    """Cosines and sines ``[tokens, d_head / 2]`` of rotary position embeddings (RoFormer)."""
    angle = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    return np.cos(angle), np.sin(angle)
