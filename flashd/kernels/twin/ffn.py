"""The sparse FFN over neuron rows (LLM in a flash, arXiv 2312.11514, sections 3.1 and 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashd.config import MAX_BATCH
from flashd.kernels import check
from flashd.kernels.twin.common import blocks, dots, picked, widen
from flashd.types import NUMPY_DTYPE, Activation, BoolArray, DType, F32Array, I64Array, U8Array, WeightArray


def ffn_dots(
    rows: U8Array,
    dtype: DType,
    d: int,
    gated: bool,
    activation: Activation,
    x: F32Array,
    out: F32Array,
    up_bias: F32Array | None = None,
    gate_bias: F32Array | None = None,
    *,
    index: I64Array | None = None,
    slots: I64Array | None = None,
    mask: BoolArray | None = None,
    threshold: float = 0.0,
) -> I64Array:
    """First half of an FFN over neuron rows: up (and gate) dot products and the activation.

    Ungated: ``out = act(up.x + up_bias)``. Gated: ``out = act(gate.x + gate_bias) * (up.x +
    up_bias)``. A value ``a`` of the activation with ``|a| <= threshold`` counts as 0 (before it is
    multiplied): ReLU with a threshold is FATReLU (ProSparse, arXiv 2402.13516), SiLU with one is
    CATS (arXiv 2404.08763). NaN stays NaN.

    Several calls fill one ``out`` as rows arrive from flash: each computes the rows that ``index``
    lists into the columns that ``slots`` lists, and leaves the others alone. A value's bits depend
    on its row and its ``x`` only, up to a batch of 16 and beyond it (the two may differ).

    Args:
        rows: ``uint8[n, stride]``, each ``[up(d) | gate(d) if gated | down(d)]`` and padding.
        dtype: type of the weights in ``rows``.
        d: model width in elements.
        gated: whether rows hold a gate.
        activation: ``relu``, ``relu2`` (squared ReLU), ``silu``, ``gelu`` or ``gelu_tanh``.
        x: ``[B, d]``. Up to 16: each weight is read once for all of them; more are a prompt's chunk.
        out: ``[B, c]``, columns in ``slots`` overwritten.
        up_bias: ``[n]``, by row number.
        gate_bias: ``[n]``, gated rows only.
        index: ``int64[m]``, row numbers in 0..n-1 in any order; None: all rows, so m = n.
        slots: ``int64[m]``, strictly ascending in 0..c-1: the column of the i-th listed row; None:
            columns 0..m-1, and c = m.
        mask: ``bool[B, c]``, which sequence uses which column. Where it is False, ``out`` gets
            exactly 0.0, whatever the row holds. None: all are used.
        threshold: finite and at least 0; compared in float32.

    Returns:
        The columns of this call in which any sequence's ``out`` is not zero (NaN is not), ascending.

    Raises:
        TypeError, ValueError: as ``check.array`` says; unknown dtype or activation; short rows;
            index, slots or threshold out of range; slots not ascending; a gate's bias without gate.
    """
    call = _Dots(rows, dtype, d, gated, activation, x, out, up_bias, gate_bias, index, slots, mask)
    level, count = call.check(threshold)
    fired = [np.empty(0, np.int64)]
    with np.errstate(all="ignore"):
        fired += [call.compute(start, stop, level) for start, stop in blocks(count, d)]
    return np.concatenate(fired)


def ffn_down(
    rows: U8Array,
    dtype: DType,
    d: int,
    gated: bool,
    h: F32Array,
    acc: F32Array,
    index: I64Array | None = None,
) -> None:
    """Second half of an FFN: ``acc[b] += sum over j of h[b, j] * down(row of j)``, in ascending j.

    The sum runs strictly in that order, so calls on consecutive slices give the same bits as one
    call, and a caller that lists its rows in ascending neuron id gets the same bits wherever they
    lie. Up to a batch of 16, a sequence does not read rows whose ``h`` is exactly zero; beyond it,
    rows whose ``h`` is zero for all tokens are not read (and a NaN in another row reaches all).

    Args:
        rows, dtype, d, gated: as for ``ffn_dots``.
        h: ``[B, c]``, B at least 1.
        acc: ``[B, d]``, added to.
        index: ``int64[c]``, the row numbers of the columns of ``h``; None: column j is row j, c = n.

    Raises:
        TypeError, ValueError: as for ``ffn_dots``.
    """
    verb = "ffn_down"
    check.neuron_rows(verb, rows, dtype, d, gated)
    count = check.index(verb, index, len(rows))
    check.array(verb, "h", h, check.F32, (check.TOKENS, count))
    check.array(verb, "acc", acc, check.F32, (len(h), d), writeable=True)
    first = (2 if gated else 1) * d
    weights = rows.view(NUMPY_DTYPE[dtype])[:, first : first + d]
    listed = np.arange(count) if index is None else index
    with np.errstate(all="ignore"):
        if len(h) > MAX_BATCH:
            _down_of_many(weights, listed, h, acc)
            return
        for b in range(len(h)):
            fired = np.flatnonzero(h[b] != 0)  # NaN counts as fired
            for start, stop in blocks(len(fired), d):
                ids = fired[start:stop]
                terms = np.empty((len(ids) + 1, d), np.float32)
                terms[0] = acc[b]
                np.multiply(h[b, ids, None], widen(weights[listed[ids]]), out=terms[1:])
                # accumulate is sequential by definition; reduce may sum pairwise.
                acc[b] = np.add.accumulate(terms, axis=0, out=terms)[-1]


@dataclass(frozen=True)
class _Dots:
    """The arguments of one ``ffn_dots``."""

    rows: U8Array
    dtype: DType
    d: int
    gated: bool
    activation: Activation
    x: F32Array
    out: F32Array
    up_bias: F32Array | None
    gate_bias: F32Array | None
    index: I64Array | None
    slots: I64Array | None
    mask: BoolArray | None

    def check(self, threshold: float) -> tuple[np.float32, int]:
        """The threshold as it is compared, and the number of rows listed."""
        verb = "ffn_dots"
        n = len(check.neuron_rows(verb, self.rows, self.dtype, self.d, self.gated))
        count = check.index(verb, self.index, n)
        check.one_of(verb, "activation", self.activation, check.ACTIVATIONS)
        level = check.threshold(verb, threshold)
        check.array(verb, "x", self.x, check.F32, (check.TOKENS, self.d))
        check.optional(verb, "slots", self.slots, ("int64",), (count,))
        columns: int | str = count if self.slots is None else "c"
        check.array(verb, "out", self.out, check.F32, (len(self.x), columns), writeable=True)
        check.optional(verb, "mask", self.mask, ("bool",), self.out.shape)
        check.optional(verb, "up_bias", self.up_bias, check.F32, (n,))
        check.optional(verb, "gate_bias", self.gate_bias, check.F32, (n,))
        if self.gate_bias is not None and not self.gated:
            raise ValueError(f"{verb}: gate_bias is given, expected None for ungated rows")
        if self.slots is not None:
            check.ascending(verb, "slots", self.slots, self.out.shape[1])
        return level, count

    def compute(self, start: int, stop: int, level: np.float32) -> I64Array:
        """The listed rows start..stop-1 into their columns; returns the columns that fired."""
        ids = picked(self.index, start, stop)
        into = np.arange(start, stop) if self.slots is None else self.slots[start:stop]
        up = self._affine(0, ids, self.up_bias)
        gate = self._affine(1, ids, self.gate_bias) if self.gated else up
        value = _cut(_activate(self.activation, gate), level)
        if self.gated:
            value *= up
        if self.mask is not None:
            value[~self.mask[:, into]] = 0
        self.out[:, into] = value
        fired: I64Array = into[(value != 0).any(axis=0)]
        return fired

    def _affine(self, part: int, ids: I64Array | slice, bias: F32Array | None) -> F32Array:
        weights = self.rows.view(NUMPY_DTYPE[self.dtype])
        block = widen(weights[ids, part * self.d : (part + 1) * self.d])
        y = np.empty((len(self.x), len(block)), np.float32)
        dots(block, self.x, y)
        return y if bias is None else y + bias[ids]


def _down_of_many(weights: WeightArray, listed: I64Array, h: F32Array, acc: F32Array) -> None:
    """One row after the other for a block of tokens, whose sums stay in the cache."""
    fired = np.flatnonzero((h != 0).any(axis=0))
    d = acc.shape[1]
    for start, stop in blocks(len(fired), d):
        columns = fired[start:stop]
        rows = widen(weights[listed[columns]])
        for first, last in blocks(len(acc), d):
            factors = np.ascontiguousarray(h[first:last, columns].T)[:, :, None]
            sums, term = acc[first:last], np.empty((last - first, d), np.float32)
            for factor, row in zip(factors, rows, strict=True):
                np.multiply(factor, row, out=term)
                np.add(sums, term, out=sums)


def _activate(activation: Activation, x: F32Array) -> F32Array:
    if activation in ("relu", "relu2"):
        positive = np.maximum(x, np.float32(0))
        return positive if activation == "relu" else positive * positive
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)), np.float32)
    if activation == "gelu":
        # erfc keeps the left tail, where 1 + erf would cancel to nothing. NumPy has neither.
        half = np.array([math.erfc(-value * math.sqrt(0.5)) for value in x.ravel().tolist()], np.float32)
        return np.asarray(0.5 * x * half.reshape(x.shape), np.float32)
    # (1 + tanh z) / 2 is the logistic function of 2z, and that does not cancel in the left tail.
    twice = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return np.asarray(x / (1 + np.exp(-twice)), np.float32)


def _cut(value: F32Array, threshold: np.float32) -> F32Array:
    return np.where(np.abs(value) <= threshold, np.float32(0), value)  # NaN compares False: it stays
