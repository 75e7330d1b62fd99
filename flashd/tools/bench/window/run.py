"""``flashd bench window``: time per token over budgets (LLM in a flash, figure 7), measured and predicted.

Budgets take turns within every round, each in a process and a cgroup of its own, and the plan for a budget is
made anew right before it, so that whatever else the machine is busy with meets both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.kv.contiguous import kv_bytes_per_token
from flashd.store.open import open_manifest
from flashd.store.predictors import read_calibration
from flashd.tools.bench.child import sigterm_unwinds
from flashd.tools.bench.subjects import open_source, warm
from flashd.tools.bench.token.limit import memory_group
from flashd.tools.bench.token.modes import HYBRID, MODES, Mode
from flashd.tools.bench.token.options import Sample, TokenOptions
from flashd.tools.bench.token.run import PROCESS_BYTES, device_facts, model_title, run_task, task_of
from flashd.tools.bench.window.report import WindowReport, window_row
from flashd.tools.plan import PlanReport, PlanRow, plan

BUDGETS_PERCENT = (30, 40, 50, 60, 70, 80, 90)
_WHOLE_METHOD = "+prefetch"

# Told the phase, bytes done and bytes in all; or tasks done and tasks in all.
ByteProgress = Callable[[str, int, int], None]
TaskProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class WindowOptions:
    """What to measure.

    Attributes:
        budgets_percent: shares of all weights.
        rounds: how often; the median counts.
        tokens: measured in each round; of a model without masks a quarter of them.
        warmup_tokens: before them, so that the window is as it will stay.
        prompt_tokens: before the first generated token.
        backend: how files are read.
        threads: of the kernels; 0: all CPUs.

    Raises:
        ConfigError: a value out of range.
    """

    budgets_percent: tuple[int, ...] = BUDGETS_PERCENT
    rounds: int = 3
    tokens: int = 48
    warmup_tokens: int = 32
    prompt_tokens: int = 128
    backend: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        if not self.budgets_percent or not all(1 <= share <= 1000 for share in self.budgets_percent):
            given = ",".join(map(str, self.budgets_percent))
            raise ConfigError(f"budgets are {given!r}, expected shares of all weights such as 50,60,70")
        self.of("50%")  # the rest is checked there

    def of(self, budget: str) -> TokenOptions:
        """Those of ``bench token`` for one budget."""
        return TokenOptions(
            budget=budget,
            rounds=self.rounds,
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            warmup_tokens=self.warmup_tokens,
            dense_tokens=max(1, self.tokens // 4),
            free_steps=0,
            backend=self.backend,
            threads=self.threads,
        )


def bench_window(
    directory: Path,
    options: WindowOptions,
    base_bytes: int,
    preparing: ByteProgress = lambda phase, done_bytes, total_bytes: None,
    measuring: TaskProgress = lambda done, total: None,
    planning: Callable[..., PlanReport] = plan,
) -> WindowReport:
    """Measure a bundle.

    Args:
        directory: the bundle.
        options: what to measure.
        base_bytes: footprint of a process like the daemon without a model, for the plan.
        preparing: told how far the first pass over the files is.
        measuring: told how many budgets were measured, each once a round.
        planning: makes the plans.

    Raises:
        ConfigError: no budget is enough, or it cannot be measured like this; says why.
        BundleError: the directory is no bundle, or damaged.
        DiskReadError: the device failed.
        FlashdError: a worker failed; says what it said.
    """
    manifest = open_manifest(directory)
    calibration = read_calibration(directory, manifest)
    masked = calibration is not None and any(layer.masked for layer in calibration.layers)
    mode = MODES[_WHOLE_METHOD if masked else HYBRID]
    one = task_of(directory, options.of("50%"), mode, "", "")
    longest = options.prompt_tokens + one.generated
    if longest > manifest.model.max_context:
        raise ConfigError(
            f"{options.prompt_tokens} prompt tokens and {one.generated} others are too many for a context of "
            f"{manifest.model.max_context}"
        )
    config = DaemonConfig(
        model=str(directory), backend=options.backend, threads=options.threads, prefetch="on", max_sessions=1
    )
    context = longest - one.tokens // 2

    def predict(shares: tuple[int, ...]) -> list[PlanRow]:
        return planning(config, base_bytes, budgets_percent=shares, context=context).rows

    kv_bytes = kv_bytes_per_token(manifest.model, config.kv_dtype) * longest
    with sigterm_unwinds():
        asyncio.run(warm(open_source(directory), preparing))
        measuring(0, 1)
        before = predict(options.budgets_percent)
        notes = [f"{row.memory}: {row.problem}" for row in before if row.problem]
        possible = [
            share for share, row in zip(options.budgets_percent, before, strict=True) if not row.problem
        ]
        if not possible:
            raise ConfigError(f"no budget can be measured: {'; '.join(notes)}")
        rounds = _rounds(directory, options, mode, possible, predict, kv_bytes, measuring)
    notes += [text for share in possible for one in rounds.samples[share] for text in one.notes]
    return WindowReport(
        rows=[window_row(rounds.samples[share], rounds.plans[share]) for share in possible],
        directory=str(directory),
        model=model_title(directory, manifest),
        synthetic="synthetic" in manifest.provenance,
        mode=mode.name,
        enforced=rounds.enforced,
        device=device_facts(directory),
        prompt_tokens=options.prompt_tokens,
        tokens=one.tokens,
        rounds=options.rounds,
        notes=list(dict.fromkeys(notes)),
    )


@dataclass
class _Rounds:
    """What was measured and predicted so far, by budget, and how budgets are enforced."""

    samples: dict[int, list[Sample]]
    plans: dict[int, list[PlanRow]]
    enforced: str = ""


def _rounds(
    directory: Path,
    options: WindowOptions,
    mode: Mode,
    shares: list[int],
    predict: Callable[[tuple[int, ...]], list[PlanRow]],
    kv_bytes: int,
    measuring: TaskProgress,
) -> _Rounds:
    """Measure all budgets in turn, another one first in each round."""
    found = _Rounds({share: [] for share in shares}, {share: [] for share in shares})
    n = len(shares)
    for turn in range(options.rounds * n):
        measuring(turn, options.rounds * n)
        round_, place = divmod(turn, n)
        share = shares[(place + round_) % n]
        row = predict((share,))[0]
        found.plans[share].append(row)
        with memory_group(row.weights_bytes + kv_bytes + PROCESS_BYTES) as (group, why):
            task = task_of(directory, options.of(row.memory), mode, "", str(group or ""))
            found.samples[share].append(run_task(task))
        found.enforced = "by a cgroup each" if group else f"by construction ({why})"
    measuring(options.rounds * n, options.rounds * n)
    return found
