"""Which neurons a layer needs: the low-rank predictor, and the best of a batch."""

from __future__ import annotations

import numpy as np

from flashd.kernels import check
from flashd.kernels.twin.common import linear
from flashd.types import BoolArray, F32Array, I64Array, WeightArray


def predict(
    w1: WeightArray,
    w2: WeightArray,
    x: F32Array,
    threshold: float,
    b1: F32Array | None = None,
    b2: F32Array | None = None,
    scores: F32Array | None = None,
) -> tuple[I64Array, BoolArray]:
    """Active neurons by a low-rank predictor (LLM in a flash, arXiv 2312.11514, section 3.1).

    The scores (logits) are ``w2 @ relu(w1 @ x + b1) + b2``; a neuron is active where its score is
    not at most the threshold, so NaN is active: a broken predictor hides nothing.

    Args:
        w1: ``[r, d]`` float32, float16, or uint16 holding bfloat16 bits.
        w2: ``[n, r]``, likewise; it may have another dtype than ``w1``.
        x: ``[B, d]``, B in 1..16.
        threshold: any number or infinity; compared in float32.
        b1: ``[r]``.
        b2: ``[n]``.
        scores: ``[B, n]``, overwritten if given.

    Returns:
        ``ids int64[m]``, ascending: active for any sequence; ``mask bool[B, m]``: for which.

    Raises:
        TypeError, ValueError: as ``check.array`` says; a threshold of NaN.
    """
    verb = "predict"
    check.array(verb, "w1", w1, check.WEIGHT_DTYPES, ("r", "d"))
    rank, d = w1.shape
    check.array(verb, "w2", w2, check.WEIGHT_DTYPES, ("n", rank))
    n = len(w2)
    check.array(verb, "x", x, check.F32, (check.BATCH, d))
    level = check.number(verb, "threshold", threshold)
    check.optional(verb, "b1", b1, check.F32, (rank,))
    check.optional(verb, "b2", b2, check.F32, (n,))
    check.optional(verb, "scores", scores, check.F32, (len(x), n), writeable=True)
    hidden = np.empty((len(x), rank), np.float32)
    logits = np.empty((len(x), n), np.float32) if scores is None else scores
    with np.errstate(all="ignore"):
        linear(w1, x, hidden, b1)
        linear(w2, np.maximum(hidden, np.float32(0)), logits, b2)
        return _union(~(logits <= level))


def topk_union(scores: F32Array, k: int) -> tuple[I64Array, BoolArray]:
    """The k highest scores of each sequence, and their union.

    Among equals the lower id wins; NaN counts as the highest.

    Args:
        scores: ``[B, n]``, B at least 1.
        k: 1..n.

    Returns:
        ``ids int64[m]``, ascending: chosen for any sequence; ``mask bool[B, m]``: for which.

    Raises:
        TypeError, ValueError: as ``check.array`` says; k out of range.
    """
    check.array("topk_union", "scores", scores, check.F32, (check.TOKENS, "n"))
    n = scores.shape[1]
    check.within("topk_union", "k", k, 1, n)
    best = np.zeros(scores.shape, np.bool_)
    # The last key decides first: NaN, then the higher score; the sort is stable.
    order = np.lexsort((-scores, ~np.isnan(scores)))
    np.put_along_axis(best, order[:, :k], True, axis=1)
    return _union(best)


def _union(active: BoolArray) -> tuple[I64Array, BoolArray]:
    ids = np.flatnonzero(active.any(axis=0))
    return ids, np.ascontiguousarray(active[:, ids])
