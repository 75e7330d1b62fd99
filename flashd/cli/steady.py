"""``flashd bench steady``: flags and table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashd.cli.daemon import (
    EvictionOption,
    JsonOption,
    MemoryOption,
    PredictorOption,
    PrefetchOption,
    WindowOption,
)
from flashd.cli.render import human_bytes, paragraph, print_json, table


def steady(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")],
    tokens: Annotated[int, typer.Option(help="Length of each answer.")] = 1000,
    prompt: Annotated[
        str, typer.Option(help="What to continue [default: random tokens].", show_default=False)
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often; medians count.")] = 1,
    memory: MemoryOption = None,
    predictor: PredictorOption = None,
    eviction: EvictionOption = None,
    window: WindowOption = None,
    prefetch: PrefetchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a long answer's tokens take as long, and as much memory, at its end as at its beginning.

    Figure 8 of LLM in a flash, greedy and by nucleus sampling. Attention over the KV cache, and the cache
    itself, grow with the answer and are left out.
    """
    from dataclasses import asdict

    from flashd.cli.evaluate import ProgressNotes
    from flashd.config import resolve
    from flashd.tools.bench.steady import MAX_SLOWDOWN, MAX_SPREAD, bench_steady

    flags = {
        "memory": memory, "predictor": predictor, "eviction": eviction, "window": window,
        "prefetch": prefetch,
    }  # fmt: skip
    config = resolve({"model": str(directory), **flags})
    report = bench_steady(config, tokens, prompt, rounds, ProgressNotes())
    if as_json:
        print_json(asdict(report))
        return
    table(
        (
            "SAMPLING",
            "EARLY ms",
            "LATE ms",
            "RATIO",
            "ATTENTION ms",
            "MEMORY",
            "SPREAD",
            "KV CACHE",
            "STEADY",
        ),
        [
            (
                row.sampling,
                f"{row.early_ms:.2f}",
                f"{row.late_ms:.2f}",
                f"{row.ratio:.3f}",
                f"{row.attention_early_ms:.2f} to {row.attention_late_ms:.2f}",
                human_bytes(row.footprint_bytes),
                f"{100 * row.footprint_spread:.2f} %",
                human_bytes(row.kv_bytes),
                "yes" if row.steady else "no",
            )
            for row in report.rows
        ],
    )
    tenth = report.tokens // 10
    paragraph(
        f"medians per token without attention over the KV cache, tokens {tenth} to {2 * tenth} and the last "
        f"{tenth}; MEMORY is RssAnon + RssShmem less the KV cache, SPREAD its largest less its smallest. "
        f"Steady: RATIO up to {MAX_SLOWDOWN:.2f}, SPREAD up to {100 * MAX_SPREAD:.0f} %"
    )
