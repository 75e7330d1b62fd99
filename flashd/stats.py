"""Plain counters that the rooms keep; only ``metrics/`` knows Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# vLLM's buckets, prolonged: a first token from a slow disk may take minutes.
TTFT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0,
    10.0, 30.0,
)  # fmt: skip
E2E_BUCKETS_S = (
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0,
)  # fmt: skip


@dataclass
class Histogram:
    """Bucket counts in the units of ``bounds``; the last count is everything above."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class ReadStats:
    """What a read engine did.

    Attributes:
        reads: reads that the kernel was asked for and answered, continuations and retries included.
        bytes_read: bytes that it delivered, those for alignment and those skipped included.
        scratch_reads: reads that went through scratch memory, because they were not aligned.
        registered_reads: reads into registered memory.
        continued: reads that came short and went on.
        retried: reads that failed with EIO and were tried again.
        dropped: reads of cancelled or failed batches that never reached the kernel.
    """

    reads: int = 0
    bytes_read: int = 0
    scratch_reads: int = 0
    registered_reads: int = 0
    continued: int = 0
    retried: int = 0
    dropped: int = 0

    def add(self, other: ReadStats) -> None:
        """Count what another one counted, too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class CheckStats:
    """What comparing rows with their checksums has found.

    Attributes:
        rows: delivered by reads, those done again included, checked or not.
        checked_rows: compared with their checksum, likewise.
        mismatched_rows: that differed, likewise.
        rereads: reads done again because of that.
        check_ns: CPU time spent.
    """

    rows: int = 0
    checked_rows: int = 0
    mismatched_rows: int = 0
    rereads: int = 0
    check_ns: int = 0


@dataclass
class StoreStats:
    """What a metered weight store has read.

    Attributes:
        calls: of the store, however many reads of the device each was.
        bytes_delivered: rows that calls were answered with.
        errors: calls that failed.
        busy_ns: time with at least one call outstanding, not the sum over calls.
        device: reads that the calls so far were made of.
        checks: of checksums; all zero where nothing is checked.
    """

    calls: int = 0
    bytes_delivered: int = 0
    errors: int = 0
    busy_ns: int = 0
    device: ReadStats = field(default_factory=ReadStats)
    checks: CheckStats = field(default_factory=CheckStats)


@dataclass
class StreamStats:
    """What the streaming scheduler saw: time its consumer waited for flash, slices computed, and how many of
    these were read in part."""

    wait_ns: int = 0
    slices: int = 0
    partial_slices: int = 0


@dataclass
class SparseStats:
    """What the sparse FFN saw while decoding. A row is a neuron of a layer, at one step for all sequences.

    Attributes:
        passes: steps.
        requested: rows that predictors asked for.
        resident: of these, rows that were in RAM or on their way when they were asked for.
        demand: rows read because they were not there.
        prefetched: rows read ahead on a guess.
        prefetched_used: of these, rows that were asked for later.
        fired: rows whose activation was not zero.
        evicted: rows that gave up their place.
        extra_rounds: times that a layer did not fit into RAM at once.
        failed_reads: batches of rows that could not be read.
        window_rows: rows in RAM now.
        prefetch_layers: layers that are read ahead now.
    """

    passes: int = 0
    requested: int = 0
    resident: int = 0
    demand: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    fired: int = 0
    evicted: int = 0
    extra_rounds: int = 0
    failed_reads: int = 0
    window_rows: int = 0
    prefetch_layers: int = 0


@dataclass
class LaneStats:
    """Time the compute lane spent in kernels and in moving rows about (window and KV upkeep).

    ``attention_ns`` is the part of ``compute_ns`` that grows with the KV cache.
    """

    compute_ns: int = 0
    memory_ns: int = 0
    attention_ns: int = 0


@dataclass
class CostHistograms:
    """The costs of a step (LLM in a flash, section 4): step = flash_wait + memory + compute +
    overhead; flash_busy runs beside them."""

    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    flash_wait_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    flash_busy_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    memory_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    compute_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    overhead_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))


PHASES = ("prefill", "decode")
FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass
class EngineStats:
    """Totals of the engine since its start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    finished: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FINISH_REASONS, 0)))
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    e2e_latency_s: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    costs: dict[str, CostHistograms] = field(
        default_factory=lambda: {phase: CostHistograms() for phase in PHASES}
    )


# Direction and reason: others take memory, there is room again, sequences need KV caches.
MEMORY_CHANGES = (("shrink", "pressure"), ("shrink", "sequences"), ("grow", "room"))


@dataclass
class MemoryStats:
    """What the governor sees and does; bytes now, and counts since the start.

    Attributes:
        available_bytes: how much more the process can take.
        footprint_bytes: its own memory.
        limit_bytes: what it may take in all.
        reserve_bytes: what is left to others.
        weights_bytes: what weights, predictors, buffers, layers and rows may take.
        window_bytes: pages of the window.
        kv_promised_bytes: KV caches of the running sequences with all tokens that they may still take.
        kv_counted_bytes: of these, what is set aside.
        stalled: share of time that somebody waited for memory.
        k: steps whose requests fit into the window.
        window_capacity: its rows.
        dense_layers: layers without a mask in RAM.
        admission_paused: whether a request waits for memory.
        wake_ups: looks that did not wait their time.
        k_changes: changes of ``k``.
        changes: of what weights may take, by direction and reason.
    """

    available_bytes: int = 0
    footprint_bytes: int = 0
    limit_bytes: int = 0
    reserve_bytes: int = 0
    weights_bytes: int = 0
    window_bytes: int = 0
    kv_promised_bytes: int = 0
    kv_counted_bytes: int = 0
    stalled: float = 0.0
    k: int = 0
    window_capacity: int = 0
    dense_layers: int = 0
    admission_paused: bool = False
    wake_ups: int = 0
    k_changes: int = 0
    changes: Counter[tuple[str, str]] = field(
        default_factory=lambda: Counter(dict.fromkeys(MEMORY_CHANGES, 0))
    )


@dataclass
class ServerStats:
    """What the HTTP side saw."""

    rejected: Counter[str] = field(default_factory=Counter)  # by error code
    cancelled: int = 0
