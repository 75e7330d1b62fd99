"""All cases, in the order of the table."""

from __future__ import annotations

from collections.abc import Iterator

from flashd.tools.bench.kernels.cases import (
    Attention,
    Case,
    Checksums,
    Convert,
    Gemv,
    Norm,
    Predict,
    ReadAll,
    Rope,
    TopK,
)
from flashd.tools.bench.kernels.ffn import FfnRows
from flashd.tools.bench.kernels.options import KernelOptions
from flashd.types import DTYPES

# A quick run has so many times fewer rows, positions and tokens.
_QUICK_TIMES = 8
# A prompt's kernels begin above 16 tokens.
_MIN_PROMPT_TOKENS = 32
_READ_BYTES = 64 << 20


def cases(options: KernelOptions) -> list[Case]:
    """The cases that were asked for."""
    times = _QUICK_TIMES if options.quick else 1
    return [case for case in _all(times) if options.wants(case.verb, case.dtype, case.batch)]


def read_bytes(quick: bool) -> int:
    """Bytes of one call of the yardstick."""
    return _READ_BYTES // (_QUICK_TIMES if quick else 1)


def _all(times: int) -> Iterator[Case]:
    tokens = max(256 // times, _MIN_PROMPT_TOKENS)
    yield ReadAll(_READ_BYTES // times)
    yield from _dense(times, tokens)
    yield from _ffn(times, tokens)
    for batch in (1, 4):
        yield Predict("f16", batch, 16384 // times, 4096, 128)
    for batch in (1, 4):
        yield TopK(batch, 16384 // times)
    yield from _attention(times, tokens)
    yield Norm("rmsnorm", tokens, 4096)
    yield Norm("layernorm", tokens, 4096)
    yield Rope(tokens, 32)
    yield Checksums(4096 // times, 8192)
    for verb in ("to_f32", "from_f32"):
        for dtype in ("f16", "bf16"):
            yield Convert(verb, dtype, (4 << 20) // times)


def _dense(times: int, tokens: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for n, k in ((8192, 2048), (4096, 4096)):
            for batch in (1, 4, 16):
                yield Gemv(dtype, batch, n // times, k)
    for dtype in DTYPES:
        yield Gemv(dtype, tokens, 2048 // times, 2048)


def _ffn(times: int, tokens: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for gated in (False, True):
            for share in (0.3, 1.0):
                for batch in (1, 4):
                    yield FfnRows(dtype, batch, 8192 // times, 2048, gated, share)
    for dtype in DTYPES:
        for gated in (False, True):
            yield FfnRows(dtype, tokens, 2048 // times, 2048, gated, 1.0)


def _attention(times: int, tokens: int) -> Iterator[Case]:
    for dtype in ("f32", "f16"):
        for kv_heads in (32, 8):
            yield Attention(dtype, 1, 32, kv_heads, 2048 // times)
    for dtype in ("f32", "f16"):
        for kv_heads in (32, 8):
            yield Attention(dtype, tokens, 32, kv_heads, tokens)
        # The chunk of a long prompt that comes after others.
        yield Attention(dtype, tokens, 32, 8, 2048 // times)
