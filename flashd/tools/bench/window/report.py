"""What ``flashd bench window`` found: a row for each budget, measured beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from flashd.tools.bench.token.options import Sample
from flashd.tools.bench.token.report import median_sample
from flashd.tools.plan.report import PlanRow


@dataclass(frozen=True)
class WindowRow:
    """A budget. Times are ms per token, of the round with the median time; what is predicted, of that round's
    plan.

    Attributes:
        budget: share of all weights.
        budget_bytes: what that is.
        k: steps whose requests stay in RAM.
        window_share: of all neurons of masked layers, those that have room.
        resident_layers: layers without a mask in RAM.
        ms_per_token: measured.
        flash_wait_ms, flash_busy_ms, memory_ms, compute_ms, overhead_ms: of it, as ``bench token`` has them.
        gb_read_per_token: likewise.
        found_share: requested rows that were in RAM or on their way; None without masks.
        rounds_ms: time per token of each round.
        predicted_ms: by the plan made right before it.
        predicted_rounds_ms: by each round's plan.
        predicted: that round's plan.
        ratio: median of the rounds' predicted / measured.
    """

    budget: str
    budget_bytes: int
    k: int
    window_share: float
    resident_layers: int
    ms_per_token: float
    flash_wait_ms: float
    flash_busy_ms: float
    memory_ms: float
    compute_ms: float
    overhead_ms: float
    gb_read_per_token: float
    found_share: float | None
    rounds_ms: list[float]
    predicted_ms: float
    predicted_rounds_ms: list[float]
    predicted: PlanRow
    ratio: float


@dataclass(frozen=True)
class WindowReport:
    """All budgets, and what they were measured on. ``dataclasses.asdict`` makes JSON of it.

    Attributes:
        rows: by budget.
        directory: the bundle.
        model: for people; says whether its weights are synthetic.
        synthetic: whether they are.
        mode: of ``bench token``.
        enforced: how budgets were enforced.
        device: disk and kernel.
        prompt_tokens, tokens, rounds: of the run.
        notes: budgets that are too small, and what else one should know.
    """

    rows: list[WindowRow]
    directory: str
    model: str
    synthetic: bool
    mode: str
    enforced: str
    device: dict[str, str]
    prompt_tokens: int
    tokens: int
    rounds: int
    notes: list[str] = field(default_factory=list)

    def title(self) -> str:
        """One line above table and plot."""
        return f"{self.model}, {self.mode}"


def window_row(samples: Sequence[Sample], plans: Sequence[PlanRow]) -> WindowRow:
    """A budget's row.

    Args:
        samples: its rounds.
        plans: what was predicted right before each.
    """
    sample = median_sample(samples)
    plan = plans[samples.index(sample)]
    pairs = zip(plans, samples, strict=True)
    return WindowRow(
        budget=plan.memory,
        budget_bytes=plan.weights_bytes,
        k=plan.k,
        window_share=plan.window_share,
        resident_layers=plan.resident_layers,
        ms_per_token=sample.ms_per_token,
        flash_wait_ms=sample.flash_wait_ms,
        flash_busy_ms=sample.flash_busy_ms,
        memory_ms=sample.memory_ms,
        compute_ms=sample.compute_ms,
        overhead_ms=sample.overhead_ms,
        gb_read_per_token=sample.bytes_per_token / 1e9,
        found_share=sample.hits / sample.requested if sample.requested else None,
        rounds_ms=[one.ms_per_token for one in samples],
        predicted_ms=plan.ms_per_token,
        predicted_rounds_ms=[one.ms_per_token for one in plans],
        predicted=plan,
        ratio=median(one.ms_per_token / other.ms_per_token for one, other in pairs),
    )
