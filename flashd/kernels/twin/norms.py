"""Normalisation of hidden states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flashd.kernels import check
from flashd.types import F32Array


def rmsnorm(x: F32Array, weight: F32Array, eps: float, out: F32Array) -> None:
    """``out[t] = x[t] / sqrt(mean(x[t] ** 2) + eps) * weight`` (RMSNorm, arXiv 1910.07467).

    A token's bits do not depend on T.

    Args:
        x: ``[T, d]``, T any.
        weight: ``[d]``.
        eps: added to the mean of squares.
        out: ``[T, d]``, overwritten; it may be ``x``.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    _check("rmsnorm", x, weight, None, out)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        out[...] = (wide * _inverse_root(wide, eps)).astype(np.float32) * weight


def layernorm(x: F32Array, weight: F32Array, bias: F32Array | None, eps: float, out: F32Array) -> None:
    """``out[t] = (x[t] - mean) / sqrt(variance + eps) * weight + bias`` (arXiv 1607.06450).

    The variance is the mean of squared differences from the mean, in a second pass: values far from
    zero lose nothing. A token's bits do not depend on T.

    Args:
        x: ``[T, d]``, T any.
        weight: ``[d]``.
        bias: ``[d]`` or None.
        eps: added to the variance.
        out: ``[T, d]``, overwritten; it may be ``x``.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    _check("layernorm", x, weight, bias, out)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        if wide.size:
            wide -= wide.mean(axis=1, keepdims=True)
        out[...] = (wide * _inverse_root(wide, eps)).astype(np.float32) * weight
        if bias is not None:
            out += bias


def _inverse_root(wide: npt.NDArray[np.float64], eps: float) -> npt.NDArray[np.float64]:
    squares = np.square(wide).sum(axis=1, keepdims=True)
    root: npt.NDArray[np.float64] = 1 / np.sqrt(squares / wide.shape[1] + eps)
    return root


def _check(verb: str, x: F32Array, weight: F32Array, bias: F32Array | None, out: F32Array) -> None:
    check.array(verb, "x", x, check.F32, ("T", "d"))
    d = x.shape[1]
    check.array(verb, "weight", weight, check.F32, (d,))
    check.optional(verb, "bias", bias, check.F32, (d,))
    check.array(verb, "out", out, check.F32, x.shape, writeable=True)
