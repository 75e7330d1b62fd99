"""The cloze task: the last word of a passage, dense and sparse (LLM in a flash, Table 1, uses tasks such as
this one; LAMBADA, arXiv 1606.06031, is the model for it)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from flashd.kv.contiguous import ContiguousKV
from flashd.models.decoder import Span
from flashd.tools.eval.report import ClozeQuality, share_of
from flashd.tools.eval.scores import log_probs
from flashd.tools.eval.subject import Subject
from flashd.tools.eval.text import ClozeItem
from flashd.types import BoolArray, F32Array


async def evaluate_cloze(
    subject: Subject,
    mode: str,
    items: Sequence[ClozeItem],
    dense: BoolArray | None,
    progress: Callable[[str, int, int], None],
) -> tuple[ClozeQuality, BoolArray]:
    """Guess the last words of all items in the mode that is chosen.

    Args:
        subject: the model.
        mode: its mode, for the report.
        items: at least one.
        dense: which items the dense model ranked first; None: this is the dense model.
        progress: called with mode, items done and items in all.

    Returns:
        The result, and which items were ranked first.
    """
    start_s = time.perf_counter()
    exact = np.zeros(len(items), np.bool_)
    first = np.zeros(len(items), np.bool_)
    right = np.zeros(len(items))
    progress(f"{mode}, cloze", 0, len(items))
    for number, item in enumerate(items):
        scores, exact[number] = await _guess(subject, item)
        first[number] = scores[0] > scores[1:].max(initial=-np.inf)
        right[number] = scores[0]
        progress(f"{mode}, cloze", number + 1, len(items))
    reference = first if dense is None else dense
    quality = ClozeQuality(
        mode=mode,
        exact=share_of(int(exact.sum()), len(items)),
        first=share_of(int(first.sum()), len(items)),
        log_prob=float(right.mean()),
        gained=int(np.count_nonzero(first & ~reference)),
        lost=int(np.count_nonzero(reference & ~first)),
        seconds=time.perf_counter() - start_s,
    )
    return quality, first


async def _guess(subject: Subject, item: ClozeItem) -> tuple[F32Array, bool]:
    """Log-probability of each word, and whether greedy decoding writes the first one."""
    context = np.array(item.context, np.int64)
    kv = subject.new_kv(len(context) + max(map(len, item.words)))
    chunks = [logits[-1] async for logits in subject.feed(kv, context)]
    start = chunks[-1]
    scores = log_probs(np.tile(start, (len(item.words), 1)), np.array([word[0] for word in item.words]))
    greedy = int(start.argmax()) == item.words[0][0]
    longer = [index for index, word in enumerate(item.words) if len(word) > 1]
    if longer:
        spans = [
            Span(np.array(item.words[index][:-1], np.int64), _copy(subject, kv, len(item.words[index])))
            for index in longer
        ]
        rest = await subject.decoder.forward(spans, every_position=True)
        at = 0
        for index in longer:
            word = np.array(item.words[index][1:], np.int64)
            rows = rest[at : at + len(word)]
            scores[index] += log_probs(rows, word).sum()
            if index == 0:
                greedy = greedy and bool((rows.argmax(axis=1) == word).all())
            at += len(word)
    return scores, greedy


def _copy(subject: Subject, kv: ContiguousKV, more: int) -> ContiguousKV:
    """A cache that holds what ``kv`` does and has room for more tokens."""
    copy = subject.new_kv(kv.length + more)
    copy.fill_from(kv)
    return copy
