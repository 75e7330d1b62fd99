"""``calibration.json``: what ``flashd calibrate`` has found out about a bundle's neurons.

It stands beside ``predictors.safetensors``, whose tensors it describes::

    layers.{i}.predictor.w1   f16 [r, d_model]    only of masked layers
    layers.{i}.predictor.b1   f32 [r]
    layers.{i}.predictor.w2   f16 [n_neurons, r]
    layers.{i}.predictor.b2   f32 [n_neurons]
    layers.{i}.lookahead.*    the same four       from layer i's FFN input to the neurons of i + 1
    layers.{i}.frequency      f32 [n_neurons]     share of tokens that request a neuron, of every layer
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from flashd.errors import BundleError
from flashd.layout.manifest import SUMS, Manifest

CALIBRATION = "calibration.json"
PREDICTORS = "predictors.safetensors"
FORMAT = "flashd-calibration"
FORMAT_VERSION = 1
# Window lengths whose usage is measured: k = 1..64.
MAX_WINDOW = 64
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class LayerCalibration:
    """One layer. Shares are of ``n_neurons``; *requested* by the predictor, *fired* in truth.

    Attributes:
        masked: whether the layer has a mask; without one it is too dense for a predictor to pay.
        threshold: of the predictor's scores (logits); a neuron is requested above it.
        rank: of the predictor; 0 without one.
        lookahead_threshold: likewise, of the guess for the next layer; None without one.
        lookahead_rank: 0 without one.
        false_negative: missed / fired, pooled over the tokens of a text not trained on.
        false_positive: wrongly requested / not fired, likewise.
        missed_norm: share of the output's norm that is missed.
        requested: mean share requested per token.
        fired: mean share fired per token.
        s_agg_requested: mean share requested by any of k tokens in a row, for k = 1..64.
        s_agg_fired: likewise, fired.
        capacity_rows: 99th percentile of the rows requested by any of k tokens in a row, for k = 1..64
            (the paper's Req_i).
    """

    masked: bool
    threshold: float = 0.0
    rank: int = 0
    lookahead_threshold: float | None = None
    lookahead_rank: int = 0
    false_negative: float = 0.0
    false_positive: float = 0.0
    missed_norm: float = 0.0
    requested: float = 1.0
    fired: float = 1.0
    s_agg_requested: tuple[float, ...] = ()
    s_agg_fired: tuple[float, ...] = ()
    capacity_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """The content of ``calibration.json``.

    Attributes:
        bundle_sha256: SHA-256 of the checksums' file (``ffn.sums``) as the manifest lists it: the rows
            that all this was found out about.
        predictors_sha256: of ``predictors.safetensors``.
        predictors_bytes: its size.
        synthetic: the model is made up (``flashd synth``), and so is all this.
        predictor: ``low-rank`` or ``gate``.
        tokens: that it was calibrated with.
        provenance: text files and options, for people.
    """

    format: Literal["flashd-calibration"]
    format_version: Literal[1]
    bundle_sha256: str
    predictors_sha256: str
    predictors_bytes: int
    synthetic: bool
    predictor: Literal["low-rank", "gate"]
    tokens: int
    layers: tuple[LayerCalibration, ...]
    provenance: dict[str, str]


def to_json(calibration: Calibration) -> str:
    """Text of ``calibration.json``."""
    return json.dumps(asdict(calibration), indent=1, ensure_ascii=False) + "\n"


def from_json(text: bytes, where: str, manifest: Manifest) -> Calibration:
    """Parse and check ``calibration.json`` of a bundle.

    Args:
        text: the file's content.
        where: path of the file, for messages.
        manifest: of the bundle.

    Raises:
        BundleError: not valid, or of another bundle.
    """
    again = "calibrate again (flashd calibrate), or remove the file to run without predictors"
    if len(text) > _MAX_JSON_BYTES:
        raise BundleError(f"{where}: {len(text)} bytes, more than any real calibration has; {again}")
    try:
        calibration = TypeAdapter(Calibration).validate_json(text, strict=True)
    except ValidationError as exc:
        first = exc.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"{where}: {field_name}: {first['msg']}; {again}") from exc
    if len(calibration.layers) != manifest.ffn.n_layers:
        raise BundleError(
            f"{where}: {len(calibration.layers)} layers, the bundle has {manifest.ffn.n_layers}; {again}"
        )
    if calibration.bundle_sha256 != sums_sha256(manifest):
        raise BundleError(f"{where}: made for other weights than this bundle's; {again}")
    return calibration


def sums_sha256(manifest: Manifest) -> str:
    """What tells one bundle's rows from another's."""
    return manifest.file(SUMS).sha256
