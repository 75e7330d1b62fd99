"""``flashd reorder``: flags, progress, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashd.cli.calibrate import PhaseBar
from flashd.cli.daemon import JsonOption
from flashd.cli.render import EXIT_INTERRUPTED, fail, human_bytes, note, print_json, table
from flashd.errors import ConfigError

if TYPE_CHECKING:
    from flashd.tools.reorder.run import ReorderReport


def reorder(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")],
    dest: Annotated[Path, typer.Argument(metavar="OUT", help="Bundle directory to make.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", show_default=False,
                     help="UTF-8 text of the kind that the model will see; may be given several times."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="coactivation, frequency; auto: the better one, if it is better than none.")
    ] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Tokens of text to use, at most.")] = 8192,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Make a bundle whose neurons lie so that those wanted together are read together.

    Runs the model over the text, compares orders on its last part, and writes the better one; a calibration
    goes along. The model stays the same, up to the order in which sums are formed.
    """
    from dataclasses import asdict

    from flashd.tools.calibrate.options import CalibrateProgress
    from flashd.tools.reorder.run import reorder as run

    if not text:
        raise ConfigError("no text: give some of the kind that the model will see, with --text FILE")
    try:
        with PhaseBar() as bar:
            report = run(
                directory,
                dest,
                text,
                by=by,
                samples=samples,
                overwrite=overwrite,
                tell=lambda *state: bar(CalibrateProgress(*state)),
                note=note,
            )
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", EXIT_INTERRUPTED)
    if as_json:
        print_json(asdict(report))
    else:
        _print(report)


def _print(report: ReorderReport) -> None:
    if not report.costs:
        print(f"{report.directory}: {report.order}")
        return
    rows = [
        (name, f"{cost.reads:.1f}", human_bytes(int(cost.nbytes)), f"{cost.missing:.1f}")
        for name, cost in report.costs.items()
    ]
    table(("ORDER", "READS A TOKEN", "BYTES A TOKEN", "NEURONS READ"), rows)
    whose = "this device's measure" if report.measured else "flashd doctor DIR measures this device"
    note(
        f"on {report.test_tokens} tokens that no order was made from, half of each layer in RAM; gaps up to "
        f"{human_bytes(report.gap_bytes)} read over ({whose})"
    )
    if report.directory:
        print(f"{report.directory}: {report.order}, {report.layers} layers in another order")
    else:
        print("no order needs fewer reads than the one it has: nothing was written")
