"""What the columns of ``flashd bench kernels`` are, for its table and for ``--help``."""

from __future__ import annotations

from collections.abc import Collection

# Verbs, an example of their SHAPE, and what it says.
SHAPES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("read_all",), "64 MiB", "memory, against itself: how far figures vary"),
    (("gemv", "gemm"), "8192x2048", "n x k of weights"),
    (("ffn_rows",), "8192x2048 relu 30%", "neurons x width, relu or gated, neurons listed"),
    (("predict",), "16384x128x4096", "neurons x rank x width"),
    (("topk_union",), "1638 of 16384", "k of scores"),
    (("attention",), "32/8x128 of 2048", "query heads / KV heads x head width of cached positions"),
    (("rmsnorm", "layernorm"), "256x4096", "tokens x width"),
    (("rope",), "32x128", "heads x head width"),
    (("crc32c",), "4096x8192", "rows x bytes"),
    (("to_f32", "from_f32"), "4194304", "elements"),
)
BATCH = "sequences with a token each; above 16, and of norms and rope, tokens of a prompt"
HOT = "operands hot in the caches"

HELP = f"""Measure every kernel beside the machine's memory, and beside torch where it is installed.

GB/s counts what a call must read once, 1e9 bytes to the GB: weights (of ffn_rows, which is ffn_dots and
ffn_down in turn, up and gate of the rows listed and down of those that fire; "gated" rows use SiLU, the
others ReLU), keys and values, or the source of a conversion. Results are not counted. All of it lies in
cold memory in huge pages: 512 MiB or four times the L3 cache are cycled through, at most 2 GiB and a
quarter of what is available.

/DRAM is the share of the speed at which all threads read plain memory. GFLOP/s counts a multiplication and
an addition as two, and nothing of neurons that did not fire. /SGEMM is the share of a float32 matrix
product [512,2048] x [2048,2048], {HOT}, best of NumPy and torch, from a batch of 16 on: there
arithmetic is the limit. xTORCH is how many times as fast as torch the same work is done, by whichever is its
fastest way: for several tokens it may convert f16 and bf16 weights to float32 in each call. ffn_rows 100% is
beside dense layers, which cannot skip neurons that did not fire. All take turns in every round; figures are
medians.

BATCH: {BATCH}. SHAPE:

\b
{chr(10).join(f"  {', '.join(verbs)}, e.g. {example}:{chr(10)}    {text}" for verbs, example, text in SHAPES)}

--json has dram_gb_per_s, sgemm_gflops (of a product of sgemm_shape [m,k,n]), other_cpus (how many CPUs other
programs used meanwhile), simd, native, threads, cpu, torch (its version), memory_bytes (cycled through),
l3_bytes, rounds, quick, notes and rows. A row has verb, dtype, batch, shape, compute_bound, bytes (counted),
median_ms (of a call), gb_per_s, dram_gb_per_s and dram_ratio (/DRAM), torch_gb_per_s and torch_ratio
(xTORCH), gflops, sgemm_gflops and peak_ratio (/SGEMM), and each round's figures: rounds_gb_per_s,
rounds_dram_gb_per_s, rounds_torch_gb_per_s, rounds_sgemm_gflops.

FLASHD_SIMD=avx512, avx2, neon or portable chooses the SIMD level. Don't use the machine meanwhile.
"""


def shapes(verbs: Collection[str]) -> str:
    """``gemv: n x k of weights; predict: ...`` of the verbs that were measured."""
    parts = []
    for names, _, text in SHAPES:
        here = [name for name in names if name in verbs]
        parts += [f"{', '.join(here)}: {text}"] if here else []
    return "; ".join(parts)
