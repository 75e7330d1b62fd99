from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.types import (
    Activation,
    DType,
    F32Array,
    I32Array,
    I64Array,
    U8Array,
    U32Array,
    WeightArray,
)

def gemv(w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None = None) -> None: ...
def gemm(w: WeightArray, x: F32Array, out: F32Array, bias: F32Array | None = None) -> None: ...
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
    mask: npt.NDArray[np.bool_] | None = None,
    threshold: float = 0.0,
) -> I64Array: ...
def ffn_down(
    rows: U8Array,
    dtype: DType,
    d: int,
    gated: bool,
    h: F32Array,
    acc: F32Array,
    index: I64Array | None = None,
) -> None: ...
def predict(
    w1: WeightArray,
    w2: WeightArray,
    x: F32Array,
    threshold: float,
    b1: F32Array | None = None,
    b2: F32Array | None = None,
    scores: F32Array | None = None,
) -> tuple[I64Array, npt.NDArray[np.bool_]]: ...
def topk_union(scores: F32Array, k: int) -> tuple[I64Array, npt.NDArray[np.bool_]]: ...
def attention(
    q: F32Array, k: npt.NDArray[Any], v: npt.NDArray[Any], length: int, scale: float, out: F32Array
) -> None: ...
def rope(x: F32Array, cos: F32Array, sin: F32Array) -> None: ...
def rmsnorm(x: F32Array, weight: F32Array, eps: float, out: F32Array) -> None: ...
def layernorm(x: F32Array, weight: F32Array, bias: F32Array | None, eps: float, out: F32Array) -> None: ...
def crc32c(rows: U8Array, out: U32Array, index: I64Array | None = None) -> None: ...
def to_f32(src: WeightArray, out: F32Array) -> None: ...
def from_f32(src: F32Array, out: WeightArray) -> None: ...
def find_rows(
    ids: I64Array, row_of: I32Array, in_flight: npt.NDArray[np.bool_]
) -> tuple[I64Array, I64Array, I64Array, I64Array]: ...
def take_rows(
    ids: I64Array,
    most: int,
    first: int,
    row_of: I32Array,
    in_flight: npt.NDArray[np.bool_],
    owner: I64Array,
    free: I64Array,
    n_free: int,
    guessed: npt.NDArray[np.bool_] | None = None,
) -> tuple[I64Array, I64Array]: ...
def drop_rows(ids: I64Array, row_of: I32Array, owner: I64Array, free: I64Array, n_free: int) -> None: ...
def evict_rows(
    row_of: I32Array,
    in_flight: npt.NDArray[np.bool_],
    last: I32Array,
    step: int,
    value: F32Array | I32Array,
    guessed: npt.NDArray[np.bool_],
    k: int,
    owner: I64Array,
    free: I64Array,
    n_free: int,
) -> tuple[int, int]: ...
def append_kv(k: F32Array, v: F32Array, out: npt.NDArray[Any], position: int) -> None: ...
def request_rows(
    ids: I64Array,
    step: int,
    last: I32Array,
    guessed: npt.NDArray[np.bool_],
    row_of: I32Array,
    in_flight: npt.NDArray[np.bool_],
    count: F32Array | None = None,
    credit: float = 0.0,
) -> tuple[int, I64Array, I64Array, I64Array, I64Array]: ...
def read_all(memory: U8Array) -> int: ...
def set_threads(n: int) -> None: ...
def threads() -> int: ...
def rest() -> None: ...
def simd_level() -> str: ...
def available_simd() -> tuple[str, ...]: ...
def set_simd(level: str) -> None: ...
