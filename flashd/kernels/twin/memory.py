"""Bytes: checksums of rows, conversions between weight types, and the yardstick of memory speed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.kernels import check
from flashd.kernels.twin.common import widen
from flashd.types import F32Array, I64Array, U8Array, U32Array, WeightArray

_CRC_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected (RFC 3720)


def crc32c(rows: U8Array, out: U32Array, index: I64Array | None = None) -> None:
    """CRC32C (Castagnoli; ``b"123456789"`` gives 0xE3069283) of rows.

    Args:
        rows: ``uint8[n, stride]``, summed over the full stride.
        out: ``uint32[m]``, overwritten.
        index: ``int64[m]``, row numbers in 0..n-1 in any order; None: all rows, so m = n.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    check.array("crc32c", "rows", rows, ("uint8",), ("n", "stride"))
    count = check.index("crc32c", index, len(rows))
    check.array("crc32c", "out", out, ("uint32",), (count,), writeable=True)
    if index is not None:
        rows = rows[index]
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
    out[...] = widen(src)


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


def append_kv(k: F32Array, v: F32Array, out: npt.NDArray[Any], position: int) -> None:
    """Put new tokens' keys and values into a cache, rounded to nearest even.

    Args:
        k: keys, ``[T, heads, d_head]``.
        v: values, likewise.
        out: ``[2, heads, capacity, d_head]`` float32 or float16; tokens from ``position`` on are overwritten.
        position: of the first token.

    Raises:
        TypeError, ValueError: as ``check.array`` says; there is no room for so many tokens.
    """
    verb = "append_kv"
    check.array(verb, "k", k, check.F32, (check.TOKENS, "heads", "d_head"))
    tokens, heads, d_head = k.shape
    check.array(verb, "v", v, check.F32, (tokens, heads, d_head))
    check.array(verb, "out", out, ("float32", "float16"), (2, heads, "capacity", d_head), writeable=True)
    check.within(verb, "position", position, 0, out.shape[2] - tokens)
    with np.errstate(over="ignore"):  # too large becomes infinite
        for cache, fresh in zip(out, (k, v), strict=True):
            cache[:, position : position + tokens] = fresh.transpose(1, 0, 2)


def read_all(memory: U8Array) -> int:
    """Read memory with all threads as fast as the machine can: the yardstick of the other verbs.

    Args:
        memory: ``uint8[n]``, n any.

    Returns:
        The XOR of its little-endian 64-bit words, the last one filled up with zeros, so that a
        compiler cannot leave the reading out.

    Raises:
        TypeError, ValueError: as ``check.array`` says.
    """
    check.array("read_all", "memory", memory, ("uint8",), ("n",))
    whole_bytes = len(memory) // 8 * 8
    tail = int.from_bytes(memory[whole_bytes:].tobytes(), "little")
    return int(np.bitwise_xor.reduce(memory[:whole_bytes].view("<u8"))) ^ tail


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
