"""Which neurons are used over k tokens: the paper's figures, and what reproduces them.

A neuron is requested where ``g = u . c(p)``, a stationary process of variance 1 whose correlation from
one token to the next is ``drift``, exceeds a threshold of its own; thresholds are spread with ``spread``
around their mean. Slower drift repeats neurons from token to token; a wider spread makes some neurons
favourites for good. Both were fitted to the targets by simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flashd.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """A figure that the paper gives.

    Attributes:
        what: ``requested``, ``fired``, or ``new``: requested, but by none of the last k tokens.
        k: over how many tokens.
        share: of a layer's neurons.
    """

    what: Literal["requested", "fired", "new"]
    k: int
    share: float


@dataclass(frozen=True)
class Curve:
    """One kind of model.

    Attributes:
        name: as ``--curve`` has it.
        drift: correlation of the code from one token to the next.
        spread: of the neurons' thresholds, in standard deviations of ``g``.
        requested, fired: mean share of neurons per token.
        targets: what the paper says about it.
    """

    name: str
    drift: float
    spread: float
    requested: float
    fired: float
    targets: tuple[Target, ...]

    def at(self, sparsity: float) -> Curve:
        """The same kind of model with another share of neurons that do not fire.

        Raises:
            ConfigError: out of range.
        """
        if not 0.2 <= sparsity <= 0.9999:
            raise ConfigError(f"sparsity is {sparsity}, expected 0.2 to 0.9999")
        fired = 1 - sparsity
        requested = min(fired * self.requested / self.fired, (1 + fired) / 2)
        targets = (Target("requested", 1, requested), Target("fired", 1, fired))
        return replace(self, fired=fired, requested=requested, targets=targets)


CURVES = {
    curve.name: curve
    for curve in (
        Curve(  # OPT 6.7B with its predictor, sections 3.1 and 5
            "opt",
            drift=0.55,
            spread=1.0,
            requested=0.10,
            fired=0.03,
            targets=(
                Target("requested", 1, 0.10),
                Target("requested", 5, 0.24),
                Target("new", 5, 0.024),
                Target("fired", 1, 0.03),
            ),
        ),
        # Falcon 7B, figure 4a. Five tokens that each fire 3 % fire 15 % only if no neuron fires twice.
        Curve(
            "falcon",
            drift=-0.2,
            spread=0.6,
            requested=0.036,
            fired=0.0325,
            targets=(Target("fired", 1, 0.03), Target("fired", 5, 0.15), Target("fired", 30, 0.42)),
        ),
    )
}


def curve_named(name: str, sparsity: float | None) -> Curve:
    """A curve, perhaps at another sparsity than its own.

    Raises:
        ConfigError: an unknown name, or a sparsity out of range.
    """
    if name not in CURVES:
        raise ConfigError(f"unknown curve {name!r}; known: {', '.join(CURVES)}")
    curve = CURVES[name]
    return curve if sparsity is None or abs(1 - sparsity - curve.fired) < 1e-9 else curve.at(sparsity)
