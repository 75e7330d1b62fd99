"""What ``flashd synth`` made, beside what the paper says of real models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashd.layout.calibration import LayerCalibration
from flashd.tools.synth.curves import Curve, Target


@dataclass(frozen=True)
class CurveRow:
    """One figure of the usage curve: shares of a layer's neurons, mean over layers.

    Attributes:
        what: ``requested``, ``fired`` or ``new`` (requested, but by none of the last k tokens).
        k: over how many tokens in a row.
        target: the paper's figure.
        measured: the bundle's.
    """

    what: str
    k: int
    target: float
    measured: float


@dataclass(frozen=True)
class SynthReport:
    """A bundle with made-up weights. ``dataclasses.asdict`` makes JSON of it.

    Attributes:
        bundle: its directory.
        synthetic: always true.
        like: whose shape it has.
        curve: which usage curve.
        dtype: of the weights.
        bytes: of all files.
        predictor_bytes: of these, predictors.
        rank: of the predictors.
        requested, fired: mean share of neurons per token.
        rows: the curve.
        bench_budget: share of all weights that it can be measured with.
    """

    bundle: str
    like: str
    curve: str
    dtype: str
    bytes: int
    predictor_bytes: int
    rank: int
    requested: float
    fired: float
    rows: list[CurveRow] = field(default_factory=list)
    synthetic: bool = True
    bench_budget: str = "55%"


def curve_rows(curve: Curve, layers: Sequence[LayerCalibration]) -> list[CurveRow]:
    """The curve's targets beside what was measured."""
    return [
        CurveRow(
            target.what, target.k, target.share, sum(_measured(target, one) for one in layers) / len(layers)
        )
        for target in curve.targets
    ]


def _measured(target: Target, layer: LayerCalibration) -> float:
    if target.what == "fired":
        return layer.s_agg_fired[target.k - 1]
    used = layer.s_agg_requested
    return used[target.k] - used[target.k - 1] if target.what == "new" else used[target.k - 1]
