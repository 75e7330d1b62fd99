"""Predictor ``low-rank``: the paper's (LLM in a flash, section 3.1), and the look ahead at the next layer.

Scores are ``w2 @ relu(w1 @ x + b1) + b2``; a neuron is requested where its score is above the layer's
threshold. ``flashd calibrate`` trains the tensors and chooses the thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flashd import kernels
from flashd.layout.calibration import PARTS, Calibration, tensor_name
from flashd.predictor.base import Predictor
from flashd.types import BoolArray, F32Array, FFNGeometry, I64Array, WeightArray


@dataclass(frozen=True)
class LowRank:
    """One trained map from an FFN input to neurons.

    Attributes:
        w1: ``[rank, d_model]`` float16.
        b1: ``[rank]`` float32.
        w2: ``[n_neurons, rank]`` float16.
        b2: ``[n_neurons]`` float32.
        threshold: of the scores.
    """

    w1: WeightArray
    b1: F32Array
    w2: WeightArray
    b2: F32Array
    threshold: float

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return self.w1.nbytes + self.b1.nbytes + self.w2.nbytes + self.b2.nbytes

    def __call__(self, x: F32Array) -> tuple[I64Array, BoolArray]:
        """``x [B, d_model]`` -> ids and mask, as ``Predictor.predict`` gives them."""
        return kernels.predict(self.w1, self.w2, x, self.threshold, self.b1, self.b2)


class Lookahead:
    """The guesses at the next layer of every layer that has one.

    Args:
        calibration: of the bundle.
        tensors: of ``predictors.safetensors``.
    """

    def __init__(self, calibration: Calibration, tensors: Mapping[str, WeightArray]) -> None:
        self._maps = [
            None
            if layer.lookahead_threshold is None
            else _low_rank(tensors, index, "lookahead", layer.lookahead_threshold)
            for index, layer in enumerate(calibration.layers)
        ]
        self.nbytes = sum(each.nbytes for each in self._maps if each is not None)

    def __call__(self, layer: int, x: F32Array) -> I64Array | None:
        """See ``Predictor.lookahead``."""
        guess = self._maps[layer]
        return None if guess is None else guess(x)[0]


class LowRankPredictor(Predictor):
    """Requests the neurons whose score is above the layer's threshold.

    Args:
        geometry: of the rows.
        calibration: of the bundle.
        tensors: of ``predictors.safetensors``.
    """

    def __init__(
        self, geometry: FFNGeometry, calibration: Calibration, tensors: Mapping[str, WeightArray]
    ) -> None:
        self.name = "low-rank"
        self.n_layers = geometry.n_layers
        self.n_neurons = geometry.n_neurons
        self._maps = [
            _low_rank(tensors, index, "predictor", layer.threshold) if layer.masked else None
            for index, layer in enumerate(calibration.layers)
        ]
        self._lookahead = Lookahead(calibration, tensors)
        self.nbytes = self._lookahead.nbytes + sum(each.nbytes for each in self._maps if each is not None)

    def masked(self, layer: int) -> bool:
        """See ``Predictor.masked``."""
        return self._maps[layer] is not None

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """See ``Predictor.predict``."""
        wanted = self._maps[layer]
        if wanted is None:
            raise ValueError(f"layer {layer} has no mask")
        return wanted(x)

    def lookahead(self, layer: int, x: F32Array) -> I64Array | None:
        """See ``Predictor.lookahead``."""
        return self._lookahead(layer, x)


def _low_rank(
    tensors: Mapping[str, WeightArray], layer: int, kind: Literal["predictor", "lookahead"], threshold: float
) -> LowRank:
    w1, b1, w2, b2 = (tensors[tensor_name(layer, kind, part)] for part in PARTS)
    return LowRank(w1, b1, w2, b2, threshold)
