"""float64 references, and random weights in every dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[npt.NDArray[Any], F64]:
    """Random weights as stored in ``dtype``, and their exact values."""
    values = rng.standard_normal(shape).astype(np.float32)
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


def activate(name: str, x: F64) -> F64:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(q: F64, k: F64, v: F64, length: int, scale: float) -> F64:
    group = len(q) // len(k)
    out = np.empty_like(q)
    for head, query in enumerate(q):
        scores = k[head // group, :length] @ query * scale
        p = np.exp(scores - scores.max())
        out[head] = (p / p.sum()) @ v[head // group, :length]
    return out


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
