"""What ``flashd bench kernels`` reports. ``dataclasses.asdict`` makes JSON of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelRow:
    """One case: a verb on weights of one type and shape.

    Ratios are medians of the rounds' own ratios: whatever disturbed one round is in both of its figures.

    Attributes:
        verb: one of ``VERBS``.
        dtype: of what is read: ``f32``, ``f16``, ``bf16``, or ``u8`` for bytes.
        batch: sequences, or tokens of a prompt; None where there are none.
        shape: in words, e.g. ``8192x2048 gated 30%``.
        compute_bound: whether arithmetic is the limit, a prompt's tokens; no ``dram_ratio`` then.
        bytes: that one call has to read once: weights (of ``ffn_rows`` the listed rows' up and gate and the
            fired rows' down), keys and values of ``length``, or the source. Results are not counted.
            Mean over the memory that was cycled through.
        median_ms: of one call.
        gb_per_s: median, 1e9 bytes a second.
        dram_gb_per_s: median of what reading plain memory gave in the same rounds.
        dram_ratio: ``gb_per_s / dram_gb_per_s``; None if compute-bound.
        torch_gb_per_s: torch in its fastest way, the same bytes divided by its time; None without it.
        torch_ratio: how many times as fast as torch; None without it.
        gflops: 1e9 floating-point operations a second, a multiplication and an addition being two; None
            where they are not what a verb is about. Rows of ``ffn_rows`` that did not fire are none.
        sgemm_gflops: the better of NumPy's and torch's float32 matrix product ``KernelReport.sgemm_shape`` in
            the same rounds, its operands in the caches; None below a batch of 16.
        peak_ratio: ``gflops / sgemm_gflops``, or None.
        rounds_gb_per_s, rounds_dram_gb_per_s, rounds_torch_gb_per_s, rounds_sgemm_gflops: of each round.
    """

    verb: str
    dtype: str
    batch: int | None
    shape: str
    compute_bound: bool
    bytes: int
    median_ms: float
    gb_per_s: float
    dram_gb_per_s: float
    dram_ratio: float | None
    torch_gb_per_s: float | None
    torch_ratio: float | None
    gflops: float | None
    sgemm_gflops: float | None
    peak_ratio: float | None
    rounds_gb_per_s: list[float]
    rounds_dram_gb_per_s: list[float]
    rounds_torch_gb_per_s: list[float]
    rounds_sgemm_gflops: list[float]


@dataclass(frozen=True)
class KernelReport:
    """The result of ``flashd bench kernels``.

    Attributes:
        dram_gb_per_s: median of all rounds of all cases: ``read_all`` over cold memory with all threads.
        sgemm_gflops: the same of the float32 matrix product; None without a batch of 16 or more.
        sgemm_shape: ``[m, k, n]`` of that product, ``[m, k]`` by ``[k, n]``: ``[512, 2048, 2048]``, less if
            quick. Its operands are in the caches; the better of NumPy and torch counts.
        other_cpus: how many of the usable CPUs other programs kept busy meanwhile; None if unknown.
        rows: see ``KernelRow``.
        simd: the level in use.
        native: False for the NumPy twins.
        threads: of the kernels and of torch.
        cpu: what the CPU calls itself.
        torch: its version; None if it took no part.
        memory_bytes: how much memory was cycled through.
        l3_bytes: of the L3 caches, as the kernel reports them; None if unknown.
        rounds: how many the medians are of.
        quick: whether the figures are too short to quote.
        notes: what was left out, and why.
    """

    dram_gb_per_s: float
    sgemm_gflops: float | None
    sgemm_shape: tuple[int, int, int]
    other_cpus: float | None
    rows: list[KernelRow]
    simd: str
    native: bool
    threads: int
    cpu: str
    torch: str | None
    memory_bytes: int
    l3_bytes: int | None
    rounds: int
    quick: bool
    notes: list[str]
