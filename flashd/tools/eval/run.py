"""Runs every mode over the same tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.tools.eval.cloze import evaluate_cloze
from flashd.tools.eval.report import Z95, EvalReport, LayerQuality, ModeQuality
from flashd.tools.eval.scores import log_probs
from flashd.tools.eval.subject import Subject, opened
from flashd.tools.eval.text import (
    ClozeItem,
    cloze_items,
    max_chars,
    passages_in,
    passages_of,
    read_ids,
    read_text,
    windows,
)
from flashd.types import F32Array, I64Array

# (mode, done, total): tokens of a text, or cloze items.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EvalOptions:
    """What to evaluate.

    Attributes:
        texts: text files.
        token_files: files of token ids.
        perplexity: whether to score every token of the texts.
        tokens: to score at most; 0: all.
        context: tokens of a window; 0: the model's context, at most 512.
        cloze: whether to guess the last words of the texts' paragraphs.
        cloze_file: passages, one a line, to guess the last words of.
        items: cloze items at most; 0: all.
        distractors: words beside the right one.
        modes: some of ``Subject.modes``; empty: all.
    """

    texts: tuple[Path, ...] = ()
    token_files: tuple[Path, ...] = ()
    perplexity: bool = True
    tokens: int = 4096
    context: int = 0
    cloze: bool = False
    cloze_file: Path | None = None
    items: int = 200
    distractors: int = 9
    modes: tuple[str, ...] = ()


DEFAULT_CONTEXT = 512


def evaluate(config: DaemonConfig, options: EvalOptions, progress: Progress) -> EvalReport:
    """Evaluate a bundle; reads its FFN from flash over and over, so it may be larger than RAM.

    Args:
        config: what ``flashd start`` would be told.
        options: what to evaluate.
        progress: called now and then.

    Raises:
        ConfigError: options or texts that cannot be used.
        BundleError, DiskReadError, TokenizerError: the bundle cannot be used.
    """
    return asyncio.run(_evaluate(config, options, progress))


async def _evaluate(config: DaemonConfig, options: EvalOptions, progress: Progress) -> EvalReport:
    async with opened(config) as subject:
        return await evaluate_subject(subject, str(config.model_dir), options, progress)


async def evaluate_subject(
    subject: Subject, name: str, options: EvalOptions, progress: Progress
) -> EvalReport:
    """As ``evaluate``, of a model that is open."""
    context = _context(subject, options)
    pieces = _windows(subject, options, context) if options.perplexity else []
    items = _items(subject, options, context)
    total = sum(len(piece) - 1 for piece in pieces)
    notes = _notes(subject)
    modes, cloze = [], []
    layers: tuple[LayerQuality, ...] = ()
    dense: _Scores | None = None
    right: npt.NDArray[np.bool_] | None = None
    for mode in _modes(subject, options):
        await subject.choose(mode)
        if pieces:
            scores = await _score(subject, mode, pieces, total, progress)
            dense = dense or scores
            modes.append(_quality(mode, scores, dense))
            layers = layers or subject.comparing.quality()  # of the text alone
        if items:
            quality, firsts = await evaluate_cloze(subject, mode, items, right, progress)
            right = firsts if right is None else right
            cloze.append(quality)
    layers = layers or subject.comparing.quality()
    masked = [layer for layer in layers if layer.masked]
    files = (*options.texts, *options.token_files, *([options.cloze_file] if options.cloze_file else []))
    return EvalReport(
        model=name,
        synthetic=bool(subject.calibration and subject.calibration.synthetic),
        texts=tuple(map(str, files)),
        context=context,
        tokens=total,
        modes=tuple(modes),
        layers=layers,
        false_negative=_mean([layer.false_negative for layer in masked]),
        false_positive=_mean([layer.false_positive for layer in masked]),
        cloze_distractors=options.distractors if cloze else 0,
        cloze=tuple(cloze),
        notes=notes,
    )


def _modes(subject: Subject, options: EvalOptions) -> list[str]:
    for mode in options.modes:
        if mode not in subject.modes:
            raise ConfigError(f"--mode is {mode!r}, expected some of: {', '.join(subject.modes)}")
    # Everything is compared with dense.
    return [mode for mode in subject.modes if mode == "dense" or mode in (options.modes or subject.modes)]


def _notes(subject: Subject) -> tuple[str, ...]:
    if subject.calibration is not None:
        return ()
    return ("the model is not calibrated, so there is only the dense row; flashd calibrate makes predictors",)


def _context(subject: Subject, options: EvalOptions) -> int:
    most = subject.manifest.model.max_context
    if options.context and not 2 <= options.context <= most:
        raise ConfigError(f"--context is {options.context}, expected 2 to {most}, the model's context")
    return options.context or min(most, DEFAULT_CONTEXT)


def _windows(subject: Subject, options: EvalOptions, context: int) -> list[I64Array]:
    spec, tokenizer = subject.manifest.tokenizer, subject.tokenizer
    sequences = [read_ids(path, subject.manifest.model.vocab_size) for path in options.token_files]
    if options.texts and tokenizer is None:
        raise ConfigError("the model has no tokenizer, so it cannot read --text; give ids with --tokens-file")
    for path in options.texts:
        assert tokenizer is not None
        sequences.append(tokenizer.encode(read_text(path, max_chars(options.tokens)), plain=False))
    if not sequences:
        raise ConfigError("nothing to evaluate on: give --text FILE or --tokens-file FILE")
    bos_id = spec.bos_id if spec is not None and spec.add_bos else None
    return windows(sequences, bos_id, context, options.tokens)


def _items(subject: Subject, options: EvalOptions, context: int) -> list[ClozeItem]:
    if not options.cloze and options.cloze_file is None:
        return []
    tokenizer = subject.tokenizer
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer, so it cannot guess words; leave cloze out")
    passages = passages_in(options.cloze_file) if options.cloze_file else []
    if options.cloze:
        for path in options.texts:
            passages += passages_of(read_text(path))
        if not passages:
            raise ConfigError("no paragraph of the text has two sentences and 20 words; give --cloze FILE")
    return cloze_items(
        passages, tokenizer.encode, items=options.items, distractors=options.distractors, max_tokens=context
    )


@dataclass
class _Scores:
    """Per scored token: its negative log-likelihood, and the successor that was thought most likely."""

    loss: F32Array
    best: I64Array
    seconds: float


async def _score(
    subject: Subject, mode: str, pieces: Sequence[I64Array], total: int, progress: Progress
) -> _Scores:
    start_s = time.perf_counter()
    losses, best = [], []
    done = 0
    progress(mode, 0, total)
    for ids in pieces:
        kv, at = subject.new_kv(len(ids)), 1
        async for logits in subject.feed(kv, ids[:-1]):
            targets = ids[at : at + len(logits)]
            losses.append(-log_probs(logits, targets))
            best.append(logits.argmax(axis=1))
            at += len(logits)
            done += len(logits)
            progress(mode, done, total)
    seconds = time.perf_counter() - start_s
    return _Scores(np.concatenate(losses), np.concatenate(best), seconds)


def _quality(mode: str, scores: _Scores, dense: _Scores) -> ModeQuality:
    loss, reference = float(np.mean(scores.loss)), float(np.mean(dense.loss))
    change = scores.loss.astype(np.float64) - dense.loss
    error = float(np.std(change, ddof=1)) / math.sqrt(len(change)) if len(change) > 1 else 0.0
    changed = int(np.count_nonzero(scores.best != dense.best))
    ratio = _exp(loss - reference)
    return ModeQuality(
        mode=mode,
        loss=loss,
        perplexity=_exp(loss),
        perplexity_change=ratio - 1,
        perplexity_change_95=ratio * Z95 * error,
        changed=changed,
        changed_share=changed / len(change),
        seconds=scores.seconds,
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond is no float


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
