"""``flashd plan``: flags and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashd.cli.daemon import (
    BackendOption,
    EvictionOption,
    JsonOption,
    MemoryOption,
    PredictorOption,
    PrefetchOption,
    WindowOption,
)
from flashd.cli.render import EXIT_FAILURE, note, paragraph, print_json, table

if TYPE_CHECKING:
    from flashd.tools.plan import PlanReport, PlanRow


def plan(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")],
    memory: MemoryOption = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that attention goes over.")] = 256,
    backend: BackendOption = None,
    predictor: PredictorOption = None,
    eviction: EvictionOption = None,
    window: WindowOption = None,
    prefetch: PrefetchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what fits into some memory and how fast it will be, before anything is loaded.

    Takes some seconds: kernels and reads of the bundle are measured, alone and beside each other; nothing is
    written. Other budgets are beside it (figure 7 of LLM in a flash). The exit code is 1 if --memory is too
    little.
    """
    from dataclasses import asdict

    from flashd.cli.base_process import base_bytes
    from flashd.config import resolve
    from flashd.tools.plan import plan as run

    flags = {
        "memory": memory, "backend": backend, "predictor": predictor, "eviction": eviction, "window": window,
        "prefetch": prefetch,
    }  # fmt: skip
    config = resolve({"model": str(directory), **flags})
    report = run(config, base_bytes(config), context=context)
    for text in report.notes:
        note(text)
    if as_json:
        print_json(asdict(report))
    else:
        print_plan(report)
    if not report.chosen.feasible:
        sys.exit(EXIT_FAILURE)


def print_plan(report: PlanReport) -> None:
    """The report for people."""
    paragraph(f"{report.model}; all weights {report.all_weights_bytes / 1e6:,.1f} MB")
    chosen, parts = report.chosen, report.parts
    if parts is not None:
        named = (
            ("process", parts.process), ("prompt's scratch", parts.prompt), ("KV cache", parts.kv_cache),
            ("resident weights", parts.resident), ("predictors", parts.predictors),
            ("stream buffers", parts.stream_buffers), ("layers in RAM", parts.layers),
            ("window", parts.window), ("predicted peak", parts.total),
        )  # fmt: skip
        table(
            (f"--memory {report.memory}", "MB"), [(name, f"{size / 1e6:.1f}") for name, size in named if size]
        )
    else:
        paragraph(chosen.problem)
    print_rows([chosen, *(row for row in report.rows if row.memory != chosen.memory)])
    paragraph(
        "K: tokens in a row whose neurons stay in RAM. WINDOW: share of the neurons that it holds. LAYERS: "
        "those without a mask that are in RAM whole. IN RAM: neurons found there. WAIT, UPKEEP, COMPUTE and "
        "OVERHEAD are ms and add up; FLASH runs beside them."
    )
    for row in report.rows:
        if row.problem:
            paragraph(f"{row.memory}: {row.problem}")
    for text in (_masks(report), _device(report)):
        if text:
            paragraph(text)
    for text in report.advice:
        paragraph(f"advice: {text}")


def print_rows(rows: Sequence[PlanRow]) -> None:
    """A line for each budget that is enough."""
    headers = (
        "--memory", "PEAK MB", "K", "WINDOW", "LAYERS", "IN RAM", "MB/TOKEN", "FLASH", "WAIT", "UPKEEP",
        "COMPUTE", "OVERHEAD", "MS/TOKEN",
    )  # fmt: skip
    table(
        headers,
        [
            (
                row.memory,
                f"{row.peak_bytes / 1e6:.0f}",
                row.k if row.window_rows else "-",
                f"{row.window_share:.0%}" if row.window_rows else "-",
                row.resident_layers,
                "-" if row.found_share is None else f"{row.found_share:.1%}",
                f"{row.read_bytes / 1e6:.1f}",
                f"{row.flash_ms:.1f}",
                f"{row.flash_wait_ms:.1f}",
                f"{row.memory_ms:.2f}",
                f"{row.compute_ms:.1f}",
                f"{row.overhead_ms:.2f}",
                f"{row.ms_per_token:.1f}",
            )
            for row in rows
            if row.feasible
        ],
    )


def _masks(report: PlanReport) -> str:
    if report.requested_share is None:
        return "no layer has a mask: every neuron is computed; layers that are not in RAM are streamed"
    text = (
        f"masks in {report.masked_layers} of {report.layers} layers; a token requests "
        f"{report.requested_share:.1%} of a layer's neurons"
    )
    if report.break_even_share is not None:
        text += (
            f"; where more than {report.break_even_share:.0%} of a layer had to be read, reading all of it "
            "would be as fast (break-even)"
        )
    return text


def _device(report: PlanReport) -> str:
    if report.stream_gb_per_s is None:
        return ""
    text = f"measured now: whole layers at {report.stream_gb_per_s:.2f} GB/s"
    if report.row_gb_per_s is not None:
        text += (
            f", scattered rows at {report.row_gb_per_s:.2f} GB/s; beside each other computing keeps "
            f"{report.compute_share:.0%} of its speed and reads {report.flash_share:.0%} of theirs"
        )
    if report.device_gb_per_s is not None:
        text += f"; the device's curve says {report.device_gb_per_s:.2f} GB/s of reads of a row"
    return text
