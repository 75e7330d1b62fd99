"""The code in the reserved dimensions: its walk, the neurons' directions and thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashd.tools.synth.curves import Curve
from flashd.types import F32Array, ModelSpec, WeightArray

# Enough directions that a layer's neurons and a code's tokens behave like many; the paper's predictors
# have a rank of d / 32.
_MIN_RANK = 32
_RANK_DIVISOR = 32
_SAMPLE = 4096
_SAMPLE_POSITIONS = 256


@dataclass(frozen=True)
class LayerCode:
    """How the neurons of one layer read the code, float16.

    Attributes:
        directions: ``[n_neurons, n_code]``, unit length.
        request: ``[n_neurons]``, requested where the direction's product with the code exceeds it.
        fire: ``[n_neurons]``, likewise fired; never below ``request``.
    """

    directions: WeightArray
    request: WeightArray
    fire: WeightArray


class Code:
    """The code of every position, and every layer's reading of it. The same for the same seed.

    Args:
        spec: the model.
        curve: what its activations shall look like.
        seed: of everything random.

    Attributes:
        rank: of a predictor that is exact: each direction of the code forwards and backwards, and the 1.
        n_code: dimensions of the code; with the 1 behind them, the first ``n_reserved`` of the model.
        n_reserved: ``n_code + 1``.
        positions: ``[max_context, n_code]`` float32, each of length ``sqrt(n_code)``.
    """

    def __init__(self, spec: ModelSpec, curve: Curve, seed: int) -> None:
        self.rank = max(_MIN_RANK, spec.d_model // _RANK_DIVISOR)
        self.n_code = (self.rank - 1) // 2
        self.n_reserved = self.n_code + 1
        self.positions = _walk(spec.max_context, self.n_code, curve.drift, np.random.default_rng([seed, 0]))
        self._n_neurons = spec.d_ffn
        self._spread = curve.spread
        self._seed = seed
        self._request_level, self._fire_level = self._levels(curve)
        self.layer = lru_cache(maxsize=2)(self._layer)

    def _levels(self, curve: Curve) -> tuple[float, float]:
        """Mean thresholds that the wanted shares exceed, from a sample."""
        rng = np.random.default_rng([self._seed, 1])
        directions, offset = self._neurons(rng, _SAMPLE)
        step = max(1, len(self.positions) // _SAMPLE_POSITIONS)
        values = self.positions[::step] @ directions.T - offset
        request, fire = np.quantile(values, [1 - curve.requested, 1 - curve.fired])
        return float(request), float(fire)

    def _neurons(self, rng: np.random.Generator, count: int) -> tuple[F32Array, F32Array]:
        """Directions ``[count, n_code]``, and how far each one's thresholds are from the mean."""
        directions = rng.standard_normal((count, self.n_code), np.float32)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return directions, rng.standard_normal(count, np.float32) * np.float32(self._spread)

    def _layer(self, layer: int) -> LayerCode:
        directions, offset = self._neurons(np.random.default_rng([self._seed, 2, layer]), self._n_neurons)
        request, fire = offset + np.float32(self._request_level), offset + np.float32(self._fire_level)
        return LayerCode(directions.astype("<f2"), request.astype("<f2"), fire.astype("<f2"))


def _walk(count: int, n_code: int, drift: float, rng: np.random.Generator) -> F32Array:
    """A stationary walk; its points are put on a sphere, so that every token uses as many neurons."""
    points = rng.standard_normal((count, n_code), np.float32)
    for i in range(1, count):
        points[i] = drift * points[i - 1] + (1 - drift**2) ** 0.5 * points[i]
    length = np.linalg.norm(points, axis=1, keepdims=True)
    return np.asarray(points * (n_code**0.5 / length), np.float32)
