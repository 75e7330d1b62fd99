"""Predictor ``oracle``: the true mask, from the up and gate projections themselves.

It reads as much as the FFN does, so it saves nothing; it is what other predictors are measured against
and what shows that skipping what does not fire changes no logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashd import kernels
from flashd.predictor.base import Predictor
from flashd.types import Activation, BoolArray, F32Array, FFNGeometry, I64Array, U8Array


class OraclePredictor(Predictor):
    """Requests exactly the neurons whose activation is not zero.

    Args:
        geometry: of the rows.
        activation: of the hidden units.
        layers: per layer all rows, ``[n_neurons, stride_bytes]`` uint8, in RAM.
        up_bias: per layer ``[n_neurons]`` or None.
        gate_bias: likewise.
        thresholds: per layer, activations up to it count as zero; empty: 0 for all.
    """

    def __init__(
        self,
        geometry: FFNGeometry,
        activation: Activation,
        layers: Sequence[U8Array],
        up_bias: Sequence[F32Array | None],
        gate_bias: Sequence[F32Array | None],
        thresholds: Sequence[float] = (),
    ) -> None:
        self.name = "oracle"
        self.n_layers = geometry.n_layers
        self.n_neurons = geometry.n_neurons
        self.nbytes = sum(rows.nbytes for rows in layers)
        self._geometry = geometry
        self._activation = activation
        self._layers = layers
        self._up_bias = up_bias
        self._gate_bias = gate_bias
        self._thresholds = thresholds or [0.0] * geometry.n_layers

    def masked(self, layer: int) -> bool:
        """See ``Predictor.masked``."""
        return True

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """See ``Predictor.predict``."""
        geometry = self._geometry
        hidden = np.empty((len(x), self.n_neurons), np.float32)
        ids = kernels.ffn_dots(
            self._layers[layer],
            geometry.dtype,
            geometry.d_model,
            geometry.gated,
            self._activation,
            x,
            hidden,
            self._up_bias[layer],
            self._gate_bias[layer],
            threshold=self._thresholds[layer],
        )
        return ids, np.ascontiguousarray(hidden[:, ids] != 0)
