"""The kernel verbs in NumPy: what the native module is tested against, and what runs without it.

Slow, but with the same promises: one sequence's result does not depend on the batch, on where a
row lies among other rows, or on how a call was cut into slices. BLAS keeps none of these (its
kernels treat the last rows differently), so dot products go through ``einsum``, which sums every
row in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.kernels import check
from flashd.types import NUMPY_DTYPE, Activation, DType, F32Array, U8Array, U32Array, WeightArray

_BLOCK_ELEMENTS = 1 << 18  # one block of converted weights stays in the L2 cache
_CRC_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected (RFC 3720)


def gemv(w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None = None) -> None:
    """``out[b] = w @ x[b] + bias``.

    Args:
        w: ``[n, k]`` float32, float16, or uint16 holding bfloat16 bits.
        x: ``[B, k]``, B in 1..16.
        out: ``[B, n]``, overwritten.
        bias: ``[n]``.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    check.array("gemv", "w", w, check.WEIGHT_DTYPES, ("n", "k"))
    n, k = w.shape
    check.array("gemv", "x", x, ("float32",), (check.BATCH, k))
    check.array("gemv", "out", out, ("float32",), (len(x), n), writeable=True)
    if bias is not None:
        check.array("gemv", "bias", bias, ("float32",), (n,))
    with np.errstate(all="ignore"):
        for start, stop in _blocks(n, k):
            _dots(_widen(w[start:stop]), x, out[:, start:stop])
        if bias is not None:
            out += bias


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
) -> None:
    """First half of an FFN over neuron rows: up (and gate) dot products and the activation.

    Ungated: ``act(up.x + up_bias)``. Gated: ``act(gate.x + gate_bias) * (up.x + up_bias)``.

    Args:
        rows: ``uint8[n, stride]``, each ``[up(d) | gate(d) if gated | down(d)]`` and padding.
        dtype: type of the weights in ``rows``.
        d: model width in elements.
        gated: whether rows hold a gate.
        activation: name of the activation.
        x: ``[B, d]``, B in 1..16.
        out: ``[B, n]``, overwritten.
        up_bias: ``[n]``.
        gate_bias: ``[n]``, gated rows only.

    Raises:
        TypeError, ValueError: as ``check.array`` says; unknown dtype or activation; short rows.
    """
    verb = "ffn_dots"
    check.neuron_rows(verb, rows, dtype, d, gated)
    check.one_of(verb, "activation", activation, check.ACTIVATIONS)
    n = len(rows)
    check.array(verb, "x", x, ("float32",), (check.BATCH, d))
    check.array(verb, "out", out, ("float32",), (len(x), n), writeable=True)
    for name, bias in (("up_bias", up_bias), ("gate_bias", gate_bias)):
        if bias is not None:
            check.array(verb, name, bias, ("float32",), (n,))
    if gate_bias is not None and not gated:
        raise ValueError(f"{verb}: gate_bias is given, expected None for ungated rows")
    weights = rows.view(NUMPY_DTYPE[dtype])
    with np.errstate(all="ignore"):
        for start, stop in _blocks(n, d):
            up = np.empty((len(x), stop - start), np.float32)
            _dots(_widen(weights[start:stop, :d]), x, up)
            if up_bias is not None:
                up += up_bias[start:stop]
            if not gated:
                out[:, start:stop] = _activate(activation, up)
                continue
            gate = np.empty_like(up)
            _dots(_widen(weights[start:stop, d : 2 * d]), x, gate)
            if gate_bias is not None:
                gate += gate_bias[start:stop]
            out[:, start:stop] = _activate(activation, gate) * up


