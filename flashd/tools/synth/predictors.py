"""``predictors.safetensors`` and ``calibration.json`` of a made-up model: exact by construction."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flashd.layout import calibration as layout
from flashd.layout.manifest import Manifest
from flashd.layout.safetensors_header import build_header
from flashd.tools.convert.files import HashedFile, write_durably
from flashd.tools.synth.code import Code
from flashd.tools.synth.measure import layer_usage, measured_positions
from flashd.types import ModelSpec, WeightArray

_PARTS = ("w1", "b1", "w2", "b2")


def predictor_bytes(spec: ModelSpec, rank: int) -> int:
    """Size of all predictors and lookaheads of a model, as near as it is known beforehand."""
    one = 2 * rank * (spec.d_model + spec.d_ffn) + 4 * (rank + spec.d_ffn)
    return spec.n_layers * (2 * one + 4 * spec.d_ffn)


def write_predictors(root: Path, manifest: Manifest, code: Code) -> layout.Calibration:
    """Write both files, layer by layer, durably, the JSON last.

    Args:
        root: the bundle's directory.
        manifest: of the bundle, which is complete.
        code: what its weights were made from.
    """
    spec = manifest.model
    header, _ = build_header(_tensors(spec, code.rank))
    file = HashedFile(root / layout.PREDICTORS)
    layers = []
    try:
        file.write(header)
        select = _select(code, spec.d_model)
        for layer in range(spec.n_layers):
            last = layer == spec.n_layers - 1
            usage = layer_usage(code, layer, not last)
            layers.append(usage.calibration)
            for which in (layer,) if last else (layer, layer + 1):
                for array in (select, *_read_out(code, which)):
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            file.write(usage.frequency.view(np.uint8))
        file.sync()
        entry = file.entry(root)
    finally:
        file.close()
    found = layout.Calibration(
        format="flashd-calibration",
        format_version=1,
        bundle_sha256=layout.sums_sha256(manifest),
        predictors_sha256=entry.sha256,
        predictors_bytes=entry.size_bytes,
        synthetic=True,
        predictor="low-rank",
        tokens=measured_positions(code).stop,
        layers=tuple(layers),
        provenance={"source": "flashd synth: made up together with the weights"},
    )
    write_durably(root / layout.CALIBRATION, layout.to_json(found).encode())
    return found


def _tensors(spec: ModelSpec, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes = {
        "w1": ("F16", (rank, spec.d_model)),
        "b1": ("F32", (rank,)),
        "w2": ("F16", (spec.d_ffn, rank)),
        "b2": ("F32", (spec.d_ffn,)),
    }
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in range(spec.n_layers):
        kinds = ("predictor",) if layer == spec.n_layers - 1 else ("predictor", "lookahead")
        for kind in kinds:
            tensors |= {f"layers.{layer}.{kind}.{part}": shapes[part] for part in _PARTS}
        tensors[f"layers.{layer}.frequency"] = ("F32", (spec.d_ffn,))
    return tensors


def _select(code: Code, d_model: int) -> WeightArray:
    """``w1``: the code, the code backwards (behind a ReLU both are needed), and the 1."""
    w1 = np.zeros((code.rank, d_model), "<f2")
    each = np.arange(code.n_code)
    w1[each, each] = 1
    w1[code.n_code + each, each] = -1
    w1[2 * code.n_code, code.n_code] = 1
    return w1


def _read_out(code: Code, layer: int) -> tuple[WeightArray, WeightArray, WeightArray]:
    """``b1``, ``w2`` and ``b2`` that request a layer's neurons where the score exceeds 0."""
    neurons, n_code = code.layer(layer), code.n_code
    w2 = np.zeros((len(neurons.request), code.rank), "<f2")
    w2[:, :n_code] = neurons.directions
    w2[:, n_code : 2 * n_code] = -neurons.directions
    w2[:, 2 * n_code] = -neurons.request
    return np.zeros(code.rank, np.float32), w2, np.zeros(len(w2), np.float32)
