"""Argument checks of the kernel verbs; ``native/arguments.cpp`` raises the same errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.types import NUMPY_DTYPE

MAX_BATCH = 16
MAX_THREADS = 256
BATCH = f"1..{MAX_BATCH}"
WEIGHT_DTYPES = ("float32", "float16", "uint16")
ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")


def array(
    verb: str,
    name: str,
    value: object,
    dtypes: tuple[str, ...],
    shape: tuple[int | str, ...] | None,
    *,
    writeable: bool = False,
) -> npt.NDArray[Any]:
    """Check one array argument and return it.

    Args:
        verb: the verb, for messages.
        name: the argument's name.
        value: what the caller passed.
        dtypes: NumPy names of the dtypes allowed.
        shape: per axis its length, or a letter for "any", or ``BATCH``; None: any shape.
        writeable: whether the verb writes into it.

    Raises:
        TypeError: no array, or the wrong dtype.
        ValueError: wrong shape, not C-contiguous, not aligned, or read-only.
    """
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{verb}: {name} is {type(value).__name__}, expected a NumPy array")
    if not any(value.dtype == np.dtype(dtype) for dtype in dtypes):
        raise TypeError(f"{verb}: {name} has dtype {value.dtype}, expected {' or '.join(dtypes)}")
    if shape is not None and not _fits(value.shape, shape):
        inner = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{verb}: {name} has shape {value.shape}, expected ({inner})")
    if not value.flags.c_contiguous:
        raise ValueError(f"{verb}: {name} is not C-contiguous; pass numpy.ascontiguousarray({name})")
    if not value.flags.aligned:
        raise ValueError(f"{verb}: {name} is not aligned to {value.itemsize} bytes; pass {name}.copy()")
    if writeable and not value.flags.writeable:
        raise ValueError(f"{verb}: {name} is read-only, expected a writeable array")
    return value


def _fits(got: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    if len(got) != len(expected):
        return False
    for length, rule in zip(got, expected, strict=True):
        if isinstance(rule, int):
            if length != rule:
                return False
        elif rule == BATCH and not 1 <= length <= MAX_BATCH:
            return False
    return True


def one_of(verb: str, name: str, value: str, known: tuple[str, ...]) -> None:
    """``ValueError`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"{verb}: {name} is '{value}', expected {' or '.join(known)}")


def neuron_rows(verb: str, rows: object, dtype: str, d: int, gated: bool) -> npt.NDArray[np.uint8]:
    """Check bundle rows ``uint8[n, stride]`` of ``[up | gate | down]``."""
    one_of(verb, "dtype", dtype, tuple(NUMPY_DTYPE))
    if d < 1:
        raise ValueError(f"{verb}: d is {d}, expected at least 1")
    checked = array(verb, "rows", rows, ("uint8",), ("n", "stride"))
    item_bytes = NUMPY_DTYPE[dtype].itemsize
    need_bytes = (3 if gated else 2) * d * item_bytes
    stride_bytes = checked.shape[1]
    if stride_bytes < need_bytes or stride_bytes % item_bytes:
        raise ValueError(
            f"{verb}: rows have a stride of {stride_bytes} bytes, expected at least {need_bytes} "
            f"and a multiple of {item_bytes}"
        )
    if checked.ctypes.data % item_bytes:
        raise ValueError(f"{verb}: rows is not aligned to {item_bytes} bytes; pass rows.copy()")
    return checked


def thread_count(count: int) -> None:
    """``ValueError`` unless ``count`` is a number of threads the pool can have."""
    if not 1 <= count <= MAX_THREADS:
        raise ValueError(f"set_threads: n is {count}, expected 1..{MAX_THREADS}")
