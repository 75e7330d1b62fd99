"""The math of the hot path: native verbs (``native/``) where they are installed, else NumPy twins.

All arrays are C-contiguous NumPy arrays; weights are float32, float16, or uint16 holding
bfloat16 bits; activations are float32. Contracts are written at the twins (``twin.py``). A result
is bit-identical from run to run, for every number of threads and every batch size; it may differ in
the last bits between SIMD levels.
"""

from __future__ import annotations

import os

from flashd.errors import ConfigError
from flashd.kernels.check import MAX_THREADS
from flashd.kernels.cpus import default_threads

try:
    from flashd.kernels._native import (
        attention,
        available_simd,
        crc32c,
        ffn_dots,
        ffn_down,
        from_f32,
        gemv,
        set_simd,
        set_threads,
        simd_level,
        threads,
        to_f32,
    )

    NATIVE = True
except ModuleNotFoundError:
    from flashd.kernels.twin import (
        attention,
        available_simd,
        crc32c,
        ffn_dots,
        ffn_down,
        from_f32,
        gemv,
        set_simd,
        set_threads,
        simd_level,
        threads,
        to_f32,
    )

    NATIVE = False

__all__ = [
    "MAX_THREADS",
    "NATIVE",
    "attention",
    "available_simd",
    "crc32c",
    "default_threads",
    "ffn_dots",
    "ffn_down",
    "from_f32",
    "gemv",
    "set_simd",
    "set_threads",
    "simd_level",
    "threads",
    "to_f32",
]

set_threads(min(default_threads(), MAX_THREADS))
if _level := os.environ.get("FLASHD_SIMD"):
    try:
        set_simd(_level)
    except ValueError as _exc:
        raise ConfigError(f"FLASHD_SIMD: {_exc}") from _exc
