"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashd.types import F32Array

_NUCLEUS_GUESS = 1024  # candidates sorted first; the whole vocabulary only if their mass is short


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen.

    Attributes:
        max_tokens: tokens to generate at most; ``None``: up to the end of the context.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: candidates kept; 0 is off.
        seed: same seed, same prompt, same model: same text. ``None`` draws one.
        stop: strings that end the answer and are not part of it.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Sampler:
    """One request's token chooser, with a random stream of its own."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._rng = np.random.Generator(np.random.PCG64(params.seed))

    def next(self, logits: F32Array) -> int:
        """Choose a token id from logits ``[vocab]``.

        Ties go to the lowest id, as in ``argmax``. One uniform number is drawn per sampled token.
        ``top_p`` is a share of what ``top_k`` has left.
        """
        params = self._params
        if params.temperature == 0 or params.top_k == 1:
            return int(np.argmax(logits))
        scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
        weights = np.exp(scaled)
        if 0 < params.top_k < len(logits):
            ids = _largest(logits, params.top_k)
            mass = float(weights[ids].sum())
        else:
            ids = _largest(logits, min(_NUCLEUS_GUESS, len(logits)))
            mass = float(weights.sum())
            if params.top_p >= 1 or weights[ids].sum() < params.top_p * mass:
                ids = np.argsort(-logits, kind="stable")
        total = np.cumsum(weights[ids])
        if params.top_p < 1:
            # The smallest prefix whose mass reaches top_p; its first token always stays.
            total = total[: int(np.searchsorted(total, params.top_p * mass)) + 1]
        index = int(np.searchsorted(total, self._rng.random() * total[-1], side="right"))
        return int(ids[min(index, len(total) - 1)])


def _largest(logits: F32Array, count: int) -> npt.NDArray[np.intp]:
    """Ids of the ``count`` largest logits, by falling logit, ties by rising id."""
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    ties = np.flatnonzero(logits == threshold)[: count - len(above)]
    ids = np.concatenate((above, ties))
    return ids[np.lexsort((ids, -logits[ids]))]
