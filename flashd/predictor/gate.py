"""Predictor ``gate``: the exact mask of a gated FFN, from its gate projection, which stays in RAM.

In ``act(gate . x) * (up . x)`` the first factor alone says whether a neuron fires: it counts as zero up
to the layer's threshold (CATS, arXiv 2404.08763; FATReLU, arXiv 2402.13516). So a third of the FFN's
weights in RAM give a mask that misses nothing, and only the neurons that fire are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashd import kernels
from flashd.errors import BundleError
from flashd.layout.calibration import Calibration
from flashd.predictor.base import Predictor
from flashd.predictor.lowrank import Lookahead
from flashd.types import Activation, BoolArray, F32Array, FFNGeometry, I64Array, WeightArray

# Relative room for the last bits in which implementations of an activation differ.
_ACTIVATION_SLACK = 1e-5
_BISECTIONS = 100
_NORM_ROWS = 4096


@dataclass(frozen=True)
class FiringRange:
    """Where ``|act(z)| > threshold``: above ``high``, and inside the dip below zero that SiLU and GELU
    have, ``dip_low < z < dip_high``; an empty dip is ``(inf, -inf)``."""

    high: float
    dip_low: float = math.inf
    dip_high: float = -math.inf


def firing_range(activation: Activation, threshold: float) -> FiringRange:
    """The inputs of an activation whose output does not count as zero; slightly too many."""
    level = threshold * (1 - _ACTIVATION_SLACK)
    if activation == "relu":
        return FiringRange(level)
    if activation == "relu2":
        return FiringRange(math.sqrt(level))
    if level == 0:
        return FiringRange(0.0, -math.inf, 0.0)
    act = _SMOOTH[activation]
    high = _crossing(lambda z: act(z) - level, 0.0, level + 10.0)
    bottom = _bottom(act)
    if -act(bottom) <= level:
        return FiringRange(high)
    low = _crossing(lambda z: -act(z) - level, -100.0, bottom)
    return FiringRange(high, low, _crossing(lambda z: level + act(z), bottom, 0.0))


class GatePredictor(Predictor):
    """Requests what fires, and the few neurons that are too near to the threshold to tell.

    ``ffn_dots`` computes the gate again and decides. Sums of the same products in another order differ
    in their last bits, by at most some ``d 2^-24 |gate| |x|`` in all; with a margin of that size no
    neuron that fires is missed, and one that is requested in vain adds nothing.

    Args:
        geometry: of the rows; they hold a gate.
        activation: of the hidden units.
        calibration: of the bundle.
        tensors: of ``predictors.safetensors``.
        gates: per layer ``[n_neurons, d_model]``, its gate projection; None for one without a mask.
        gate_bias: per layer ``[n_neurons]`` or None.
        thresholds: per layer, activations up to it count as zero.

    Raises:
        BundleError: the FFN has no gate.
    """

    def __init__(
        self,
        geometry: FFNGeometry,
        activation: Activation,
        calibration: Calibration,
        tensors: Mapping[str, WeightArray],
        gates: Sequence[WeightArray | None],
        gate_bias: Sequence[F32Array | None],
        thresholds: Sequence[float],
    ) -> None:
        if not geometry.gated:
            raise BundleError(
                "predictor gate needs an FFN with a gate, and this model has none; calibrate it with "
                "--predictor low-rank"
            )
        self.name = "gate"
        self.n_layers = geometry.n_layers
        self.n_neurons = geometry.n_neurons
        self._gates = list(gates)
        self._bias = list(gate_bias)
        self._ranges = [firing_range(activation, level) for level in thresholds]
        # A kernel's sum has 4 lanes or more, and 2^-23 stands for both sums. (A prompt's may run in one
        # lane: its errors, of either sign, stay below this all the same.)
        scale = (geometry.d_model / 4 + 16) * 2.0**-23
        self._room = [None if gate is None else _norms(gate) * np.float32(scale) for gate in gates]
        self._lookahead = Lookahead(calibration, tensors)
        self.nbytes = self._lookahead.nbytes + sum(
            each.nbytes for each in (*self._gates, *self._room) if each is not None
        )

    def masked(self, layer: int) -> bool:
        """See ``Predictor.masked``."""
        return self._gates[layer] is not None

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """See ``Predictor.predict``."""
        gate, room, firing = self._gates[layer], self._room[layer], self._ranges[layer]
        if gate is None or room is None:
            raise ValueError(f"layer {layer} has no mask")
        z = np.empty((len(x), self.n_neurons), np.float32)
        kernels.gemv(gate, x, z, self._bias[layer])
        with np.errstate(all="ignore"):
            margin = _lengths(x)[:, None] * room
            # Written so that what is no number is requested: a mask hides no broken weights.
            wanted = ~(z + margin <= np.float32(firing.high))
            if firing.dip_low < firing.dip_high:
                wanted |= (z + margin > firing.dip_low) & (z - margin < firing.dip_high)
        ids = np.flatnonzero(wanted.any(axis=0))
        return ids, np.ascontiguousarray(wanted[:, ids])

    def lookahead(self, layer: int, x: F32Array) -> I64Array | None:
        """See ``Predictor.lookahead``."""
        return self._lookahead(layer, x)


def _lengths(x: F32Array) -> F32Array:
    """Length of every row, each summed by itself: a token's bits don't depend on its batch."""
    return np.sqrt(np.array([np.add.reduce(row * row) for row in x], np.float32))


def _norms(weights: WeightArray) -> F32Array:
    """Length of every row."""
    norms = np.empty(len(weights), np.float32)
    for start in range(0, len(weights), _NORM_ROWS):
        part = np.ascontiguousarray(weights[start : start + _NORM_ROWS])
        wide = np.empty(part.shape, np.float32)
        kernels.to_f32(part, wide)
        with np.errstate(all="ignore"):
            norms[start : start + _NORM_ROWS] = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    return norms


def _silu(z: float) -> float:
    return z / (1 + math.exp(-z))


def _gelu(z: float) -> float:
    return 0.5 * z * math.erfc(-z * math.sqrt(0.5))


def _gelu_tanh(z: float) -> float:
    return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


_SMOOTH: dict[str, Callable[[float], float]] = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}


def _crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Where ``f`` changes its sign between ``low`` and ``high``, once."""
    rises = f(high) > 0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if (f(middle) > 0) == rises:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _bottom(act: Callable[[float], float]) -> float:
    """Where SiLU and GELU are least: they have one minimum, between -3 and 0."""
    low, high = -3.0, 0.0
    for _ in range(_BISECTIONS):
        third = (high - low) / 3
        if act(low + third) < act(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2
