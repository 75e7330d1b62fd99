"""``flashd synth``: flags, progress, the curve as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flashd.cli.daemon import JsonOption
from flashd.cli.render import EXIT_INTERRUPTED, ByteProgress, fail, human_bytes, note, print_json, table


def synth(
    dest: Annotated[Path, typer.Argument(metavar="OUT", help="Bundle directory to make.")],
    like: Annotated[str, typer.Option(help="Whose shape: opt-125m, opt-1.3b, opt-2.7b, opt-6.7b, opt-13b, "
                                      "opt-30b, llama-3.2-1b, llama-2-7b, opt-tiny, llama-tiny.")],
    curve: Annotated[str, typer.Option(help="Whose use of neurons: opt (OPT 6.7B) or falcon.")] = "opt",
    sparsity: Annotated[
        float | None,
        typer.Option(help="Share of neurons that do not fire, e.g. 0.97 [default: the curve's].",
                     show_default=False),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Fewer layers than the model has.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="f32, f16 or bf16.")] = "f16",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Make a bundle of a real model's shape with made-up (synthetic) weights, to measure speed with.

    Its neurons fire as those of real models do, and predictors come with it. Interrupted, the same
    command goes on where it stopped.
    """
    from dataclasses import asdict

    from flashd.tools.synth import SynthOptions
    from flashd.tools.synth import synth as run

    given: dict[str, Any] = {"dtype": dtype}
    options = SynthOptions(
        like=like, curve=curve, sparsity=sparsity, layers=layers, seed=seed, overwrite=overwrite, **given
    )
    try:
        with ByteProgress() as progress:
            report = run(dest, options, progress, note)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on from what is safely on disk", EXIT_INTERRUPTED)
    if as_json:
        print_json(asdict(report))
        return
    print(
        f"{dest}: synthetic {report.like}, {report.dtype}, {human_bytes(report.bytes)}, of these "
        f"{human_bytes(report.predictor_bytes)} predictors of rank {report.rank}"
    )
    words = {"new": "requested, by none of the last {k}", "requested": "requested", "fired": "fired"}
    table(
        ("NEURONS", "OVER TOKENS", "TARGET", "MEASURED"),
        [
            (
                words[row.what].format(k=row.k),
                1 if row.what == "new" else row.k,
                f"{row.target:.1%}",
                f"{row.measured:.1%}",
            )
            for row in report.rows
        ],
    )
    print(f"measure it with: flashd bench token {dest} --budget {report.bench_budget}")