def ffn_down(rows: U8Array, dtype: DType, d: int, gated: bool, h: F32Array, acc: F32Array) -> None:
    """Second half of an FFN: ``acc[b] += sum over r of h[b, r] * down_r``, in ascending r.

    The sum runs strictly in row order, so calls on consecutive slices of the rows give the same
    bits as one call. Rows whose ``h`` is exactly zero are skipped: their weights are not read.

    Args:
        rows, dtype, d, gated: as for ``ffn_dots``.
        h: ``[B, n]``, B in 1..16.
        acc: ``[B, d]``, added to.

    Raises:
        TypeError, ValueError: as for ``ffn_dots``.
    """
    verb = "ffn_down"
    check.neuron_rows(verb, rows, dtype, d, gated)
    check.array(verb, "h", h, ("float32",), (check.BATCH, len(rows)))
    check.array(verb, "acc", acc, ("float32",), (len(h), d), writeable=True)
    first = (2 if gated else 1) * d
    weights = rows.view(NUMPY_DTYPE[dtype])[:, first : first + d]
    with np.errstate(all="ignore"):
        for b in range(len(h)):
            fired = np.flatnonzero(h[b] != 0)  # NaN counts as fired
            for start, stop in _blocks(len(fired), d):
                ids = fired[start:stop]
                terms = np.empty((len(ids) + 1, d), np.float32)
                terms[0] = acc[b]
                np.multiply(h[b, ids, None], _widen(weights[ids]), out=terms[1:])
                # accumulate is sequential by definition; reduce may sum pairwise.
                acc[b] = np.add.accumulate(terms, axis=0, out=terms)[-1]


def attention(
    q: F32Array, k: npt.NDArray[Any], v: npt.NDArray[Any], length: int, scale: float, out: F32Array
) -> None:
    """Attention of one query over the first ``length`` positions of a KV cache.

    Args:
        q: ``[H, hd]``.
        k, v: ``[n_kv, capacity, hd]`` float32 or float16, the same; H is a multiple of n_kv and
            query head i reads KV head ``i // (H // n_kv)``.
        length: positions to attend to, 1..capacity.
        scale: factor of the scores, commonly ``hd ** -0.5``.
        out: ``[H, hd]``, overwritten.

    Raises:
        TypeError, ValueError: as ``check.array`` says; H no multiple of n_kv; length out of range.
    """
    check.array("attention", "q", q, ("float32",), ("H", "hd"))
    heads, width = q.shape
    check.array("attention", "k", k, ("float32", "float16"), ("n_kv", "capacity", width))
    check.array("attention", "v", v, (k.dtype.name,), k.shape)
    check.array("attention", "out", out, ("float32",), q.shape, writeable=True)
    n_kv, capacity = k.shape[:2]
    if n_kv < 1 or heads % n_kv:
        raise ValueError(f"attention: {heads} query heads, expected a multiple of the {n_kv} KV heads")
    if not 1 <= length <= capacity:
        raise ValueError(f"attention: length is {length}, expected 1..{capacity}")
    group = heads // n_kv
    with np.errstate(all="ignore"):
        for kv_head in range(n_kv):
            keys = _widen(k[kv_head, :length])
            values = _widen(v[kv_head, :length])
            for head in range(kv_head * group, (kv_head + 1) * group):
                scores = np.einsum("tk,k->t", keys, q[head]) * np.float32(scale)
                weights = np.exp(scores - np.fmax.reduce(scores))
                out[head] = np.einsum("t,tk->k", weights, values) / weights.sum()


