"""Wrong arguments: an error that says what was got and what was expected, the same for native and twin."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flashd import kernels
from flashd.kernels import twin


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def crooked(*shape: int, dtype: str = "float32") -> np.ndarray:
    """An array that starts one byte behind an aligned address."""
    item_bytes = np.dtype(dtype).itemsize
    raw = np.zeros(int(np.prod(shape)) * item_bytes + 1, np.uint8)
    return raw[1:].view(dtype).reshape(shape)


ROWS = np.zeros((3, 64), np.uint8)
CASES: dict[str, tuple[type[Exception], str, Callable[[ModuleType], Any]]] = {
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
        "ffn_dots: activation is 'swish', expected relu or silu or gelu or gelu_tanh",
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
        "ffn_down: h has shape (1, 4), expected (1..16, 3)",
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
    "head groups": (
        ValueError,
        "attention: 5 query heads, expected a multiple of the 2 KV heads",
        lambda m: m.attention(f32(5, 8), f32(2, 4, 8), f32(2, 4, 8), 4, 1.0, f32(5, 8)),
    ),
    "no KV head": (
        ValueError,
        "attention: 5 query heads, expected a multiple of the 0 KV heads",
        lambda m: m.attention(f32(5, 8), f32(0, 4, 8), f32(0, 4, 8), 4, 1.0, f32(5, 8)),
    ),
    "length": (
        ValueError,
        "attention: length is 5, expected 1..4",
        lambda m: m.attention(f32(2, 8), f32(2, 4, 8), f32(2, 4, 8), 5, 1.0, f32(2, 8)),
    ),
    "length of 0": (
        ValueError,
        "attention: length is 0, expected 1..4",
        lambda m: m.attention(f32(2, 8), f32(2, 4, 8), f32(2, 4, 8), 0, 1.0, f32(2, 8)),
    ),
    "values": (
        TypeError,
        "attention: v has dtype float16, expected float32",
        lambda m: m.attention(f32(2, 8), f32(2, 4, 8), np.zeros((2, 4, 8), np.float16), 4, 1.0, f32(2, 8)),
    ),
    "keys": (
        ValueError,
        "attention: k has shape (2, 4, 9), expected (n_kv, capacity, 8)",
        lambda m: m.attention(f32(2, 8), f32(2, 4, 9), f32(2, 4, 9), 4, 1.0, f32(2, 8)),
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
MODULES = [pytest.param(twin, id="twin"), pytest.param(kernels, id="installed")]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, module: ModuleType) -> None:
    kind, message, call = CASES[case]
    with pytest.raises(kind) as caught:
        call(module)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_native_and_twin_say_the_same(case: str) -> None:
    said = []
    for module in (twin, kernels):
        with pytest.raises(Exception) as caught:
            CASES[case][2](module)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("module", MODULES)
def test_unknown_simd_level(module: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"SIMD level 'mmx' .*expected "):
        module.set_simd("mmx")


@pytest.mark.parametrize("module", MODULES)
def test_arrays_are_released(module: ModuleType) -> None:
    """A buffer that stays exported would forbid this resize."""
    w, x, out = f32(2, 3), f32(1, 3), f32(1, 2)
    module.gemv(w, x, out)
    with pytest.raises(ValueError):
        module.gemv(w, x, f32(9, 9))
    for array in (w, x, out):
        array.resize((4, 4), refcheck=False)
