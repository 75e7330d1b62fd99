"""Argument checks of the kernel verbs; the native verbs raise the same errors."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.config import MAX_BATCH, MAX_THREADS
from flashd.types import NUMPY_DTYPE

BATCH = f"1..{MAX_BATCH}"
TOKENS = "1.."  # as many as a prompt has
# Arrays of no bytes may claim any shape, and loops over it never end.
_MAX_EMPTY = 1 << 24
_MOST = {BATCH: MAX_BATCH, TOKENS: sys.maxsize}
F32 = ("float32",)
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
        shape: per axis its length, or a letter for "any", ``BATCH`` or ``TOKENS``; None: any shape.
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
    if not value.size and math.prod(filter(None, value.shape)) > _MAX_EMPTY:
        raise ValueError(
            f"{verb}: {name} has shape {value.shape}, expected at most {_MAX_EMPTY} rows of nothing"
        )
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
        elif rule in _MOST and not 1 <= length <= _MOST[rule]:
            return False
    return True


def optional(
    verb: str,
    name: str,
    value: object,
    dtypes: tuple[str, ...],
    shape: tuple[int | str, ...],
    *,
    writeable: bool = False,
) -> None:
    """Like ``array``, and None is right too."""
    if value is not None:
        array(verb, name, value, dtypes, shape, writeable=writeable)


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


def index(verb: str, value: object, n: int) -> int:
    """Check a list of row numbers ``int64[m]`` and return m; None lists all ``n`` rows.

    Raises:
        TypeError, ValueError: as ``array`` says.
        ValueError: a number outside 0..n-1.
    """
    if value is None:
        return n
    numbers = array(verb, "index", value, ("int64",), ("m",))
    below(verb, "index", numbers, n)
    return len(numbers)


def below(verb: str, name: str, numbers: npt.NDArray[np.int64], limit: int) -> None:
    """``ValueError`` unless each lies in 0..limit-1."""
    if (wrong := np.flatnonzero((numbers < 0) | (numbers >= limit))).size:
        at = wrong[0]
        raise ValueError(f"{verb}: {name} is {numbers[at]} at {at}, expected 0..{limit - 1}")


def ascending(verb: str, name: str, numbers: npt.NDArray[np.int64], limit: int) -> None:
    """``ValueError`` unless each lies in 0..limit-1 and above the one before."""
    outside = (numbers < 0) | (numbers >= limit)
    descends = np.zeros(len(numbers), np.bool_)
    descends[1:] = numbers[1:] <= numbers[:-1]
    if (wrong := np.flatnonzero(outside | descends)).size:
        at = wrong[0]
        expected = f"0..{limit - 1}" if outside[at] else f"more than {numbers[at - 1]}"
        raise ValueError(f"{verb}: {name} is {numbers[at]} at {at}, expected {expected}")


def threshold(verb: str, value: float) -> np.float32:
    """The float32 below which activations count as 0; ``ValueError`` unless 0 <= value < infinity."""
    rounded = _f32(value)
    if not (math.isfinite(rounded) and value >= 0):
        raise ValueError(f"{verb}: threshold is {float(value)!r}, expected a finite float32 of at least 0")
    return rounded


def number(verb: str, name: str, value: float) -> np.float32:
    """``value`` as float32; ``ValueError`` if it is NaN."""
    if math.isnan(value):
        raise ValueError(f"{verb}: {name} is nan, expected a number")
    return _f32(value)


def _f32(value: float) -> np.float32:
    with np.errstate(over="ignore"):  # too large becomes infinite
        return np.float32(value)


def within(verb: str, name: str, value: int, least: int, most: int) -> None:
    """``ValueError`` unless ``least <= value <= most``."""
    if not least <= value <= most:
        raise ValueError(f"{verb}: {name} is {value}, expected {least}..{most}")


def thread_count(count: int) -> None:
    """``ValueError`` unless ``count`` is a number of threads the pool can have."""
    within("set_threads", "n", count, 1, MAX_THREADS)
