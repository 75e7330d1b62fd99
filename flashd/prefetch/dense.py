"""The FFN of a slice of neurons. Runs on the compute lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashd import kernels
from flashd.types import Activation, BoolArray, DType, F32Array, FFNGeometry, I64Array, U8Array


@dataclass(frozen=True)
class SliceWeights:
    """Some neurons of one layer.

    Attributes:
        rows: ``[n, stride_bytes]`` uint8.
        up_bias, gate_bias: ``[n]`` or None.
        threshold: activations up to it count as zero.
    """

    rows: U8Array
    up_bias: F32Array | None
    gate_bias: F32Array | None
    threshold: float = 0.0


class DenseFFN:
    """``acc += act(x up^T [, x gate^T]) down`` for a slice of neurons.

    The kernels sum neurons in ascending order: how a layer is cut into slices does not show.
    """

    def __init__(self, geometry: FFNGeometry, activation: Activation) -> None:
        self._geometry = geometry
        self._activation = activation

    def add(self, weights: SliceWeights, x: F32Array, acc: F32Array, mask: BoolArray | None = None) -> None:
        """Add the slice's part of the FFN of ``x [tokens, d]`` to ``acc [tokens, d]``; where ``mask
        [tokens, n]`` is given and False, a token does not use a neuron."""
        self.down(weights, self.dots(weights, x, mask), acc)

    def dots(
        self,
        weights: SliceWeights,
        x: F32Array,
        mask: BoolArray | None = None,
        index: I64Array | None = None,
    ) -> F32Array:
        """Hidden activations ``[tokens, n]`` of the slice's neurons, or ``[tokens, m]`` of the rows that
        ``index [m]`` lists; ``mask`` has as many columns."""
        count = len(weights.rows) if index is None else len(index)
        hidden = np.empty((len(x), count), np.float32)
        kernels.ffn_dots(
            *self._layout(weights),
            self._activation,
            x,
            hidden,
            weights.up_bias,
            weights.gate_bias,
            index=index,
            mask=mask,
            threshold=weights.threshold,
        )
        return hidden

    def down(
        self, weights: SliceWeights, hidden: F32Array, acc: F32Array, index: I64Array | None = None
    ) -> None:
        """Add the down projection of ``hidden``, as ``dots`` made it, to ``acc [tokens, d]``."""
        kernels.ffn_down(*self._layout(weights), hidden, acc, index)

    def _layout(self, weights: SliceWeights) -> tuple[U8Array, DType, int, bool]:
        geometry = self._geometry
        return weights.rows, geometry.dtype, geometry.d_model, geometry.gated
