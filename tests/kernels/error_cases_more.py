"""Wrong calls of attention, the sparse FFN's lists, prediction and norms: as in ``error_cases``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from kernels.error_cases import ROWS, Case, f32, frozen, i64


def attend(
    m: ModuleType, q: Any = (1, 4, 8), k: Any = (2, 5, 8), length: int = 5, v: Any = None, out: Any = None
) -> None:
    m.attention(f32(*q), f32(*k), f32(*k) if v is None else v, length, 1.0, f32(*q) if out is None else out)


def dots(m: ModuleType, batch: int = 1, columns: int = 3, rows: Any = ROWS, **lists: Any) -> None:
    m.ffn_dots(rows, "f32", 8, False, "relu", f32(batch, 8), f32(batch, columns), **lists)


def down(m: ModuleType, columns: int, index: Any) -> None:
    m.ffn_down(ROWS, "f32", 8, False, f32(1, columns), f32(1, 8), index)


def predict(
    m: ModuleType, w1: Any = (4, 8), w2: Any = (6, 4), batch: int = 1, threshold: float = 0.0, **rest: Any
) -> None:
    m.predict(f32(*w1), f32(*w2), f32(batch, 8), threshold, **rest)


def gemm(m: ModuleType, tokens: int, width: int = 3, **rest: Any) -> None:
    m.gemm(f32(2, 3), f32(tokens, width), f32(tokens, 2), **rest)


MORE_CASES: dict[str, Case] = {
    "gemm of no tokens": (ValueError, "gemm: x has shape (0, 3), expected (1.., 3)", lambda m: gemm(m, 0)),
    "gemm width": (ValueError, "gemm: x has shape (20, 4), expected (1.., 3)", lambda m: gemm(m, 20, 4)),
    "gemm bias": (ValueError, "gemm: bias has shape (3,), expected (2,)", lambda m: gemm(m, 20, bias=f32(3))),
    "dots of no tokens": (
        ValueError,
        "ffn_dots: x has shape (0, 8), expected (1.., 8)",
        lambda m: dots(m, 0),
    ),
    "down of no tokens": (
        ValueError,
        "ffn_down: h has shape (0, 3), expected (1.., 3)",
        lambda m: m.ffn_down(ROWS, "f32", 8, False, f32(0, 3), f32(0, 8)),
    ),
    "index too large": (
        ValueError,
        "ffn_dots: index is 3 at 1, expected 0..2",
        lambda m: dots(m, index=i64(2, 3, -1)),
    ),
    "index negative": (
        ValueError,
        "ffn_dots: index is -1 at 2, expected 0..2",
        lambda m: dots(m, index=i64(2, 0, -1)),
    ),
    "index far out": (
        ValueError,
        "ffn_dots: index is 9223372036854775807 at 0, expected 0..2",
        lambda m: dots(m, index=i64(2**63 - 1, 0, -(2**63))),
    ),
    "index without rows": (
        ValueError,
        "ffn_dots: index is 0 at 0, expected 0..-1",
        lambda m: dots(m, rows=ROWS[:0], index=i64(0), columns=1),
    ),
    "index of int32": (
        TypeError,
        "ffn_dots: index has dtype int32, expected int64",
        lambda m: dots(m, index=np.zeros(3, np.int32)),
    ),
    "index of uint64": (
        TypeError,
        "ffn_dots: index has dtype uint64, expected int64",
        lambda m: dots(m, index=np.zeros(3, np.uint64)),
    ),
    "index of two axes": (
        ValueError,
        "ffn_dots: index has shape (1, 3), expected (m,)",
        lambda m: dots(m, index=i64(0, 1, 2)[None]),
    ),
    "index and out": (
        ValueError,
        "ffn_dots: out has shape (1, 3), expected (1, 2)",
        lambda m: dots(m, index=i64(0, 1)),
    ),
    "out without slots": (
        ValueError,
        "ffn_dots: out has shape (1, 4), expected (1, 3)",
        lambda m: dots(m, columns=4),
    ),
    "out for another batch": (
        ValueError,
        "ffn_dots: out has shape (1, 3), expected (2, c)",
        lambda m: m.ffn_dots(ROWS, "f32", 8, False, "relu", f32(2, 8), f32(1, 3), slots=i64(0, 1, 2)),
    ),
    "slots too large": (
        ValueError,
        "ffn_dots: slots is 4 at 2, expected 0..3",
        lambda m: dots(m, columns=4, slots=i64(0, 1, 4)),
    ),
    "slots negative": (
        ValueError,
        "ffn_dots: slots is -2 at 0, expected 0..3",
        lambda m: dots(m, columns=4, slots=i64(-2, 1, 3)),
    ),
    "slots twice": (
        ValueError,
        "ffn_dots: slots is 1 at 2, expected more than 1",
        lambda m: dots(m, columns=4, slots=i64(0, 1, 1)),
    ),
    "slots descending": (
        ValueError,
        "ffn_dots: slots is 0 at 1, expected more than 3",
        lambda m: dots(m, columns=4, slots=i64(3, 0, 9)),
    ),
    "slots too few": (
        ValueError,
        "ffn_dots: slots has shape (2,), expected (3,)",
        lambda m: dots(m, columns=4, slots=i64(0, 1)),
    ),
    "mask dtype": (
        TypeError,
        "ffn_dots: mask has dtype uint8, expected bool",
        lambda m: dots(m, mask=np.ones((1, 3), np.uint8)),
    ),
    "mask shape": (
        ValueError,
        "ffn_dots: mask has shape (1, 3), expected (1, 5)",
        lambda m: dots(m, columns=5, slots=i64(0, 1, 4), mask=np.ones((1, 3), np.bool_)),
    ),
    "bias by column": (
        ValueError,
        "ffn_dots: up_bias has shape (1,), expected (3,)",
        lambda m: dots(m, columns=1, index=i64(2), up_bias=f32(1)),
    ),
    "threshold below zero": (
        ValueError,
        "ffn_dots: threshold is -0.5, expected a finite float32 of at least 0",
        lambda m: dots(m, threshold=-0.5),
    ),
    "threshold just below zero": (
        ValueError,
        "ffn_dots: threshold is -5e-324, expected a finite float32 of at least 0",
        lambda m: dots(m, threshold=-5e-324),
    ),
    "threshold of an integer": (
        ValueError,
        "ffn_dots: threshold is -1.0, expected a finite float32 of at least 0",
        lambda m: dots(m, threshold=-1),
    ),
    "threshold of nan": (
        ValueError,
        "ffn_dots: threshold is nan, expected a finite float32 of at least 0",
        lambda m: dots(m, threshold=float("nan")),
    ),
    "threshold of infinity": (
        ValueError,
        "ffn_dots: threshold is inf, expected a finite float32 of at least 0",
        lambda m: dots(m, threshold=float("inf")),
    ),
    "threshold beyond float32": (
        ValueError,
        "ffn_dots: threshold is 1e+300, expected a finite float32 of at least 0",
        lambda m: dots(m, threshold=1e300),
    ),
    "rows of nothing": (
        ValueError,
        f"predict: w1 has shape ({2**60}, 0), expected at most 16777216 rows of nothing",
        lambda m: m.predict(f32(2**60, 0), f32(0, 2**60), f32(16, 0), 0.0),
    ),
    "tokens of nothing": (
        ValueError,
        f"rmsnorm: x has shape ({2**58}, 0), expected at most 16777216 rows of nothing",
        lambda m: m.rmsnorm(f32(2**58, 0), f32(0), 1e-5, f32(2**58, 0)),
    ),
    "heads of nothing": (
        ValueError,
        "rope: x has shape (4097, 4097, 0), expected at most 16777216 rows of nothing",
        lambda m: m.rope(f32(4097, 4097, 0), f32(4097, 0), f32(4097, 0)),
    ),
    "index of down": (
        ValueError,
        "ffn_down: index is 3 at 1, expected 0..2",
        lambda m: down(m, 2, i64(0, 3)),
    ),
    "columns of down": (
        ValueError,
        "ffn_down: h has shape (1, 3), expected (1.., 2)",
        lambda m: down(m, 3, i64(0, 2)),
    ),
    "huge d of dots": (
        ValueError,
        "ffn_dots: rows have a stride of 64 bytes, expected at least 73786976294838206456 ",
        lambda m: m.ffn_dots(ROWS, "f32", 2**63 - 1, False, "relu", f32(1, 8), f32(1, 3)),
    ),
    "first layer": (
        ValueError,
        "predict: x has shape (1, 8), expected (1..16, 9)",
        lambda m: predict(m, w1=(4, 9)),
    ),
    "second layer": (
        ValueError,
        "predict: w2 has shape (6, 5), expected (n, 4)",
        lambda m: predict(m, w2=(6, 5)),
    ),
    "predict for 17": (
        ValueError,
        "predict: x has shape (17, 8), expected (1..16, 8)",
        lambda m: predict(m, batch=17),
    ),
    "predict for none": (
        ValueError,
        "predict: x has shape (0, 8), expected (1..16, 8)",
        lambda m: predict(m, batch=0),
    ),
    "level of nan": (
        ValueError,
        "predict: threshold is nan, expected a number",
        lambda m: predict(m, threshold=float("nan")),
    ),
    "inner bias": (
        ValueError,
        "predict: b1 has shape (6,), expected (4,)",
        lambda m: predict(m, b1=f32(6)),
    ),
    "outer bias": (
        ValueError,
        "predict: b2 has shape (4,), expected (6,)",
        lambda m: predict(m, b2=f32(4)),
    ),
    "scores": (
        ValueError,
        "predict: scores has shape (2, 6), expected (1, 6)",
        lambda m: predict(m, scores=f32(2, 6)),
    ),
    "read-only scores": (
        ValueError,
        "predict: scores is read-only, expected a writeable array",
        lambda m: predict(m, scores=frozen(f32(1, 6))),
    ),
    "k of 0": (ValueError, "topk_union: k is 0, expected 1..5", lambda m: m.topk_union(f32(2, 5), 0)),
    "k of 6": (ValueError, "topk_union: k is 6, expected 1..5", lambda m: m.topk_union(f32(2, 5), 6)),
    "k below 0": (ValueError, "topk_union: k is -1, expected 1..5", lambda m: m.topk_union(f32(2, 5), -1)),
    "k of nothing": (ValueError, "topk_union: k is 1, expected 1..0", lambda m: m.topk_union(f32(2, 0), 1)),
    "topk for none": (
        ValueError,
        "topk_union: scores has shape (0, 5), expected (1.., n)",
        lambda m: m.topk_union(f32(0, 5), 1),
    ),
    "head groups": (
        ValueError,
        "attention: 5 query heads, expected a multiple of the 2 KV heads",
        lambda m: attend(m, (1, 5, 8)),
    ),
    "no KV head": (
        ValueError,
        "attention: 5 query heads, expected a multiple of the 0 KV heads",
        lambda m: attend(m, (1, 5, 8), (0, 5, 8)),
    ),
    "length": (ValueError, "attention: length is 6, expected 1..5", lambda m: attend(m, length=6)),
    "length of 0": (ValueError, "attention: length is 0, expected 1..5", lambda m: attend(m, length=0)),
    "length below the queries": (
        ValueError,
        "attention: length is 2, expected 3..5",
        lambda m: attend(m, (3, 4, 8), length=2),
    ),
    "more queries than the cache": (
        ValueError,
        "attention: length is 5, expected 20..5",
        lambda m: attend(m, (20, 4, 8)),
    ),
    "no query": (
        ValueError,
        "attention: q has shape (0, 4, 8), expected (1.., H, hd)",
        lambda m: attend(m, (0, 4, 8)),
    ),
    "one query without its axis": (
        ValueError,
        "attention: q has shape (4, 8), expected (1.., H, hd)",
        lambda m: attend(m, (4, 8)),
    ),
    "values": (
        TypeError,
        "attention: v has dtype float16, expected float32",
        lambda m: attend(m, v=np.zeros((2, 5, 8), np.float16)),
    ),
    "values' capacity": (
        ValueError,
        "attention: v has shape (2, 6, 8), expected (2, 5, 8)",
        lambda m: attend(m, v=f32(2, 6, 8)),
    ),
    "keys": (
        ValueError,
        "attention: k has shape (2, 5, 9), expected (n_kv, capacity, 8)",
        lambda m: attend(m, k=(2, 5, 9)),
    ),
    "attention's out": (
        ValueError,
        "attention: out has shape (1, 4, 9), expected (1, 4, 8)",
        lambda m: attend(m, out=f32(1, 4, 9)),
    ),
    "odd head": (
        ValueError,
        "rope: x has a head width of 7, expected an even number",
        lambda m: m.rope(f32(2, 3, 7), f32(2, 3), f32(2, 3)),
    ),
    "whole angles": (
        ValueError,
        "rope: cos has shape (2, 8), expected (2, 4)",
        lambda m: m.rope(f32(2, 3, 8), f32(2, 8), f32(2, 8)),
    ),
    "angles of other tokens": (
        ValueError,
        "rope: sin has shape (3, 4), expected (2, 4)",
        lambda m: m.rope(f32(2, 3, 8), f32(2, 4), f32(3, 4)),
    ),
    "rope of a view": (
        ValueError,
        "rope: x is read-only, expected a writeable array",
        lambda m: m.rope(frozen(f32(2, 3, 8)), f32(2, 4), f32(2, 4)),
    ),
    "norm weight": (
        ValueError,
        "rmsnorm: weight has shape (3,), expected (4,)",
        lambda m: m.rmsnorm(f32(2, 4), f32(3), 1e-5, f32(2, 4)),
    ),
    "norm out": (
        ValueError,
        "rmsnorm: out has shape (1, 4), expected (2, 4)",
        lambda m: m.rmsnorm(f32(2, 4), f32(4), 1e-5, f32(1, 4)),
    ),
    "norm bias": (
        ValueError,
        "layernorm: bias has shape (1, 4), expected (4,)",
        lambda m: m.layernorm(f32(2, 4), f32(4), f32(1, 4), 1e-5, f32(2, 4)),
    ),
    "read_all of floats": (
        TypeError,
        "read_all: memory has dtype float32, expected uint8",
        lambda m: m.read_all(f32(3)),
    ),
    "read_all of rows": (
        ValueError,
        "read_all: memory has shape (3, 64), expected (n,)",
        lambda m: m.read_all(ROWS),
    ),
}
