"""The FFN of a slice of neurons: two ways, by the number of tokens. Runs on the compute lane."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from flashd import kernels
from flashd.config import MAX_BATCH
from flashd.types import NUMPY_DTYPE, Activation, F32Array, FFNGeometry, U8Array

# Float32 rows that a prompt's chunk is multiplied with at a time; bounds the scratch.
BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class SliceWeights:
    """Some neurons of one layer.

    Attributes:
        rows: ``[n, stride_bytes]`` uint8.
        up_bias, gate_bias: ``[n]`` or None.
    """

    rows: U8Array
    up_bias: F32Array | None
    gate_bias: F32Array | None


class DenseFFN:
    """``acc += act(x up^T [, x gate^T]) down`` for a slice of neurons.

    Up to 16 tokens go through the kernels, which read each weight once, in its own dtype; more go
    through BLAS on blocks converted to float32. Blocks have a fixed number of rows, so a result
    depends on the weights and the tokens alone.
    """

    def __init__(self, geometry: FFNGeometry, activation: Activation) -> None:
        self._geometry = geometry
        self._activation = activation
        self._dtype = NUMPY_DTYPE[geometry.dtype]
        self._row_elements = geometry.stride_bytes // self._dtype.itemsize
        # From the unpadded row, so that the stride of a mount does not change any sum.
        self.block_rows = max(1, BLOCK_BYTES // (4 * geometry.row_elements))
        self._block: F32Array | None = None

    def add(self, weights: SliceWeights, x: F32Array, acc: F32Array) -> None:
        """Add the slice's part of the FFN of ``x [tokens, d]`` to ``acc [tokens, d]``."""
        if len(x) <= MAX_BATCH:
            self._add_rows(weights, x, acc)
            return
        part = np.empty_like(acc)
        n = len(weights.rows)
        step = -(-n // -(-n // self.block_rows))  # equal blocks: BLAS is slow on a short last one
        for start in range(0, n, step):
            stop = start + step
            block = SliceWeights(
                weights.rows[start:stop],
                None if weights.up_bias is None else weights.up_bias[start:stop],
                None if weights.gate_bias is None else weights.gate_bias[start:stop],
            )
            self._add_block(block, x, acc, part)

    def _add_rows(self, weights: SliceWeights, x: F32Array, acc: F32Array) -> None:
        geometry = self._geometry
        layout = (weights.rows, geometry.dtype, geometry.d_model, geometry.gated)
        hidden = np.empty((len(x), len(weights.rows)), np.float32)
        kernels.ffn_dots(*layout, self._activation, x, hidden, weights.up_bias, weights.gate_bias)
        kernels.ffn_down(*layout, hidden, acc)

    def _add_block(self, weights: SliceWeights, x: F32Array, acc: F32Array, part: F32Array) -> None:
        d = self._geometry.d_model
        w = self._to_f32(weights.rows)
        hidden = x @ w[:, :d].T
        if weights.up_bias is not None:
            hidden += weights.up_bias
        if self._geometry.gated:
            gate = x @ w[:, d : 2 * d].T
            if weights.gate_bias is not None:
                gate += weights.gate_bias
            hidden *= activate(self._activation, gate)
        else:
            hidden = activate(self._activation, hidden)
        down = self._geometry.row_elements - d
        np.matmul(hidden, w[:, down : down + d], out=part)
        acc += part

    def _to_f32(self, rows: U8Array) -> F32Array:
        typed = rows.view(self._dtype)
        if typed.dtype == np.float32:
            return typed
        if self._block is None:
            self._block = np.empty((self.block_rows, self._row_elements), np.float32)
        kernels.to_f32(typed, self._block[: len(rows)])
        return self._block[: len(rows)]


def activate(name: Activation, x: F32Array) -> F32Array:
    """The activation of ``x``, elementwise, as the kernels compute it up to rounding."""
    if name == "relu":
        return np.maximum(x, np.float32(0))
    # Far from zero intermediate results overflow to inf, and the quotients are right again.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if name == "silu":
            return _f32(x / (1 + np.exp(-x)))
        if name == "gelu_tanh":
            # (1 + tanh z) / 2 is the logistic function of 2z, and that does not cancel.
            twice = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
            return _f32(x / (1 + np.exp(-twice)))
        return _f32(0.5 * x * _erfc(x * -math.sqrt(0.5)))


def _f32(x: Any) -> F32Array:
    """Python's floats do not widen float32 arrays; NumPy's stubs do not know."""
    return cast(F32Array, x)


# Press et al., Numerical Recipes, section 6.2: Chebyshev fit of erfc, relative error < 1.2e-7.
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
    1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip


def _erfc(x: Any) -> Any:
    """NumPy has no erf. The relative error is small in the tail too, where 1 - erf cancels."""
    size = np.abs(x)
    t = 1 / (1 + 0.5 * size)
    fit = np.full_like(t, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        fit = fit * t + coefficient
    tail = t * np.exp(fit - size * size)
    return np.where(x < 0, 2 - tail, tail)
