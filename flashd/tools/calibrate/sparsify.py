"""Thresholds below which activations count as zero, from their distribution over a text: no training.

CATS (arXiv 2404.08763) and TEAL (arXiv 2408.14690) cut the smallest activations of a layer; the paper
does so with its Llama 2 (FATReLU, arXiv 2402.13516). What is cut is ``|act(gate . x)|``, the factor that
is known before the up projection is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashd import kernels
from flashd.disk.buffers import aligned_empty
from flashd.layout.geometry import LAYER_ALIGN_BYTES
from flashd.store.base import WeightStore
from flashd.types import NUMPY_DTYPE, Activation, F32Array, I64Array

# Activations of one layer whose quantile is taken.
_MAX_VALUES = 16 << 20
_READ_BYTES = 8 << 20


async def threshold_of(
    store: WeightStore,
    layer: int,
    activation: Activation,
    bias: F32Array | None,
    records: Any,
    target: float,
) -> float:
    """The threshold that cuts a share ``target`` of a layer's activations.

    Args:
        store: the rows.
        layer: index.
        activation: of the hidden units.
        bias: of the gate projection, or of the up projection where there is no gate.
        records: of the layer (``Scratch.records``).
        target: share to cut.
    """
    tokens = max(1, min(len(records), _MAX_VALUES // store.geometry.n_neurons))
    chosen = np.linspace(0, len(records) - 1, tokens).astype(np.int64)
    values = await _activations(store, layer, activation, bias, _inputs(records, chosen))
    flat = np.abs(values, out=values).reshape(-1)
    place = min(len(flat) - 1, int(target * len(flat)))
    return float(np.partition(flat, place)[place])


def _inputs(records: Any, chosen: I64Array) -> F32Array:
    return np.ascontiguousarray(records["x"][chosen], np.float32)


async def _activations(
    store: WeightStore, layer: int, activation: Activation, bias: F32Array | None, x: F32Array
) -> F32Array:
    """``act(gate . x)``, or of the up projection without a gate: ``[tokens, n_neurons]``."""
    geometry = store.geometry
    dtype, d, n = NUMPY_DTYPE[geometry.dtype], geometry.d_model, geometry.n_neurons
    step = min(n, max(1, _READ_BYTES // geometry.stride_bytes))
    buffer = aligned_empty(step * geometry.stride_bytes, max(LAYER_ALIGN_BYTES, store.alignment_bytes))
    values = np.empty((len(x), n), np.float32)
    # [up | gate | down] without its front is a row of an FFN without a gate.
    skip = d if geometry.gated else 0
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = buffer[: (stop - start) * geometry.stride_bytes].reshape(-1, geometry.stride_bytes)
        await store.read_range(layer, start, stop, rows)
        plain = np.ascontiguousarray(rows.view(dtype)[:, skip : skip + 2 * d]).view(np.uint8)
        part = np.empty((len(x), stop - start), np.float32)
        up_bias = None if bias is None else bias[start:stop]
        kernels.ffn_dots(plain, geometry.dtype, d, False, activation, x, part, up_bias)
        values[:, start:stop] = part
    return values
