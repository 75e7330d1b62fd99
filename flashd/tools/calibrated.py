"""What is known about a bundle's calibration, for commands that show facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashd.errors import BundleError, DiskReadError
from flashd.layout.calibration import CALIBRATION, PREDICTORS
from flashd.layout.manifest import Manifest
from flashd.store.open import open_predictors, read_calibration
from flashd.tools.calibrate.write import PLOT, REPORT, SCRATCH

# What calibration puts beside the files that a manifest lists.
CALIBRATION_FILES = (CALIBRATION, PREDICTORS, REPORT, PLOT, SCRATCH)


def has_predictors(directory: Path, manifest: Manifest) -> bool:
    """Whether a bundle has a calibration that is of it and undamaged."""
    try:
        return open_predictors(directory, manifest) is not None
    except (BundleError, DiskReadError):
        return False


@dataclass(frozen=True)
class CalibrationFacts:
    """A bundle's calibration in short.

    Attributes:
        predictor: ``low-rank`` or ``gate``.
        masked_layers: layers with a mask.
        requested: mean share of neurons requested per token, in those.
        fired: mean share that fires, likewise.
        predictors_bytes: of ``predictors.safetensors``.
        tokens: that it was calibrated with.
        synthetic: whether model and calibration are made up.
        thresholds: whether activations are cut.
    """

    predictor: str
    masked_layers: int
    requested: float
    fired: float
    predictors_bytes: int
    tokens: int
    synthetic: bool
    thresholds: bool


def calibration_facts(directory: Path, manifest: Manifest) -> tuple[CalibrationFacts | None, str]:
    """Facts, or None and why it can't be used; None and nothing for a bundle without calibration."""
    try:
        found = read_calibration(directory, manifest)
    except (BundleError, DiskReadError) as exc:
        return None, str(exc)
    if found is None:
        return None, ""
    masked = [layer for layer in found.layers if layer.masked]
    count = max(1, len(masked))
    facts = CalibrationFacts(
        predictor=found.predictor,
        masked_layers=len(masked),
        requested=sum(layer.requested for layer in masked) / count,
        fired=sum(layer.fired for layer in masked) / count,
        predictors_bytes=found.predictors_bytes,
        tokens=found.tokens,
        synthetic=found.synthetic,
        thresholds=any(found.thresholds),
    )
    return facts, ""


def calibration_text(facts: CalibrationFacts | None, problem: str, n_layers: int) -> str:
    """The same in words."""
    if problem:
        return f"unusable: {problem}"
    if facts is None:
        return "no"
    synthetic = "synthetic, " if facts.synthetic else ""
    return (
        f"{synthetic}predictor {facts.predictor}, masks in {facts.masked_layers} of {n_layers} layers: "
        f"{100 * facts.requested:.1f} % of their neurons are requested, {100 * facts.fired:.1f} % fire"
    )
