"""The predictor that a calibration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from flashd.layout.calibration import FREQUENCY, Calibration, tensor_shapes
from flashd.layout.manifest import Manifest
from flashd.predictor.base import Predictor
from flashd.predictor.gate import GatePredictor
from flashd.predictor.lowrank import LowRankPredictor
from flashd.types import NUMPY_DTYPE, Activation, F32Array, FFNGeometry, WeightArray


def predictor_bytes(calibration: Calibration, manifest: Manifest) -> int:
    """What ``Predictor.nbytes`` of a bundle's predictor will be, without loading it."""
    nbytes = sum(
        NUMPY_DTYPE[dtype].itemsize * prod(shape)
        for name, (dtype, shape) in tensor_shapes(calibration, manifest).items()
        if not name.endswith(FREQUENCY)
    )
    if calibration.predictor == "gate":
        # Beside a layer's gate projection, float32 lengths of its rows.
        row_bytes = manifest.ffn.d_model * NUMPY_DTYPE[manifest.dtype].itemsize + 4
        nbytes += sum(layer.masked for layer in calibration.layers) * manifest.ffn.n_neurons * row_bytes
    return nbytes


def make_predictor(
    calibration: Calibration,
    tensors: Mapping[str, WeightArray],
    geometry: FFNGeometry,
    activation: Activation,
    *,
    gates: Sequence[WeightArray | None] = (),
    gate_bias: Sequence[F32Array | None] = (),
    thresholds: Sequence[float] = (),
) -> Predictor:
    """Build it from what the store has read and checked.

    Args:
        calibration: of the bundle.
        tensors: of ``predictors.safetensors`` (``store.open.open_predictors``).
        geometry: of the rows.
        activation: of the hidden units.
        gates: for predictor ``gate``: what ``store.predictors.load_gates`` gives.
        gate_bias: likewise, per layer ``[n_neurons]`` or None; empty: none anywhere.
        thresholds: of the manifest; empty: 0 for all.

    Raises:
        BundleError: predictor ``gate`` for an FFN without one.
    """
    if calibration.predictor == "low-rank":
        return LowRankPredictor(geometry, calibration, tensors)
    return GatePredictor(
        geometry,
        activation,
        calibration,
        tensors,
        gates,
        gate_bias or [None] * geometry.n_layers,
        thresholds or [0.0] * geometry.n_layers,
    )
