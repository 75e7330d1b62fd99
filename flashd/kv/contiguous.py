"""KV cache of one sequence in one block of memory.

The block is reserved for every token that the request may still produce, so that a running
sequence can never meet a shortage of KV memory; untouched pages cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.types import NUMPY_DTYPE, F32Array, ModelSpec


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return spec.n_layers * 2 * spec.n_kv_heads * spec.d_head * NUMPY_DTYPE[dtype].itemsize


class ContiguousKV:
    """``[layer, key|value, kv head, position, d_head]``, f16 or f32.

    Args:
        spec: the model.
        capacity: tokens that may be appended in all.
        dtype: ``f16`` or ``f32``.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: str) -> None:
        shape = (spec.n_layers, 2, spec.n_kv_heads, capacity, spec.d_head)
        self._data = np.zeros(shape, NUMPY_DTYPE[dtype])  # calloc: pages appear when written
        self.capacity = capacity
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._data.nbytes

    def append(self, layer: int, k: F32Array, v: F32Array) -> None:
        """Write ``[tokens, n_kv_heads, d_head]`` behind the committed tokens of one layer."""
        end = self.length + k.shape[0]
        assert end <= self.capacity, f"{end} tokens in a KV cache of {self.capacity}"
        self._data[layer, 0, :, self.length : end] = k.transpose(1, 0, 2)
        self._data[layer, 1, :, self.length : end] = v.transpose(1, 0, 2)

    def view(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values of one layer, each ``[n_kv_heads, capacity, d_head]``."""
        return self._data[layer, 0], self._data[layer, 1]

    def commit(self, n_tokens: int) -> None:
        """Count ``n_tokens`` that every layer has appended."""
        self.length += n_tokens
