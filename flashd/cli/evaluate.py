"""``flashd eval``: flags, progress and tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashd.cli.daemon import JsonOption, KvOption, MemoryOption
from flashd.cli.render import human_duration, note, paragraph, print_json, table
from flashd.errors import ConfigError

if TYPE_CHECKING:
    from flashd.tools.eval.report import EvalReport, Share

_TASKS = ("perplexity", "cloze", "both")
_NOTE_INTERVAL_S = 10.0


IdsOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Token ids, for models without a tokenizer.", show_default=False),
]
ClozeOption = Annotated[
    Path | None,
    typer.Option(help="Passages, one a line, to guess the last word of, e.g. LAMBADA's.", show_default=False),
]
ModeOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Some of dense, no-threshold, oracle, predictor [default: all there are].", show_default=False
    ),
]


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Bundle directory.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE",
                     help="UTF-8 text to evaluate on, not one calibrated with; may be given several times.",
                     show_default=False),
    ] = None,
    tokens_file: IdsOption = None,
    task: Annotated[
        str, typer.Option(help="perplexity, cloze (guess the last word of the text's paragraphs), or both.")
    ] = "perplexity",
    cloze: ClozeOption = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to score at most; 0: all.")] = 4096,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a window [default: the model's context, at most 512].",
                     show_default=False),
    ] = None,
    items: Annotated[int, typer.Option(min=0, help="Cloze items at most; 0: all.")] = 200,
    distractors: Annotated[int, typer.Option(min=1, help="Words that the last word competes with.")] = 9,
    mode: ModeOption = None,
    memory: MemoryOption = None,
    kv_dtype: KvOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Measure what skipping neurons costs: perplexity and last words, dense, by oracle and by predictor.

    All neurons are read and computed for the comparison, so this takes long, and hardly more memory than
    serving. The oracle skips exactly the neurons that do not fire; the predictor's tokens are computed as
    flashd start would.
    """
    from dataclasses import asdict

    from flashd.config import resolve
    from flashd.tools.eval.run import EvalOptions
    from flashd.tools.eval.run import evaluate as run

    if task not in _TASKS:
        raise ConfigError(f"--task is {task!r}, expected one of: {', '.join(_TASKS)}")
    config = resolve({"model": str(directory), "memory": memory, "kv_dtype": kv_dtype})
    texts, ids = tuple(text or ()), tuple(tokens_file or ())
    options = EvalOptions(
        texts=texts,
        token_files=ids,
        # --cloze FILE alone is a wish for nothing else.
        perplexity=task != "cloze" and (bool(texts or ids) or cloze is None),
        tokens=tokens,
        context=context or 0,
        cloze=task != "perplexity" and bool(texts),
        cloze_file=cloze,
        items=items,
        distractors=distractors,
        modes=tuple(mode or ()),
    )
    report = run(config, options, ProgressNotes())
    for line in report.notes:
        note(line)
    if as_json:
        print_json(asdict(report))
    else:
        print_report(report)


class ProgressNotes:
    """A line on stderr when a mode begins and every ten seconds, with the time that is left of it."""

    def __init__(self) -> None:
        self._mode = ""
        self._start_s = self._said_s = 0.0

    def __call__(self, mode: str, done: int, total: int) -> None:
        """``done`` of ``total`` of a mode are done."""
        now_s = time.monotonic()
        if mode != self._mode:
            self._mode, self._start_s, self._said_s = mode, now_s, now_s
            note(f"{mode}: {total} to do")
        elif done < total and now_s - self._said_s > _NOTE_INTERVAL_S:
            self._said_s = now_s
            minutes, seconds = divmod(round((now_s - self._start_s) / done * (total - done)) + 1, 60)
            left = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
            note(f"{mode}: {done} of {total}, about {left} left")


def print_report(report: EvalReport) -> None:
    """The result for people."""
    if report.synthetic:
        paragraph("synthetic: the weights are made up, so its perplexity and its words say nothing")
    if report.modes:
        _perplexity(report)
    if report.layers:
        _layers(report)
    if report.cloze:
        _cloze(report)


def _perplexity(report: EvalReport) -> None:
    table(
        ("MODE", "PERPLEXITY", "LOSS", "CHANGE", "OTHER ARGMAX", "TIME"),
        [
            (
                row.mode,
                f"{row.perplexity:.4g}",
                f"{row.loss:.5f}",
                f"{100 * row.perplexity_change:+.3f} % +- {100 * row.perplexity_change_95:.3f}",
                f"{row.changed} ({100 * row.changed_share:.2f} %)",
                human_duration(row.seconds),
            )
            for row in report.modes
        ],
    )
    paragraph(
        f"{report.tokens} tokens in windows of {report.context}; CHANGE is the perplexity's against dense, "
        "with its 95 % interval"
    )


def _layers(report: EvalReport) -> None:
    headers = ("LAYER", "FIRED", "REQUESTED", "PRECISION", "RECALL", "FALSE NEG", "FALSE POS")
    table(
        headers,
        [
            (
                f"{row.layer}" if row.masked else f"{row.layer} (no mask)",
                *(
                    f"{100 * value:.2f} %"
                    for value in (
                        row.fired,
                        row.requested,
                        row.precision,
                        row.recall,
                        row.false_negative,
                        row.false_positive,
                    )
                ),
            )
            for row in report.layers
        ],
    )
    if report.false_negative is not None and report.false_positive is not None:
        paragraph(
            f"mean over layers with a mask: false negatives {100 * report.false_negative:.2f} % (missed / "
            f"fired), false positives {100 * report.false_positive:.2f} % (wrongly requested / not fired)"
        )


def _cloze(report: EvalReport) -> None:
    table(
        ("MODE", "EXACT", "FIRST", "GAINED", "LOST", "LOG-PROB", "TIME"),
        [
            (
                row.mode,
                _share(row.exact),
                _share(row.first),
                row.gained,
                row.lost,
                f"{row.log_prob:.3f}",
                human_duration(row.seconds),
            )
            for row in report.cloze
        ],
    )
    paragraph(
        f"last words of {report.cloze[0].exact.of} passages, with 95 % intervals; EXACT: greedy decoding "
        f"writes the word, FIRST: it is more probable than {report.cloze_distractors} others, GAINED and "
        "LOST: against dense"
    )


def _share(value: Share) -> str:
    return f"{100 * value.share:.1f} % ({100 * value.low_95:.1f} to {100 * value.high_95:.1f})"
