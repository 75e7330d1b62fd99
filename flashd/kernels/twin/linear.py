"""Products of a weight matrix with vectors."""

from __future__ import annotations

import numpy as np

from flashd.kernels import check
from flashd.kernels.twin.common import linear
from flashd.types import F32Array, WeightArray


def gemv(w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None = None) -> None:
    """``out[b] = w @ x[b] + bias`` for few vectors: each weight is read once for all of them.

    A sequence's bits do not depend on the batch, and an output's not on where its row lies in ``w``.

    Args:
        w: ``[n, k]`` float32, float16, or uint16 holding bfloat16 bits.
        x: ``[B, k]``, B in 1..16.
        out: ``[B, n]``, overwritten.
        bias: ``[n]``.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    _check("gemv", w, x, out, bias, check.BATCH)
    with np.errstate(all="ignore"):
        linear(w, x, out, bias)


def gemm(w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None = None) -> None:
    """``out[t] = w @ x[t] + bias`` for the many tokens of a prompt: bound by arithmetic.

    A token's bits depend neither on T nor on its place among the tokens, an output's not on where
    its row lies in ``w``. The order of summation is its own: ``gemv`` may differ in the last bits.

    Args:
        w: ``[n, k]`` float32, float16, or uint16 holding bfloat16 bits.
        x: ``[T, k]``, T at least 1.
        out: ``[T, n]``, overwritten.
        bias: ``[n]``.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    _check("gemm", w, x, out, bias, check.TOKENS)
    with np.errstate(all="ignore"):
        linear(w, x, out, bias)


def _check(
    verb: str, w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None, vectors: str
) -> None:
    check.array(verb, "w", w, check.WEIGHT_DTYPES, ("n", "k"))
    n, k = w.shape
    check.array(verb, "x", x, check.F32, (vectors, k))
    check.array(verb, "out", out, check.F32, (len(x), n), writeable=True)
    check.optional(verb, "bias", bias, check.F32, (n,))
