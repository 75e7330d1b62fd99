"""KV cache of one sequence in one block of memory.

The block has an address for every token that the request may still produce, so that nothing ever
moves; pages cost memory only when they are written.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from flashd import kernels
from flashd.types import NUMPY_DTYPE, F32Array, ModelSpec

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it from 3.13 on


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Bytes that one token's keys and values take over all layers."""
    return spec.n_layers * 2 * spec.n_kv_heads * spec.d_head * NUMPY_DTYPE[dtype].itemsize


class ContiguousKV:
    """``[layer, key|value, kv head, position, d_head]``, f16 or f32.

    Args:
        spec: the model.
        capacity: tokens that may be appended in all.
        dtype: ``f16`` or ``f32``.

    Raises:
        MemoryError: there is no address space for so many tokens.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: str) -> None:
        shape = (spec.n_layers, 2, spec.n_kv_heads, capacity, spec.d_head)
        nbytes = kv_bytes_per_token(spec, dtype) * capacity
        # Not np.zeros: where the kernel counts what is promised, 128k tokens would be refused
        # though a few hundred are used.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            pages = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except (OSError, OverflowError, ValueError) as exc:
            raise MemoryError(f"no room for a KV cache of {nbytes} bytes: {exc}") from exc
        with suppress(OSError):  # a kernel without huge pages
            # Each head's part is written from its beginning: huge pages would all be there at once.
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        self._data = np.frombuffer(pages, NUMPY_DTYPE[dtype], prod(shape)).reshape(shape)
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
        kernels.append_kv(k, v, self._data[layer], self.length)

    def view(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values of one layer, each ``[n_kv_heads, capacity, d_head]``."""
        return self._data[layer, 0], self._data[layer, 1]

    def fill_from(self, other: ContiguousKV) -> None:
        """Become a copy of another cache of the same model and dtype, in one's own capacity."""
        assert other.length <= self.capacity, f"{other.length} tokens in a KV cache of {self.capacity}"
        self._data[:, :, :, : other.length] = other._data[:, :, :, : other.length]
        self.length = other.length

    def commit(self, n_tokens: int) -> None:
        """Count ``n_tokens`` that every layer has appended."""
        self.length += n_tokens
