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
import math
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from flashd.errors import BundleError
from flashd.layout.manifest import MANIFEST, SUMS, Manifest
from flashd.types import DType

CALIBRATION = "calibration.json"
PREDICTORS = "predictors.safetensors"
FORMAT = "flashd-calibration"
FORMAT_VERSION = 1
# Window lengths whose usage is measured: k = 1..64.
MAX_WINDOW = 64
MAX_JSON_BYTES = 64 << 20
PARTS = ("w1", "b1", "w2", "b2")
FREQUENCY = ".frequency"  # how the names of frequencies end
AGAIN = "calibrate again (flashd calibrate), or remove calibration.json to run without predictors"


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
        thresholds: the manifest's: what counts as firing.
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
    thresholds: tuple[float, ...] = ()


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
    if len(text) > MAX_JSON_BYTES:
        raise BundleError(f"{where}: {len(text)} bytes, more than any real calibration has; {AGAIN}")
    try:
        calibration = TypeAdapter(Calibration).validate_json(text, strict=True)
    except ValidationError as exc:
        first = exc.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"{where}: {field_name}: {first['msg']}; {AGAIN}") from exc
    if calibration.bundle_sha256 != sums_sha256(manifest):
        raise BundleError(f"{where}: made for other weights than this bundle's; {AGAIN}")
    if len(calibration.layers) != manifest.ffn.n_layers:
        raise BundleError(
            f"{where}: {len(calibration.layers)} layers, the bundle has {manifest.ffn.n_layers}; {AGAIN}"
        )
    if calibration.thresholds != manifest.thresholds:
        raise BundleError(f"{where}: made for other thresholds than {MANIFEST} has; {AGAIN}")
    for index, layer in enumerate(calibration.layers):
        problem = _problem(layer, manifest.ffn.n_neurons, calibration.predictor)
        if problem:
            raise BundleError(f"{where}: layer {index}: {problem}; {AGAIN}")
    if calibration.layers[-1].lookahead_threshold is not None:
        raise BundleError(f"{where}: the last layer looks ahead; {AGAIN}")
    return calibration


def _problem(layer: LayerCalibration, n_neurons: int, predictor: str) -> str | None:
    """What no layer can have; None if nothing."""
    if not math.isfinite(layer.threshold) or not math.isfinite(layer.lookahead_threshold or 0.0):
        return "a threshold is no finite number"
    low_rank = layer.masked and predictor == "low-rank"
    for what, rank, wanted in (
        ("rank", layer.rank, low_rank),
        ("lookahead_rank", layer.lookahead_rank, layer.lookahead_threshold is not None),
    ):
        if (rank > 0) != wanted or not 0 <= rank <= n_neurons:
            return f"{what} is {rank}"
    shares = (
        layer.false_negative, layer.false_positive, layer.missed_norm, layer.requested, layer.fired,
        *layer.s_agg_requested, *layer.s_agg_fired,
    )  # fmt: skip
    if not all(0 <= share <= 1 for share in shares):
        return "a share is not between 0 and 1"
    if not all(0 <= rows <= n_neurons for rows in layer.capacity_rows):
        return f"capacity_rows are not between 0 and {n_neurons}"
    if any(len(each) not in (0, MAX_WINDOW) for each in (layer.s_agg_requested, layer.s_agg_fired)):
        return f"a usage curve has not {MAX_WINDOW} points"
    if len(layer.capacity_rows) not in (0, MAX_WINDOW) or (layer.masked and not layer.capacity_rows):
        return f"{len(layer.capacity_rows)} capacity_rows, expected {MAX_WINDOW}"
    return None


def tensor_name(layer: int, kind: Literal["predictor", "lookahead"], part: str) -> str:
    """Name of a predictor's tensor in ``predictors.safetensors``."""
    return f"layers.{layer}.{kind}.{part}"


def frequency_name(layer: int) -> str:
    """Name of a layer's frequencies there."""
    return f"layers.{layer}{FREQUENCY}"


def tensor_shapes(calibration: Calibration, manifest: Manifest) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Dtype and shape of every tensor that a calibration needs."""
    n, d = manifest.ffn.n_neurons, manifest.ffn.d_model
    wanted: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for index, layer in enumerate(calibration.layers):
        ranks = {"predictor": layer.rank, "lookahead": layer.lookahead_rank}
        for kind, rank in ranks.items():
            if rank:
                shapes = {"w1": (rank, d), "b1": (rank,), "w2": (n, rank), "b2": (n,)}
                for part, shape in shapes.items():
                    dtype: DType = "f16" if len(shape) == 2 else "f32"
                    wanted[f"layers.{index}.{kind}.{part}"] = (dtype, shape)
        wanted[frequency_name(index)] = ("f32", (n,))
    return wanted


def sums_sha256(manifest: Manifest) -> str:
    """What tells one bundle's rows from another's."""
    return manifest.file(SUMS).sha256
