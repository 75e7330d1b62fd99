"""The kernel verbs in NumPy: what the native module is tested against, and what runs without it.

Slow, but with the same promises: one sequence's result does not depend on the batch, on where a
row lies among other rows, or on how a call was cut into slices. BLAS keeps none of these (its
kernels treat the last rows differently), so dot products go through ``einsum``, which sums every
row in the same order. Prompts use it as well, though BLAS is several times faster: a token's bits
depend on neither the prompt's length nor its place.

The docstrings are the contract of the verbs, whoever computes them. What all have in common:

- Arrays are C-contiguous, aligned NumPy arrays. Weights are float32, float16, or uint16 holding
  bfloat16 bits; activations are float32. B counts sequences (1..16), T tokens (at least 1).
- A wrong dtype raises ``TypeError``, everything else that is wrong ``ValueError``, before anything
  is written (``check.py``).
- For a sum of n terms the error is at most ``1e-6 * sqrt(n)`` of the sum of the terms' magnitudes.
- NaN and infinity propagate.
- Outputs do not overlap inputs, except where a verb says that it works in place.
"""

from flashd.kernels.twin.attention import attention, rope
from flashd.kernels.twin.ffn import ffn_dots, ffn_down
from flashd.kernels.twin.level import available_simd, rest, set_simd, set_threads, simd_level, threads
from flashd.kernels.twin.linear import gemm, gemv
from flashd.kernels.twin.memory import append_kv, crc32c, from_f32, read_all, to_f32
from flashd.kernels.twin.norms import layernorm, rmsnorm
from flashd.kernels.twin.predict import predict, topk_union
from flashd.kernels.twin.window import drop_rows, evict_rows, find_rows, request_rows, take_rows

__all__ = [
    "append_kv",
    "attention",
    "available_simd",
    "crc32c",
    "drop_rows",
    "evict_rows",
    "ffn_dots",
    "ffn_down",
    "find_rows",
    "from_f32",
    "gemm",
    "gemv",
    "layernorm",
    "predict",
    "read_all",
    "request_rows",
    "rest",
    "rmsnorm",
    "rope",
    "set_simd",
    "set_threads",
    "simd_level",
    "take_rows",
    "threads",
    "to_f32",
    "topk_union",
]
