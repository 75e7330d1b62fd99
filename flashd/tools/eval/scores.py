"""Log-probabilities out of logits."""

from __future__ import annotations

import numpy as np

from flashd.types import F32Array, I64Array


def log_probs(logits: F32Array, targets: I64Array) -> F32Array:
    """Natural logarithm of each target's probability.

    Args:
        logits: ``[n, vocab]``.
        targets: ``[n]``, one of each row's columns.
    """
    highest = logits.max(axis=1, keepdims=True)
    mass = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64))
    chosen = logits[np.arange(len(targets)), targets] - highest[:, 0]
    result: F32Array = (chosen - mass).astype(np.float32)
    return result
