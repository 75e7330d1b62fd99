"""Weights from the checkpoint's dtype to the bundle's, block by block."""

from __future__ import annotations

import numpy as np

from flashd import kernels
from flashd.errors import ConversionError
from flashd.types import NUMPY_DTYPE, DType, F32Array, WeightArray

# The first float32 that float16 rounds to infinity.
_F16_OVERFLOW = np.float32(65520.0)
# Rows are converted in pieces of about this, so that the scratch stays in cache.
PIECE_BYTES = 1 << 20


def as_f32(block: WeightArray, dtype: DType) -> F32Array:
    """A block as float32; the same array when it already is."""
    if dtype == "f32":
        return block
    out = np.empty(block.shape, np.float32)
    kernels.to_f32(np.ascontiguousarray(block).reshape(-1), out.reshape(-1))
    return out


def cast_into(out: WeightArray, block: WeightArray, source: DType, target: DType, name: str) -> None:
    """Write a block into ``out`` in the bundle's dtype.

    Args:
        out: ``[rows, columns]`` or ``[n]``, any strides.
        block: same shape, in dtype ``source``.
        source: dtype of ``block``.
        target: dtype of ``out``.
        name: the tensor, for messages.

    Raises:
        ConversionError: a value that float16 cannot hold.
    """
    if source == target:
        out[...] = block
        return
    rows = max(1, PIECE_BYTES // max(1, block[:1].nbytes))
    for start in range(0, len(block), rows):
        values = as_f32(block[start : start + rows], source)
        if target == "f16":
            _check_f16(values, name)
        if target == "f32":
            out[start : start + rows] = values
            continue
        narrow = np.empty(values.shape, NUMPY_DTYPE[target])
        kernels.from_f32(np.ascontiguousarray(values).reshape(-1), narrow.reshape(-1))
        out[start : start + rows] = narrow


def _check_f16(values: F32Array, name: str) -> None:
    low, high = values.min(initial=0.0), values.max(initial=0.0)
    if high >= _F16_OVERFLOW or low <= -_F16_OVERFLOW:
        worst = high if high >= -low else low
        raise ConversionError(
            f"tensor {name!r} holds {worst:.6g}, beyond the range of f16 (65504); convert with --dtype bf16 "
            "or f32"
        )
