"""Wrong calls of the verbs on tables of rows and on KV caches: as in ``error_cases``."""

from __future__ import annotations

import numpy as np
from kernels.error_cases import Case, f32, frozen, i64


def i32(n: int) -> np.ndarray:
    return np.zeros(n, np.int32)


def flags(n: int) -> np.ndarray:
    return np.zeros(n, np.bool_)


WINDOW_CASES: dict[str, Case] = {
    "find_rows of a neuron too many": (
        ValueError,
        "find_rows: ids is 4 at 1, expected 0..3",
        lambda m: m.find_rows(i64(0, 4), i32(4), flags(4)),
    ),
    "find_rows in wide rows": (
        TypeError,
        "find_rows: row_of has dtype int64, expected int32",
        lambda m: m.find_rows(i64(0), i64(1), flags(1)),
    ),
    "request_rows of other tables": (
        ValueError,
        "request_rows: in_flight has shape (3,), expected (4,)",
        lambda m: m.request_rows(i64(0), 1, i32(4), flags(4), i32(4), flags(3)),
    ),
    "request_rows without writing": (
        ValueError,
        "request_rows: last is read-only, expected a writeable array",
        lambda m: m.request_rows(i64(0), 1, frozen(i32(4)), flags(4), i32(4), flags(4)),
    ),
    "evict_rows of fewer than none": (
        ValueError,
        "evict_rows: k is -1, expected at least 0",
        lambda m: m.evict_rows(i32(4), flags(4), i32(4), 0, i32(4), flags(4), -1, i64(0), i64(0), 0),
    ),
    "evict_rows of doubles": (
        TypeError,
        "evict_rows: value has dtype float64, expected float32 or int32",
        lambda m: m.evict_rows(i32(4), flags(4), i32(4), 0, np.zeros(4), flags(4), 1, i64(0), i64(0), 0),
    ),
    "evict_rows into a full list": (
        ValueError,
        "evict_rows: n_free is 1, expected 0..0",
        lambda m: m.evict_rows(i32(1), flags(1), i32(1), 1, i32(1), flags(1), 1, i64(0), i64(0), 1),
    ),
    "take_rows that are not there": (
        ValueError,
        "take_rows: most is 2, expected 0..1",
        lambda m: m.take_rows(i64(0, 1), 2, 0, i32(4), flags(4), i64(0, 0, 0), i64(0, 0, 0), 1),
    ),
    "take_rows of a pool that is smaller": (
        ValueError,
        "take_rows: n_free is 4, expected 0..3",
        lambda m: m.take_rows(i64(0, 1), 2, 0, i32(4), flags(4), i64(0, 0, 0), i64(0, 0, 0), 4),
    ),
    "take_rows out of order": (
        ValueError,
        "take_rows: ids is 0 at 1, expected more than 1",
        lambda m: m.take_rows(i64(1, 0), 1, 0, i32(4), flags(4), i64(0, 0, 0), i64(0, 0, 0), 1),
    ),
    "drop_rows beyond the pool": (
        ValueError,
        "drop_rows: row_of is 9 at 2, expected 0..2",
        lambda m: m.drop_rows(i64(2), np.array([0, 0, 9], np.int32), i64(0, 0, 0), i64(0, 0, 0), 0),
    ),
    "drop_rows into a full list": (
        ValueError,
        "drop_rows: n_free is 3, expected 0..2",
        lambda m: m.drop_rows(i64(0), i32(4), i64(0, 0, 0), i64(0, 0, 0), 3),
    ),
    "append_kv behind the end": (
        ValueError,
        "append_kv: position is 4, expected 0..3",
        lambda m: m.append_kv(f32(2, 1, 8), f32(2, 1, 8), f32(2, 1, 5, 8), 4),
    ),
    "append_kv of two lengths": (
        ValueError,
        "append_kv: v has shape (1, 1, 8), expected (2, 1, 8)",
        lambda m: m.append_kv(f32(2, 1, 8), f32(1, 1, 8), f32(2, 1, 5, 8), 0),
    ),
}
