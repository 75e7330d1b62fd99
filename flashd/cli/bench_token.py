"""``flashd bench token``: flags, progress, the paper's tables."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashd.cli.bench import Countdown, PlotOption, parse_names
from flashd.cli.daemon import JsonOption
from flashd.cli.render import ByteProgress, note, paragraph, print_json, table

if TYPE_CHECKING:
    from flashd.tools.bench.token import TokenReport


def bench_token(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory, with predictors.")],
    budget: Annotated[
        str, typer.Option(help="For weights, predictors, window and buffers: 50% of all weights, 4GiB.")
    ] = "50%",
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", show_default=False,
                     help="Some of naive,hybrid,+predictor,+window,+bundling,+prefetch [default: all]."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often; medians count.")] = 3,
    tokens: Annotated[
        int | None, typer.Option(help="Measured a round [default: 64; naive, hybrid 8].", show_default=False)
    ] = None,
    warmup: Annotated[int, typer.Option(help="Tokens before them.")] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    full: Annotated[bool, typer.Option("--full", help="256 tokens a round.")] = False,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Where the split copy goes meanwhile [default: beside the bundle].",
                     show_default=False),
    ] = None,
    eviction: Annotated[
        str, typer.Option(help="Which neurons leave RAM first [default: the daemon's].", show_default=False)
    ] = "",
    backend: Annotated[str, typer.Option(help="How to read: auto, uring, threads, buffered.")] = "auto",
    threads: Annotated[int, typer.Option(help="Of the kernels; 0: all usable CPUs.")] = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Measure time per token, from reading the whole model to the whole method (tables 2 and 3 of LLM in
    a flash), under one memory budget.

    Bytes are the kernel's count. FREE RUN is how much longer a token takes than its reads and kernels do
    when they need not wait for each other. Don't use the machine meanwhile.
    """
    from dataclasses import asdict

    from flashd.tools.bench.plot import check_plot
    from flashd.tools.bench.token import FULL_TOKENS, TokenOptions
    from flashd.tools.bench.token import bench_token as run
    from flashd.tools.bench.token.plot import plot as draw

    given: dict[str, Any] = {} if tokens is None else {"tokens": tokens, "dense_tokens": min(tokens, 8)}
    options = TokenOptions(
        budget=budget,
        modes=parse_names("--mode", mode),
        rounds=rounds,
        prompt_tokens=prompt,
        warmup_tokens=warmup,
        scratch=scratch,
        eviction=eviction,
        backend=backend,
        threads=threads,
        **({"tokens": FULL_TOKENS} if full else {}) | given,
    )
    if plot is not None:
        check_plot(plot)
    with ExitStack() as stack:
        preparing = stack.enter_context(ByteProgress())
        # The bar ends with the preparations: drawing would take CPU time from what is measured.
        report = run(directory, options, preparing, Countdown(begins=stack.close))
    for text in report.notes:
        note(text)
    if plot is not None:
        draw(report, plot)
    if as_json:
        print_json(asdict(report))
    else:
        print_token(report)


def print_token(report: TokenReport) -> None:
    """The report for people."""
    paragraph(report.title())
    headers = (
        "MODE", "RAM GB", "GB/TOKEN", "GB/S", "FLASH BUSY", "FLASH WAIT", "MEMORY", "COMPUTE", "OVERHEAD",
        "MS/TOKEN", "X NAIVE", "X HYBRID", "FREE RUN", "HITS", "READS", "AMPLIFIED",
    )  # fmt: skip
    rows = [
        (
            row.mode,
            f"{row.ram_gb:.2f}",
            f"{row.gb_read_per_token:.3f}",
            f"{row.gb_per_s:.2f}",
            f"{row.flash_busy_ms:.1f}",
            f"{row.flash_wait_ms:.1f}",
            f"{row.memory_ms:.2f}",
            f"{row.compute_ms:.1f}",
            f"{row.overhead_ms:.2f}",
            f"{row.ms_per_token:.1f}",
            _maybe(row.speedup_naive, "{:.2f}"),
            _maybe(row.speedup_hybrid, "{:.2f}"),
            _maybe(row.overlap, "{:.2f}"),
            _maybe(row.hit_ratio, "{:.1%}"),
            f"{row.reads_per_token:.0f}",
            f"{row.amplification:.2f}",
        )
        for row in report.rows
    ]
    table(headers, rows)
    paragraph(
        f"Medians of {report.rounds} rounds after a prompt of {report.prompt_tokens} tokens; {report.tokens} "
        f"tokens a round, naive and hybrid {report.dense_tokens}. Budget enforced {report.enforced}."
    )
    paragraph("Flash busy runs beside the others; wait, memory, compute and overhead add up to ms/token.")


def _maybe(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
