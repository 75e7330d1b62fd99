"""``flashd plan``: what fits into some memory, and how fast it will be, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashd import kernels
from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.memory.budget import Allocation
from flashd.memory.system import SystemMemory
from flashd.runtime.accounting import as_share
from flashd.tools.bench.kernels.others import Others
from flashd.tools.bench.token.run import model_title
from flashd.tools.plan import probe
from flashd.tools.plan.advice import memory_advice, model_advice
from flashd.tools.plan.cost import break_even_share, token_cost
from flashd.tools.plan.facts import Measured, RowTimes
from flashd.tools.plan.report import MemoryParts, PlanReport, PlanRow
from flashd.tools.plan.subject import Subject

BUDGETS_PERCENT = (30, 40, 50, 60, 70, 80, 90)
CONTEXT_TOKENS = 256
# Less of other programs does not show in the figures.
_OTHER_CPUS = 0.15
_SCATTERED_ROWS = 128
_RELU = ("relu", "relu2")


def plan(
    config: DaemonConfig,
    base_bytes: int,
    *,
    budgets_percent: tuple[int, ...] = BUDGETS_PERCENT,
    context: int = CONTEXT_TOKENS,
    measure: Callable[[Subject, int], Measured] | None = None,
) -> PlanReport:
    """Plan for what ``flashd start`` would be told.

    Args:
        config: all settings; ``memory`` is the question.
        base_bytes: footprint of a process like the daemon that has no model.
        budgets_percent: other budgets, shares of all weights.
        context: tokens that attention goes over in the predicted times.
        measure: makes the measurements; None: ``measured``.

    Raises:
        BundleError, BundleCorruptError, DiskReadError: the bundle cannot be used.
        ConfigError: settings that cannot be planned for. Too little memory is in the report.
    """
    reading = SystemMemory().read()
    subject = Subject.open(config, base_bytes)
    others = Others()
    facts = (measure or measured)(subject, context)
    busy = others.cpus() or 0.0
    available_bytes = reading.footprint_bytes + reading.available_bytes
    parts = None
    try:
        account = subject.account(config.memory, reading)
        allocation = subject.allocation(account.weights_bytes(reading.at_s))
        parts = subject.parts(allocation)
        chosen = _row(subject, facts, config.memory, allocation)
    except ConfigError as exc:
        chosen = PlanRow(config.memory, False, str(exc))
    rows = [_budget(subject, facts, share, available_bytes) for share in budgets_percent]
    report = _report(subject, facts, chosen, parts, rows, available_bytes, context)
    if busy > _OTHER_CPUS:
        report.notes.append(
            f"other programs kept {busy:.1f} CPUs busy while this was measured: the times are slower than "
            "those of an idle machine, and what is advised may be wrong"
        )
    return report


def measured(subject: Subject, context: int) -> Measured:
    """Measure what a plan needs; raises as ``plan``."""
    manifest = subject.manifest
    wanted = probe.Wanted(
        masks=probe.mask_shape(subject.calibration, manifest.ffn.n_neurons),
        dense=subject.n_masked < len(subject.masked),
        reads=subject.config.backend != "memory",
        context=context,
    )
    return probe.measure(subject.config, manifest, wanted)


def _budget(subject: Subject, facts: Measured, percent: int, available_bytes: int) -> PlanRow:
    """A share of all weights."""
    memory = f"{percent}%"
    weights_bytes = subject.all_bytes * percent // 100
    try:
        row = _row(subject, facts, memory, subject.allocation(weights_bytes))
    except ConfigError:
        return PlanRow(memory, False, f"too small: the least that works is --memory {_least(subject)}")
    if row.peak_bytes > available_bytes:
        return replace(row, problem=f"more than the {available_bytes / 1e6:,.0f} MB that can be had now")
    return row


def _least(subject: Subject) -> str:
    """The smallest share that works, rounded up."""
    return f"{-(-1000 * subject.demand.least_bytes // subject.all_bytes) / 10:.1f}%"


def _row(subject: Subject, facts: Measured, memory: str, allocation: Allocation) -> PlanRow:
    ffn, layers = subject.manifest.ffn, subject.layers(allocation)
    usage = subject.usage(allocation)
    cost = token_cost(facts, layers, usage)
    n = layers.masked
    read_bytes = layers.streamed * ffn.layer_bytes + (
        usage.read_rows * n * ffn.stride_bytes if usage else 0.0
    )
    window_rows = sum(allocation.capacity)
    times = cost.times
    return PlanRow(
        memory=memory,
        feasible=True,
        weights_bytes=allocation.budget_bytes,
        peak_bytes=subject.parts(allocation).total,
        k=allocation.k,
        window_rows=window_rows,
        spare_rows=max(0, allocation.n_rows - window_rows),
        window_share=window_rows / (n * ffn.n_neurons) if n else 0.0,
        resident_layers=layers.resident,
        streamed_layers=layers.streamed,
        found_share=1 - (usage.demand + usage.ahead) / usage.requested if usage and usage.requested else None,
        read_bytes=read_bytes,
        reads=usage.reads * n if usage else 0.0,
        ms_per_token=1e3 * times.total_s,
        flash_wait_ms=1e3 * times.wait_s,
        memory_ms=1e3 * times.memory_s,
        compute_ms=1e3 * times.compute_s,
        overhead_ms=1e3 * times.overhead_s,
        flash_ms=1e3 * cost.flash_s,
    )


def _report(
    subject: Subject,
    facts: Measured,
    chosen: PlanRow,
    parts: MemoryParts | None,
    rows: list[PlanRow],
    available_bytes: int,
    context: int,
) -> PlanReport:
    ffn, stride = subject.manifest.ffn, subject.manifest.ffn.stride_bytes
    requested = None
    if subject.frequency:
        requested = sum(float(share.mean()) for share in subject.frequency) / len(subject.frequency)
    break_even = None
    if facts.rows is not None and facts.stream_s is not None:
        break_even = break_even_share(facts.rows, facts.stream_s, ffn.n_neurons)
    everything = subject.allocation(subject.demand.everything_bytes)
    all_in_ram = _row(subject, facts, as_share(everything.budget_bytes, subject.all_bytes), everything)
    share = f"{-(-1000 * everything.budget_bytes // subject.all_bytes) / 10:.1f}%"
    others = [row for row in rows if not row.problem]
    if all_in_ram.peak_bytes <= available_bytes:
        others.append(replace(all_in_ram, memory=share))
    return PlanReport(
        directory=str(subject.directory),
        model=model_title(subject.directory, subject.manifest),
        synthetic="synthetic" in subject.manifest.provenance,
        memory=subject.config.memory,
        all_weights_bytes=subject.all_bytes,
        least_memory=_least(subject),
        available_bytes=available_bytes,
        context_tokens=context,
        parts=parts,
        chosen=chosen,
        rows=rows,
        masked_layers=subject.n_masked,
        layers=len(subject.masked),
        requested_share=requested,
        break_even_share=break_even,
        device_gb_per_s=_curve_gb_per_s(subject),
        row_gb_per_s=None if facts.rows is None else _row_gb_per_s(facts.rows, stride),
        stream_gb_per_s=None if facts.stream_s is None else ffn.layer_bytes / facts.stream_s / 1e9,
        compute_share=facts.compute_share,
        flash_share=facts.flash_share,
        advice=[
            *memory_advice(chosen, others),
            *model_advice(
                relu=subject.manifest.model.activation in _RELU,
                calibrated=bool(subject.n_masked),
                streamed=chosen.streamed_layers > 0,
                requested=requested,
                break_even=break_even,
            ),
        ],
        notes=_notes(subject),
    )


def _row_gb_per_s(rows: RowTimes, stride_bytes: int) -> float:
    """Of a batch that keeps the device busy and is still scattered."""
    size = max([size for size in rows.rows if size <= _SCATTERED_ROWS], default=rows.rows[0])
    return size * stride_bytes / rows.at(size) / 1e9


def _curve_gb_per_s(subject: Subject) -> float | None:
    """What the device's curve says of reads of a row's size: the next larger size that was measured."""
    if subject.curve is None:
        return None
    fastest = subject.curve.fastest()
    sizes = [size for size in fastest if size >= subject.manifest.ffn.stride_bytes]
    return fastest[min(sizes)].gb_per_s if sizes else None


def _notes(subject: Subject) -> list[str]:
    notes = []
    if "synthetic" in subject.manifest.provenance:
        notes.append("the weights are synthetic: its answers mean nothing")
    if subject.curve is None and subject.manifest.store == "file" and subject.n_masked:
        notes.append(
            "the device has no curve: reads go over no gap between two rows, in this plan and in the daemon; "
            f"measure it with flashd doctor {subject.directory}"
        )
    if not kernels.NATIVE:
        notes.append("the native kernels are not installed: NumPy twins compute, far slower")
    return notes
