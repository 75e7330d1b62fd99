"""Predictor ``all``: nothing is masked."""

from __future__ import annotations

import numpy as np

from flashd.predictor.base import Predictor
from flashd.types import BoolArray, F32Array, I64Array


class AllPredictor(Predictor):
    """Requests every neuron of every layer, so that all of them are computed densely."""

    def __init__(self, n_layers: int, n_neurons: int) -> None:
        self.name = "all"
        self.n_layers = n_layers
        self.n_neurons = n_neurons
        self.nbytes = 0

    def masked(self, layer: int) -> bool:
        """See ``Predictor.masked``."""
        return False

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """See ``Predictor.predict``."""
        return np.arange(self.n_neurons), np.ones((len(x), self.n_neurons), np.bool_)
