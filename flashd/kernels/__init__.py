"""The math of the hot path: native verbs (``native/``) where they are installed, else NumPy twins.

All arrays are C-contiguous NumPy arrays; weights are float32, float16, or uint16 holding
bfloat16 bits; activations are float32. Contracts are written at the twins (``twin/``). A result
is bit-identical from run to run, for every number of threads and every batch size; it may differ in
the last bits between SIMD levels.
"""

from __future__ import annotations

import os

from flashd.errors import ConfigError
from flashd.kernels.cpus import default_threads as default_threads

try:
    import flashd.kernels._native as _verbs

    NATIVE = True
except ModuleNotFoundError:
    import flashd.kernels.twin as _verbs  # type: ignore[no-redef]  # the same verbs

    NATIVE = False

from flashd.kernels import twin as _twin

for _name in _twin.__all__:
    globals()[_name] = getattr(_verbs, _name, getattr(_twin, _name))

set_threads(min(default_threads(), 256))
if _level := os.environ.get("FLASHD_SIMD"):
    try:
        set_simd(_level)
    except ValueError as _exc:
        raise ConfigError(f"FLASHD_SIMD: {_exc}") from _exc