def crc32c(rows: U8Array, out: U32Array) -> None:
    """CRC32C (Castagnoli; ``b"123456789"`` gives 0xE3069283) of every row.

    Args:
        rows: ``uint8[n, stride]``, summed over the full stride.
        out: ``uint32[n]``, overwritten.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    check.array("crc32c", "rows", rows, ("uint8",), ("n", "stride"))
    check.array("crc32c", "out", out, ("uint32",), (len(rows),), writeable=True)
    n, stride_bytes = rows.shape
    crc = np.full(n, 0xFFFFFFFF, np.uint32)
    whole_bytes = stride_bytes // 8 * 8
    # One column of 8 bytes for all rows at a time: slicing-by-8, vectorised over the rows.
    words = np.ascontiguousarray(np.ascontiguousarray(rows[:, :whole_bytes]).view("<u4").T)
    for low_word, high in zip(words[0::2], words[1::2], strict=True):
        low = low_word ^ crc
        crc = _CRC[7][low & 0xFF] ^ _CRC[3][high & 0xFF]
        for shift in (8, 16, 24):
            table = 7 - shift // 8
            crc ^= _CRC[table][(low >> shift) & 0xFF] ^ _CRC[table - 4][(high >> shift) & 0xFF]
    for column in rows[:, whole_bytes:].T:
        crc = _CRC[0][(crc ^ column) & 0xFF] ^ (crc >> 8)
    out[:] = ~crc


def to_f32(src: WeightArray, out: F32Array) -> None:
    """Convert weights to float32, exactly.

    Args:
        src: float32, float16, or uint16 holding bfloat16 bits; any shape.
        out: float32 of the same shape, overwritten.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    check.array("to_f32", "src", src, check.WEIGHT_DTYPES, None)
    check.array("to_f32", "out", out, ("float32",), src.shape, writeable=True)
    out[...] = _widen(src)


def from_f32(src: F32Array, out: WeightArray) -> None:
    """Convert float32 to a weight type: nearest, ties to even; too large becomes infinite.

    Args:
        src: float32, any shape.
        out: float32, float16, or uint16 for bfloat16 bits; the same shape, overwritten.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    check.array("from_f32", "src", src, ("float32",), None)
    check.array("from_f32", "out", out, check.WEIGHT_DTYPES, src.shape, writeable=True)
    if out.dtype != np.uint16:
        with np.errstate(all="ignore"):
            out[...] = src
        return
    bits = src.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    # Rounding could carry a NaN into infinity: keep its top bits and make it quiet.
    out[...] = np.where(np.isnan(src), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)


def set_threads(n: int) -> None:
    """NumPy's twins run on the calling thread; checks ``n`` and ignores it."""
    check.thread_count(n)


def threads() -> int:
    """Threads that the verbs use: 1."""
    return 1


def simd_level() -> str:
    """Instruction set in use: ``numpy``."""
    return "numpy"


def available_simd() -> tuple[str, ...]:
    """Levels that ``set_simd`` takes here."""
    return ("numpy",)


def set_simd(level: str) -> None:
    """``ValueError`` unless ``level`` is ``numpy``, the only one without the native module."""
    if level != "numpy":
        raise ValueError(
            f"SIMD level '{level}' needs the native kernels, which are not installed; "
            "expected numpy, or install flashd with a C++ compiler"
        )


def _widen(weights: WeightArray) -> F32Array:
    """C-contiguous float32 of weights; a view when they are that already."""
    if weights.dtype == np.uint16:
        widened: F32Array = (weights.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    return np.ascontiguousarray(weights, np.float32).reshape(weights.shape)


def _blocks(n: int, k: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of some ``_BLOCK_ELEMENTS`` elements."""
    step = max(1, _BLOCK_ELEMENTS // max(k, 1))
    for start in range(0, n, step):
        yield start, min(start + step, n)


def _dots(block: F32Array, x: F32Array, out: F32Array) -> None:
    for b in range(len(x)):
        out[b] = np.einsum("nk,k->n", block, x[b])


def _activate(activation: Activation, x: F32Array) -> F32Array:
    if activation == "relu":
        return np.maximum(x, np.float32(0))
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)), np.float32)
    if activation == "gelu":
        # erfc keeps the left tail, where 1 + erf would cancel to nothing. NumPy has neither.
        half = np.array([math.erfc(-value * math.sqrt(0.5)) for value in x.ravel().tolist()], np.float32)
        return np.asarray(0.5 * x * half.reshape(x.shape), np.float32)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float32)


def _crc_tables() -> U32Array:
    tables = np.empty((8, 256), np.uint32)
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(_CRC_POLYNOMIAL), crc >> 1)
    tables[0] = crc
    for index in range(1, 8):
        tables[index] = tables[0][tables[index - 1] & 0xFF] ^ (tables[index - 1] >> 8)
    return tables


_CRC = _crc_tables()
