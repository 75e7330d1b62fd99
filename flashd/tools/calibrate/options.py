"""What ``flashd calibrate`` can be told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flashd.errors import ConfigError

SPARSIFY = ("keep", "none", "fatrelu")
PREDICTOR_KINDS = ("low-rank", "gate")


@dataclass(frozen=True)
class CalibrateOptions:
    """How a bundle is calibrated.

    Attributes:
        samples: tokens of text at most; 0: by the model's size, see ``tokens.default_samples``.
        predictor: ``low-rank`` is trained; ``gate`` keeps the gate projections in RAM.
        rank: of every predictor; 0: per layer the smallest of d/32, d/16, d/8, d/4, d/2 that reaches
            ``fp_target``.
        late_rank: of those of the last four layers; 0: as the others.
        epochs: passes over the training text; 0: two, or more where it is short.
        fn_target: share of fired neurons that the predictor may miss, on text that is not trained on.
        fp_target: share of neurons requested in vain that is good enough.
        max_requested: a layer whose predictor requests a larger share of neurons than that has no mask.
        lookahead: whether to train guesses at the next layer.
        sparsify: ``fatrelu`` picks thresholds below which activations count as zero, ``none`` removes them,
            ``keep`` leaves the bundle's as they are.
        target: share of activations to cut.
        seed: of training.
        workers: layers that are trained at once; 0: as many as there are CPUs.
    """

    samples: int = 0
    predictor: Literal["low-rank", "gate"] = "low-rank"
    rank: int = 0
    late_rank: int = 0
    epochs: int = 0
    fn_target: float = 0.04
    fp_target: float = 0.07
    max_requested: float = 0.5
    lookahead: bool = True
    sparsify: Literal["keep", "none", "fatrelu"] = "keep"
    target: float = 0.7
    seed: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("predictor", self.predictor, PREDICTOR_KINDS),
            ("sparsify", self.sparsify, SPARSIFY),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}, expected one of: {', '.join(known)}")
        for name in ("samples", "rank", "late_rank", "epochs", "workers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed is {self.seed}, expected 0 to {(1 << 32) - 1}")
        for name in ("fn_target", "fp_target", "max_requested", "target"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value < 1):
                raise ConfigError(f"{name} is {value}, expected a share between 0 and 1")


@dataclass(frozen=True)
class CalibrateProgress:
    """How far a phase is.

    Attributes:
        phase: its name.
        done: units done.
        total: units in all.
        unit: what they are.
    """

    phase: str
    done: int
    total: int
    unit: str


OnProgress = Callable[[CalibrateProgress], None]
