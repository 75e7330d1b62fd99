"""``flashd calibrate``: flags, progress, and what came of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from flashd.cli.daemon import JsonOption
from flashd.cli.render import EXIT_INTERRUPTED, fail, note, paragraph, print_json, table
from flashd.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from flashd.tools.calibrate.options import CalibrateProgress
    from flashd.tools.calibrate.run import CalibrateReport

_PLAIN_INTERVAL_S = 10.0


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="UTF-8 text of the kind that the model will see; may be given several times.",
    ),
]
Samples = Annotated[
    int, typer.Option(help="Tokens of text to use; 0: by the model's size, 10,000 to 200,000.")
]
Predictor = Annotated[
    str, typer.Option(help="low-rank is trained; gate keeps the gate projections in RAM and is exact.")
]
Rank = Annotated[
    int, typer.Option(help="Of every predictor; 0: the smallest of d/32 to d/2 that is good enough.")
]
LateRank = Annotated[int, typer.Option(help="Of those of the last four layers; 0: as the others.")]
Epochs = Annotated[int, typer.Option(help="Passes over the text; 0: two, more if it is short.")]
FnTarget = Annotated[float, typer.Option(help="Share of firing neurons that may be missed.")]
FpTarget = Annotated[float, typer.Option(help="Share of the others requested in vain that is good enough.")]
MaxRequested = Annotated[
    float, typer.Option(help="A layer that would request more than this share gets no mask.")
]
NoLookahead = Annotated[bool, typer.Option("--no-lookahead", help="Train no guesses at the next layer.")]
Sparsify = Annotated[
    str, typer.Option(help="fatrelu: cut small activations; none: undo that; keep: leave it as it is.")
]
Target = Annotated[float, typer.Option(help="Share of activations that fatrelu cuts.")]
Seed = Annotated[int, typer.Option(help="Of training.")]
Workers = Annotated[int, typer.Option(help="Layers trained at once; 0: one for each CPU.")]


def calibrate(
    directory: Directory,
    text: Texts = None,
    samples: Samples = 0,
    predictor: Predictor = "low-rank",
    rank: Rank = 0,
    late_rank: LateRank = 0,
    epochs: Epochs = 0,
    fn_target: FnTarget = 0.04,
    fp_target: FpTarget = 0.07,
    max_requested: MaxRequested = 0.5,
    no_lookahead: NoLookahead = False,
    sparsify: Sparsify = "keep",
    target: Target = 0.7,
    seed: Seed = 0,
    workers: Workers = 0,
    as_json: JsonOption = False,
) -> None:
    """Find out which neurons fire on a text, and train predictors of that.

    Runs the model over the text, streamed, so it may be larger than RAM; interrupted or killed, the same
    command goes on from what is done. Predictors are written into the bundle, with a report (calibration.md).
    """
    from flashd.tools.calibrate.options import CalibrateOptions
    from flashd.tools.calibrate.run import calibrate as run
    from flashd.tools.calibrate.run import remove_thresholds

    options = CalibrateOptions(
        samples=samples,
        predictor=predictor,  # type: ignore[arg-type]  # checked there
        rank=rank,
        late_rank=late_rank,
        epochs=epochs,
        fn_target=fn_target,
        fp_target=fp_target,
        max_requested=max_requested,
        lookahead=not no_lookahead,
        sparsify=sparsify,  # type: ignore[arg-type]  # checked there
        target=target,
        seed=seed,
        workers=workers,
    )
    if sparsify == "none":
        undone = remove_thresholds(directory)
        note("thresholds and predictors removed" if undone else "there were no thresholds to remove")
        if not text:
            if as_json:
                print_json({"removed": undone})
            return
    if not text:
        raise ConfigError("no text: give --text FILE, of the kind of text that the model will see")
    try:
        with PhaseBar() as bar:
            report = run(directory, text, options, bar, note)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on from what is done", EXIT_INTERRUPTED)
    _show(report, as_json)


def _show(report: CalibrateReport, as_json: bool) -> None:
    from dataclasses import asdict

    from flashd.tools.calibrate.report import (
        LAYER_COLUMNS,
        layer_rows,
        perplexity_text,
        summary,
        write_report,
    )

    files = write_report(report)
    if as_json:
        print_json(asdict(report))
        return
    table(LAYER_COLUMNS, layer_rows(report))
    paragraph(summary(report))
    paragraph(perplexity_text(report))
    print(f"report: {', '.join(map(str, files))}")
    if any(layer.masked for layer in report.calibration.layers):
        print(f"what it costs on other text: flashd eval {report.directory} --text FILE")
        print(f"serve it with: flashd start --model {report.directory}")


class PhaseBar:
    """A bar for every phase on a terminal, elsewhere a line every ten seconds; on stderr."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._phase = ""
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=Console(stderr=True),
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, state: CalibrateProgress) -> None:
        """Show how far a phase is."""
        if self._bar is not None:
            label = f"{state.phase} ({state.unit})"
            if label not in self._tasks:
                self._tasks[label] = self._bar.add_task(label, total=state.total)
            self._bar.update(self._tasks[label], completed=state.done, total=state.total)
            return
        now_s = time.monotonic()
        if state.phase != self._phase or now_s >= self._next_line_s:
            self._phase, self._next_line_s = state.phase, now_s + _PLAIN_INTERVAL_S
            note(f"{state.phase}: {state.done} of {state.total} {state.unit}")
