"""What an evaluation found. ``dataclasses.asdict`` makes JSON of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Half the width of a 95 % interval in standard errors.
Z95 = 1.96


@dataclass(frozen=True)
class ModeQuality:
    """How one way of choosing neurons does on the text.

    Attributes:
        mode: ``dense``, ``oracle``, ``predictor``, or ``no-threshold`` (dense, small activations kept).
        loss: mean negative log-likelihood per scored token, in nats.
        perplexity: its exponential.
        perplexity_change: relative to dense.
        perplexity_change_95: half the width of its 95 % interval, from the differences token by token.
        changed: tokens whose most likely successor is another one than dense says.
        changed_share: of the scored tokens.
        seconds: it took.
    """

    mode: str
    loss: float
    perplexity: float
    perplexity_change: float
    perplexity_change_95: float
    changed: int
    changed_share: float
    seconds: float


@dataclass(frozen=True)
class LayerQuality:
    """A layer's predictor against the truth, on the dense model's FFN inputs, pooled over tokens.

    Attributes:
        layer: its index.
        masked: whether it has a mask; without one all neurons are requested.
        fired: share of neurons that fired.
        requested: share that was requested.
        precision: fired and requested / requested.
        recall: fired and requested / fired.
        false_negative: missed / fired.
        false_positive: wrongly requested / not fired.
    """

    layer: int
    masked: bool
    fired: float
    requested: float
    precision: float
    recall: float
    false_negative: float
    false_positive: float


@dataclass(frozen=True)
class Share:
    """A share of items with its 95 % interval (Wilson's)."""

    count: int
    of: int
    share: float
    low_95: float
    high_95: float


@dataclass(frozen=True)
class ClozeQuality:
    """How one way of choosing neurons does on the cloze items.

    Attributes:
        mode: as in ``ModeQuality``.
        exact: items whose last word is what greedy decoding writes (LAMBADA's accuracy).
        first: items whose last word is more probable than every distractor.
        log_prob: mean log-probability of the last word, in nats.
        gained, lost: items that are right here and wrong dense, and the other way round (``first``).
        seconds: it took.
    """

    mode: str
    exact: Share
    first: Share
    log_prob: float
    gained: int
    lost: int
    seconds: float


@dataclass(frozen=True)
class EvalReport:
    """The whole evaluation.

    Attributes:
        model: the bundle.
        synthetic: the model is made up: its quality says nothing.
        texts: files read.
        context: tokens of a window, each of which starts with an empty cache.
        tokens: scored tokens; 0 where only cloze items were asked for.
        modes: dense first.
        layers: where there is a predictor.
        false_negative, false_positive: means over the masked layers; None without any.
        cloze_distractors: words that the last word of a cloze item competes with.
        cloze: where it was asked for.
        notes: for people.
    """

    model: str
    synthetic: bool
    texts: tuple[str, ...]
    context: int
    tokens: int = 0
    modes: tuple[ModeQuality, ...] = ()
    layers: tuple[LayerQuality, ...] = ()
    false_negative: float | None = None
    false_positive: float | None = None
    cloze_distractors: int = 0
    cloze: tuple[ClozeQuality, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


def share_of(count: int, of: int) -> Share:
    """``count`` of ``of`` items; nothing is known where there are none."""
    if not of:
        return Share(0, 0, 0.0, 0.0, 1.0)
    p, z2 = count / of, Z95 * Z95
    middle = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = Z95 * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return Share(count, of, p, max(0.0, middle - half), min(1.0, middle + half))
