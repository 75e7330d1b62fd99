"""Wrong calls of verbs, by name: the exception, how its message begins, and the call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def crooked(*shape: int, dtype: str = "float32") -> np.ndarray:
    """An array that starts one byte behind an aligned address."""
    item_bytes = np.dtype(dtype).itemsize
    raw = np.zeros(int(np.prod(shape)) * item_bytes + 1, np.uint8)
    return raw[1:].view(dtype).reshape(shape)


ROWS = np.zeros((3, 64), np.uint8)
Case = tuple[type[Exception], str, Callable[[ModuleType], Any]]
CASES: dict[str, Case] = {
    "no array": (
        TypeError,
        "gemv: w is list, expected a NumPy array",
        lambda m: m.gemv([[1.0]], f32(1, 1), f32(1, 1)),
    ),
    "none": (TypeError, "gemv: x is NoneType", lambda m: m.gemv(f32(2, 3), None, f32(1, 2))),
    "float64": (
        TypeError,
        "gemv: x has dtype float64, expected float32",
        lambda m: m.gemv(f32(2, 3), np.zeros((1, 3)), f32(1, 2)),
    ),
    "weights": (
        TypeError,
        "gemv: w has dtype int8, expected float32 or float16 or uint16",
        lambda m: m.gemv(np.zeros((2, 3), np.int8), f32(1, 3), f32(1, 2)),
    ),
    "byte order": (
        TypeError,
        "gemv: x has dtype >f4",
        lambda m: m.gemv(f32(2, 3), np.zeros((1, 3), ">f4"), f32(1, 2)),
    ),
    "dates": (
        TypeError,
        "gemv: x has dtype datetime64[s]",
        lambda m: m.gemv(f32(2, 3), np.zeros((1, 3), "M8[s]"), f32(1, 2)),
    ),
    "objects": (
        TypeError,
        "gemv: x has dtype object",
        lambda m: m.gemv(f32(2, 3), np.zeros((1, 3), object), f32(1, 2)),
    ),
    "one axis": (
        ValueError,
        "gemv: w has shape (6,), expected (n, k)",
        lambda m: m.gemv(f32(6), f32(1, 3), f32(1, 2)),
    ),
    "width": (
        ValueError,
        "gemv: x has shape (1, 4), expected (1..16, 3)",
        lambda m: m.gemv(f32(2, 3), f32(1, 4), f32(1, 2)),
    ),
    "batch of 17": (
        ValueError,
        "gemv: x has shape (17, 3), expected (1..16, 3)",
        lambda m: m.gemv(f32(2, 3), f32(17, 3), f32(17, 2)),
    ),
    "batch of 0": (
        ValueError,
        "gemv: x has shape (0, 3)",
        lambda m: m.gemv(f32(2, 3), f32(0, 3), f32(0, 2)),
    ),
    "out": (
        ValueError,
        "gemv: out has shape (2, 1), expected (1, 2)",
        lambda m: m.gemv(f32(2, 3), f32(1, 3), f32(2, 1)),
    ),
    "bias": (
        ValueError,
        "gemv: bias has shape (3,), expected (2,)",
        lambda m: m.gemv(f32(2, 3), f32(1, 3), f32(1, 2), f32(3)),
    ),
    "strided": (
        ValueError,
        "gemv: w is not C-contiguous; pass numpy.ascontiguousarray(w)",
        lambda m: m.gemv(f32(2, 6)[:, ::2], f32(1, 3), f32(1, 2)),
    ),
    "transposed": (
        ValueError,
        "gemv: w is not C-contiguous",
        lambda m: m.gemv(f32(3, 2).T, f32(1, 3), f32(1, 2)),
    ),
    "unaligned": (
        ValueError,
        "gemv: x is not aligned to 4 bytes",
        lambda m: m.gemv(f32(2, 3), crooked(1, 3), f32(1, 2)),
    ),
    "read-only": (
        ValueError,
        "gemv: out is read-only, expected a writeable array",
        lambda m: m.gemv(f32(2, 3), f32(1, 3), frozen(f32(1, 2))),
    ),
    "dtype name": (
        ValueError,
        "ffn_dots: dtype is 'f8', expected f32 or f16 or bf16",
        lambda m: m.ffn_dots(ROWS, "f8", 8, False, "relu", f32(1, 8), f32(1, 3)),
    ),
    "activation": (
        ValueError,
        "ffn_dots: activation is 'swish', expected relu or relu2 or silu or gelu or gelu_tanh",
        lambda m: m.ffn_dots(ROWS, "f32", 8, False, "swish", f32(1, 8), f32(1, 3)),
    ),
    "short rows": (
        ValueError,
        "ffn_dots: rows have a stride of 64 bytes, expected at least 96 and a multiple of 4",
        lambda m: m.ffn_dots(ROWS, "f32", 8, True, "relu", f32(1, 8), f32(1, 3)),
    ),
    "odd stride": (
        ValueError,
        "ffn_down: rows have a stride of 63 bytes, expected at least 32 and a multiple of 2",
        lambda m: m.ffn_down(np.zeros((3, 63), np.uint8), "f16", 8, False, f32(1, 3), f32(1, 8)),
    ),
    "huge d": (
        ValueError,
        "ffn_down: rows have a stride of 64 bytes, expected at least 55340232221128654848 ",
        lambda m: m.ffn_down(ROWS, "f32", 2**62, True, f32(1, 3), f32(1, 8)),
    ),
    "d of 0": (
        ValueError,
        "ffn_down: d is 0, expected at least 1",
        lambda m: m.ffn_down(ROWS, "f32", 0, False, f32(1, 3), f32(1, 8)),
    ),
    "unaligned rows": (
        ValueError,
        "ffn_down: rows is not aligned to 4 bytes",
        lambda m: m.ffn_down(crooked(3, 64, dtype="uint8"), "f32", 8, False, f32(1, 3), f32(1, 8)),
    ),
    "h": (
        ValueError,
        "ffn_down: h has shape (1, 4), expected (1.., 3)",
        lambda m: m.ffn_down(ROWS, "f32", 8, False, f32(1, 4), f32(1, 8)),
    ),
    "acc": (
        ValueError,
        "ffn_down: acc has shape (2, 8), expected (1, 8)",
        lambda m: m.ffn_down(ROWS, "f32", 8, False, f32(1, 3), f32(2, 8)),
    ),
    "gate bias": (
        ValueError,
        "ffn_dots: gate_bias is given, expected None for ungated rows",
        lambda m: m.ffn_dots(ROWS, "f32", 8, False, "relu", f32(1, 8), f32(1, 3), None, f32(3)),
    ),
    "up bias": (
        TypeError,
        "ffn_dots: up_bias has dtype float16, expected float32",
        lambda m: m.ffn_dots(ROWS, "f32", 8, False, "relu", f32(1, 8), f32(1, 3), np.zeros(3, np.float16)),
    ),
    "sums": (
        TypeError,
        "crc32c: out has dtype int32, expected uint32",
        lambda m: m.crc32c(ROWS, np.zeros(3, np.int32)),
    ),
    "to_f32": (
        ValueError,
        "to_f32: out has shape (3,), expected (2,)",
        lambda m: m.to_f32(np.zeros(2, np.float16), f32(3)),
    ),
    "from_f32": (
        TypeError,
        "from_f32: src has dtype float16, expected float32",
        lambda m: m.from_f32(np.zeros(2, np.float16), np.zeros(2, np.float16)),
    ),
    "threads": (ValueError, "set_threads: n is 0, expected 1..256", lambda m: m.set_threads(0)),
    "many threads": (ValueError, "set_threads: n is 257, expected 1..256", lambda m: m.set_threads(257)),
}
