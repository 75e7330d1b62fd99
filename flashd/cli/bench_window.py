"""``flashd bench window``: flags, progress and table."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashd.cli.bench import Countdown, PlotOption, parse_names
from flashd.cli.daemon import JsonOption
from flashd.cli.render import ByteProgress, note, paragraph, print_json, table
from flashd.errors import ConfigError

if TYPE_CHECKING:
    from flashd.tools.bench.window import WindowReport


def bench_window(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")],
    budgets: Annotated[
        list[str] | None,
        typer.Option(metavar="PERCENT,...", show_default=False,
                     help="Shares of all weights, e.g. 50,60 [default: 30,40 ... 90]."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often; medians count.")] = 3,
    tokens: Annotated[
        int, typer.Option(help="Measured a round; of a model without masks a quarter of them.")
    ] = 48,
    warmup: Annotated[int, typer.Option(help="Tokens before them.")] = 32,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    backend: Annotated[str, typer.Option(help="How to read: auto, uring, threads, buffered.")] = "auto",
    threads: Annotated[int, typer.Option(help="Of the kernels; 0: all usable CPUs.")] = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Measure time per token over memory budgets (figure 7 of LLM in a flash), beside what flashd plan
    predicts.

    With everything that the method has, or for models without masks with as many layers in RAM as fit.
    Budgets that are too small are left out with a note. Don't use the machine meanwhile.
    """
    from dataclasses import asdict

    from flashd.cli.base_process import base_bytes
    from flashd.config import DaemonConfig
    from flashd.tools.bench.plot import check_plot
    from flashd.tools.bench.window import WindowOptions
    from flashd.tools.bench.window import bench_window as run
    from flashd.tools.bench.window.plot import plot as draw
    from flashd.tools.bench.window.run import BUDGETS_PERCENT

    names = parse_names("--budgets", budgets)
    options = WindowOptions(
        budgets_percent=BUDGETS_PERCENT if names is None else tuple(map(parse_percent, names)),
        rounds=rounds,
        tokens=tokens,
        warmup_tokens=warmup,
        prompt_tokens=prompt,
        backend=backend,
        threads=threads,
    )
    if plot is not None:
        check_plot(plot)
    base = base_bytes(DaemonConfig(model=str(directory), backend=backend))
    with ExitStack() as stack:
        preparing = stack.enter_context(ByteProgress())
        # The bar ends with the first pass: drawing would take CPU time from what is measured.
        report = run(directory, options, base, preparing, Countdown(begins=stack.close))
    for text in report.notes:
        note(text)
    if plot is not None:
        draw(report, plot)
    if as_json:
        print_json(asdict(report))
    else:
        print_window(report)


def parse_percent(text: str) -> int:
    """``50`` or ``50%`` -> 50.

    Raises:
        ConfigError: it is neither.
    """
    number = text.removesuffix("%").strip()
    if not number.isdecimal():
        raise ConfigError(f"--budgets has {text!r}, expected shares of all weights such as 50,60,70")
    return int(number)


def print_window(report: WindowReport) -> None:
    """The report for people."""
    paragraph(report.title())
    headers = (
        "BUDGET", "GB", "K", "WINDOW", "LAYERS", "GB/TOKEN", "FLASH", "WAIT", "MEMORY", "COMPUTE", "OVERHEAD",
        "MS/TOKEN", "PREDICTED", "RATIO",
    )  # fmt: skip
    rows = [
        (
            row.budget,
            f"{row.budget_bytes / 1e9:.2f}",
            row.k if row.window_share else "-",
            f"{row.window_share:.0%}" if row.window_share else "-",
            row.resident_layers,
            f"{row.gb_read_per_token:.3f}",
            f"{row.flash_busy_ms:.1f}",
            f"{row.flash_wait_ms:.1f}",
            f"{row.memory_ms:.2f}",
            f"{row.compute_ms:.1f}",
            f"{row.overhead_ms:.2f}",
            f"{row.ms_per_token:.1f}",
            f"{row.predicted_ms:.1f}",
            f"{row.ratio:.2f}",
        )
        for row in report.rows
    ]
    table(headers, rows)
    paragraph(
        f"The median of {report.rounds} rounds of {report.tokens} tokens after a prompt of "
        f"{report.prompt_tokens}; budgets enforced {report.enforced}. PREDICTED is what flashd plan said "
        "right before, RATIO the median of predicted / measured; flash runs beside wait, memory, compute and "
        "overhead, which add up to MS/TOKEN."
    )
