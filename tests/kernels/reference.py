"""float64 references with their error bounds, and random problems in every dtype.

A float32 sum of n terms may be wrong by ``1e-6 * sqrt(n)`` of the sum of the terms' magnitudes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")
STEEPEST = 1.2  # the largest slope of any activation but relu2
EPS = 1e-6


def normal(rng: np.random.Generator, *shape: int) -> F32:
    """Standard normal float32."""
    return rng.standard_normal(shape).astype(np.float32)


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[npt.NDArray[Any], F64]:
    """Random weights as stored in ``dtype``, and their exact values."""
    values = normal(rng, *shape)
    if dtype == "f16":
        half = values.astype(np.float16)
        return half, half.astype(np.float64)
    if dtype == "bf16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values, values.astype(np.float64)


def rows_of(
    rng: np.random.Generator, n: int, d: int, gated: bool, dtype: str, padding_bytes: int
) -> tuple[npt.NDArray[np.uint8], F64, F64, F64]:
    """Bundle rows with garbage in the padding, and up, gate and down in float64."""
    parts = 3 if gated else 2
    stored, exact = weights(rng, (n, parts * d), dtype)
    item_bytes = stored.itemsize
    stride_bytes = parts * d * item_bytes + padding_bytes // item_bytes * item_bytes
    rows = np.full((n, stride_bytes), 0xFF, np.uint8)  # NaN in every dtype, were it read
    rows[:, : parts * d * item_bytes] = stored.view(np.uint8).reshape(n, parts * d * item_bytes)
    split = exact.reshape(n, parts, d)
    return rows, split[:, 0], split[:, 1], split[:, -1]


class Near(NamedTuple):
    """Values, and how far from them a float32 result may be."""

    value: F64
    error: F64

    def check(self, got: npt.NDArray[Any]) -> None:
        """``got`` has the shape and lies within the error everywhere."""
        assert got.shape == self.value.shape
        excess = np.abs(got - self.value) - self.error
        if not (excess <= 0).all():  # so that NaN is no success
            worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), got.shape)
            what = f"{got[worst]} at {worst}, expected {self.value[worst]} +- {self.error[worst]}"
            raise AssertionError(what)


def linear(w: F64, x: F64 | F32, bias: F32 | None = None, x_error: F64 | float = 0.0) -> Near:
    """``x @ w.T + bias``, where ``x`` itself is wrong by ``x_error``."""
    x = x.astype(np.float64)
    value, size = x @ w.T, (np.abs(x) + x_error) @ np.abs(w).T
    if bias is not None:
        value, size = value + bias, size + np.abs(bias)
    error = EPS * math.sqrt(max(w.shape[1], 1)) * size
    if np.any(x_error):
        error = error + np.broadcast_to(x_error, x.shape) @ np.abs(w).T
    return Near(value, error)


def activate(name: str, x: F64) -> F64:
    """The activation's definition."""
    if name == "relu":
        return np.maximum(x, 0)
    if name == "relu2":
        return np.square(np.maximum(x, 0))
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * np.vectorize(math.erfc, otypes=[float])(-x * math.sqrt(0.5))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def hidden(activation: str, threshold: float, up: Near, gate: Near | None) -> Near:
    """Hidden units; where float32 may take the other side of the threshold, the error is infinite."""
    z, z_error = up if gate is None else gate
    value = activate(activation, z)
    steep = 2 * np.abs(z) + z_error if activation == "relu2" else STEEPEST
    error = steep * z_error + EPS * np.maximum(np.abs(z), np.abs(value))
    unsure = (np.abs(np.abs(value) - np.float32(threshold)) <= error) & (threshold > 0)
    value = np.where(np.abs(value) <= np.float32(threshold), 0, value)
    if gate is not None:
        error = error * (np.abs(up.value) + up.error) + np.abs(value) * up.error
        value = value * up.value
        error = error + EPS * np.abs(value)
    return Near(value, np.where(unsure, np.inf, error))


def attention(q: F32, k: F64, v: F64, length: int, scale: float) -> Near:
    """Causal softmax attention of ``[T, H, hd]``; the errors of scores act on all weights."""
    tokens, heads, _ = q.shape
    group = heads // len(k)
    value, error = np.empty(q.shape), np.empty(q.shape)
    for t, head in np.ndindex(tokens, heads):
        seen = length - tokens + 1 + t
        keys, values = k[head // group, :seen], v[head // group, :seen]
        scores = linear(keys * scale, q[t, head][None])
        p = np.exp(scores.value[0] - scores.value[0].max())
        p /= p.sum()
        wrong = 2 * scores.error.max() + EPS * (2 + 2 * math.sqrt(seen))
        value[t, head] = p @ values
        error[t, head] = wrong * (p @ np.abs(values))
    return Near(value, error)


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    """The same bits, so zeros of two signs are not; NaN has many bit patterns and is one value."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    bits = []
    for array in (a, b):
        array = np.ascontiguousarray(array)
        if array.dtype == np.float32:
            array = np.where(np.isnan(array), np.float32(np.nan), array)
        bits.append(array.view(np.uint8))
    np.testing.assert_array_equal(*bits)
