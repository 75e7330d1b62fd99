"""What ``flashd bench token`` found: a row for each mode, the median round of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from flashd.tools.bench.token.modes import HYBRID, MODES, NAIVE
from flashd.tools.bench.token.options import Sample

# The footprint may be so much more than the budget: scratch of prompts, tables, and what huge pages round up.
_SLACK_BYTES = 64 << 20
_SLACK_SHARE = 0.02


@dataclass(frozen=True)
class TokenRow:
    """A mode, of the round whose time per token is the median. Times are ms per token, GB are 1e9 bytes.

    Attributes:
        mode: see ``modes.MODES``.
        ms_per_token: the sum of flash wait, memory, compute and overhead.
        flash_wait_ms: nothing was computed because reads were started or missing.
        flash_busy_ms: at least one read was outstanding; runs beside the others.
        memory_ms: upkeep of window and KV cache.
        compute_ms: kernels.
        overhead_ms: the rest: event loop, changes of thread, planning.
        gb_read_per_token: from devices.
        gb_per_s: while the flash was busy.
        ram_gb: the most resident memory of the process, all of it.
        footprint_gb: the most of its own memory, less interpreter, libraries and KV cache: what the budget
            is for, and scratch.
        hit_ratio: requested rows that were in RAM or on their way; None without masks.
        overlap: time per token over that of the free run: the same reads and kernels, concurrent and
            without dependencies. The median of all turns of all rounds; None if it was not made.
        free_run_ms: the free run's, in this round.
        amplification: bytes read for each that was needed.
        reads_per_token: of the device.
        requested_rows: per token; None without masks.
        speedup_naive, speedup_hybrid: how many times faster; None if not measured.
        flash_busy_vs_hybrid: how many times less the flash is busy than with hybrid; likewise.
        within_budget: whether ``footprint_gb`` is at most 64 MiB and 2 % more than the budget.
        prefill_s: of the prompt.
        rounds_ms: time per token of each round.
    """

    mode: str
    ms_per_token: float
    flash_wait_ms: float
    flash_busy_ms: float
    memory_ms: float
    compute_ms: float
    overhead_ms: float
    gb_read_per_token: float
    gb_per_s: float
    ram_gb: float
    footprint_gb: float
    hit_ratio: float | None
    overlap: float | None
    free_run_ms: float | None
    amplification: float
    reads_per_token: float
    requested_rows: float | None
    speedup_naive: float | None
    speedup_hybrid: float | None
    flash_busy_vs_hybrid: float | None
    within_budget: bool
    prefill_s: float
    rounds_ms: list[float]


@dataclass(frozen=True)
class TokenReport:
    """All rows, and what they were measured on. ``dataclasses.asdict`` makes JSON of it.

    Attributes:
        rows: in the table's order.
        directory: the bundle.
        model: for people; says whether its weights are synthetic.
        synthetic: whether they are.
        budget: as given.
        budget_bytes: what that is.
        enforced: how the budget was enforced.
        device: disk and kernel.
        prompt_tokens, tokens, dense_tokens, rounds: of the run.
        notes: what one should know.
    """

    rows: list[TokenRow]
    directory: str
    model: str
    synthetic: bool
    budget: str
    budget_bytes: int
    enforced: str
    device: dict[str, str]
    prompt_tokens: int
    tokens: int
    dense_tokens: int
    rounds: int
    notes: list[str] = field(default_factory=list)

    def title(self) -> str:
        """One line above table and plot."""
        return f"{self.model}, budget {self.budget} ({self.budget_bytes / 1e9:.2f} GB)"


def token_rows(samples: Mapping[str, Sequence[Sample]], budget_bytes: int) -> list[TokenRow]:
    """A row for each mode that was measured, in the table's order."""
    chosen = {name: median_sample(samples[name]) for name in MODES if samples.get(name)}
    return [
        _row(name, sample, samples[name], chosen.get(NAIVE), chosen.get(HYBRID), budget_bytes)
        for name, sample in chosen.items()
    ]


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The round with the median time per token, the faster one of two: a round's figures belong together."""
    ordered = sorted(samples, key=lambda sample: sample.ms_per_token)
    return ordered[(len(ordered) - 1) // 2]


def _row(
    name: str,
    sample: Sample,
    rounds: Sequence[Sample],
    naive: Sample | None,
    hybrid: Sample | None,
    budget_bytes: int,
) -> TokenRow:
    busy_ms = sample.flash_busy_ms
    footprint = max(one.footprint_bytes - one.kv_bytes for one in rounds)
    overlaps = [overlap for one in rounds for overlap in one.overlaps]
    needed = sample.needed_bytes_per_token
    return TokenRow(
        mode=name,
        ms_per_token=sample.ms_per_token,
        flash_wait_ms=sample.flash_wait_ms,
        flash_busy_ms=busy_ms,
        memory_ms=sample.memory_ms,
        compute_ms=sample.compute_ms,
        overhead_ms=sample.overhead_ms,
        gb_read_per_token=sample.bytes_per_token / 1e9,
        gb_per_s=sample.bytes_per_token / 1e6 / busy_ms if busy_ms else 0.0,
        ram_gb=max(one.peak_bytes for one in rounds) / 1e9,
        footprint_gb=footprint / 1e9,
        hit_ratio=sample.hits / sample.requested if sample.requested else None,
        overlap=median(overlaps) if overlaps else None,
        free_run_ms=sample.free_ms or None,
        amplification=sample.engine_bytes_per_token / needed if needed else 1.0,
        reads_per_token=sample.reads_per_token,
        requested_rows=sample.requested or None,
        speedup_naive=_ratio(naive, sample, "ms_per_token"),
        speedup_hybrid=_ratio(hybrid, sample, "ms_per_token"),
        flash_busy_vs_hybrid=_ratio(hybrid, sample, "flash_busy_ms"),
        within_budget=footprint <= budget_bytes * (1 + _SLACK_SHARE) + _SLACK_BYTES,
        prefill_s=sample.prefill_s,
        rounds_ms=[one.ms_per_token for one in rounds],
    )


def _ratio(base: Sample | None, sample: Sample, what: str) -> float | None:
    value = float(getattr(sample, what))
    return float(getattr(base, what)) / value if base is not None and value else None
