"""Made-up calibrations for tests: random predictors, or every neuron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from flashd.layout.calibration import (
    MAX_WINDOW,
    Calibration,
    LayerCalibration,
    sums_sha256,
    tensor_shapes,
)
from flashd.layout.manifest import Manifest
from flashd.tools.calibrate.write import write_calibration
from flashd.types import NUMPY_DTYPE, WeightArray


def make_predictors(
    directory: Path,
    manifest: Manifest,
    *,
    masked: Sequence[bool] | None = None,
    rank: int = 8,
    threshold: float = 0.0,
    lookahead: bool = True,
    predictor: Literal["low-rank", "gate"] = "low-rank",
    seed: int = 0,
) -> tuple[Calibration, dict[str, WeightArray]]:
    """Calibrate a bundle with random predictors.

    Args:
        directory: the bundle.
        manifest: its manifest; thresholds in it are written into the directory's.
        masked: which layers have a mask; all by default.
        rank: of predictors and lookaheads.
        threshold: of the scores; with 0 about half of the neurons are requested.
        lookahead: whether layers look ahead at the next one.
        predictor: what ``calibration.json`` says.
        seed: of the weights.

    Returns:
        What ``open_predictors`` will give.
    """
    n_layers, n = manifest.ffn.n_layers, manifest.ffn.n_neurons
    masked = [True] * n_layers if masked is None else masked
    low_rank = predictor == "low-rank"
    layers = []
    for index in range(n_layers):
        layer = LayerCalibration(
            masked=masked[index],
            threshold=threshold,
            rank=rank if masked[index] and low_rank else 0,
            capacity_rows=tuple(min(n, n // 2 + k * n // 64) for k in range(MAX_WINDOW)),
            s_agg_requested=tuple(min(1.0, 0.5 + k / 64) for k in range(MAX_WINDOW)),
            s_agg_fired=tuple(min(1.0, 0.1 + k / 64) for k in range(MAX_WINDOW)),
            requested=0.5,
            fired=0.1,
        )
        if lookahead and index + 1 < n_layers and masked[index + 1]:
            layer = replace(layer, lookahead_threshold=threshold, lookahead_rank=rank)
        layers.append(layer)
    calibration = Calibration(
        format="flashd-calibration",
        format_version=1,
        bundle_sha256=sums_sha256(manifest),
        predictors_sha256="",
        predictors_bytes=0,
        synthetic=True,
        predictor=predictor,
        tokens=0,
        layers=tuple(layers),
        provenance={"source": "random weights", "seed": str(seed)},
    )
    rng = np.random.default_rng(seed)
    tensors: dict[str, WeightArray] = {
        name: rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPE[dtype])
        if not name.endswith("frequency")
        else rng.random(shape, np.float32)
        for name, (dtype, shape) in tensor_shapes(calibration, manifest).items()
    }
    return write_calibration(directory, manifest, calibration, tensors), tensors
