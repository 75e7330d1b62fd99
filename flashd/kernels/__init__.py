"""The math of the hot path: native verbs (``native/``) where they are installed, else NumPy twins.

All arrays are C-contiguous NumPy arrays; weights are float32, float16, or uint16 holding
bfloat16 bits; activations are float32. Contracts are written at the twins (``twin/``). A result
is bit-identical from run to run, for every number of threads and every batch of up to 16 sequences; a
prompt's tokens (more than 16) have bits of their own, and SIMD levels may differ in the last bits.
"""

from __future__ import annotations

import os

from flashd.config import MAX_THREADS as MAX_THREADS
from flashd.errors import ConfigError
from flashd.kernels.cpus import default_threads as default_threads

try:
    import flashd.kernels._native as _verbs

    NATIVE = True
except ModuleNotFoundError:
    import flashd.kernels.twin as _verbs  # type: ignore[no-redef]  # the same verbs

    NATIVE = False

append_kv = _verbs.append_kv
attention = _verbs.attention
available_simd = _verbs.available_simd
crc32c = _verbs.crc32c
drop_rows = _verbs.drop_rows
evict_rows = _verbs.evict_rows
ffn_dots = _verbs.ffn_dots
ffn_down = _verbs.ffn_down
find_rows = _verbs.find_rows
from_f32 = _verbs.from_f32
gemm = _verbs.gemm
gemv = _verbs.gemv
layernorm = _verbs.layernorm
predict = _verbs.predict
read_all = _verbs.read_all
request_rows = _verbs.request_rows
rest = _verbs.rest
rmsnorm = _verbs.rmsnorm
rope = _verbs.rope
set_simd = _verbs.set_simd
set_threads = _verbs.set_threads
simd_level = _verbs.simd_level
take_rows = _verbs.take_rows
threads = _verbs.threads
to_f32 = _verbs.to_f32
topk_union = _verbs.topk_union

set_threads(min(default_threads(), MAX_THREADS))
if _level := os.environ.get("FLASHD_SIMD"):
    try:
        set_simd(_level)
    except ValueError as _exc:
        raise ConfigError(f"FLASHD_SIMD: {_exc}") from _exc
