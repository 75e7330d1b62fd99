"""Windows of tokens and cloze items out of text files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashd.errors import ConfigError
from flashd.types import I64Array

# No tokenizer in use makes tokens longer than that on average, whatever the language.
_CHARS_PER_TOKEN = 32
_MIN_CHARS = 1 << 20
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_LAST_WORD = re.compile(r"([A-Za-z]{3,})[.!?\"')\]]*$")
_MIN_PASSAGE_WORDS = 20
_MAX_PASSAGE_WORDS = 150


def read_text(path: Path, max_chars: int | None = None) -> str:
    """A file's text, or its beginning; what is no UTF-8 is replaced.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read() if max_chars is None else file.read(max_chars)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot read the text: {exc.strerror or exc}") from exc


def read_ids(path: Path, vocab_size: int) -> list[int]:
    """Token ids in a text file: numbers separated by anything else, so JSON will do, too.

    Raises:
        ConfigError: something else than numbers, or ids that the model does not have.
    """
    words = re.split(r"[\s,\[\]]+", read_text(path).strip(" \t\r\n,[]"))
    for word in words:
        if not word.isdecimal():
            raise ConfigError(f"{path}: {word[:40]!r} is no token id; expected whole numbers")
    ids = [int(word) for word in words]
    if max(ids) >= vocab_size:
        raise ConfigError(f"{path}: token {max(ids)}, the model's vocabulary has {vocab_size}")
    return ids


def max_chars(tokens: int) -> int | None:
    """How much of a text to read for so many tokens; None for all of it."""
    return max(_MIN_CHARS, _CHARS_PER_TOKEN * tokens) if tokens else None


def windows(
    sequences: Sequence[Sequence[int]], bos_id: int | None, context: int, tokens: int
) -> list[I64Array]:
    """Cut each sequence into windows of ``context`` tokens, and take them in turn from each.

    All but a window's first token are scored.

    Args:
        sequences: token ids of each text.
        bos_id: put in front of each window; None: nothing is.
        context: tokens of a window, that one included.
        tokens: to score at most; 0: all.

    Raises:
        ConfigError: not one token can be scored.
    """
    head = [] if bos_id is None else [bos_id]
    step = context - len(head)
    cut = [[[*head, *ids[start : start + step]] for start in range(0, len(ids), step)] for ids in sequences]
    found: list[I64Array] = []
    left = tokens or sum(map(len, sequences))
    for turn in range(max(map(len, cut), default=0)):
        for pieces in cut:
            if turn < len(pieces) and len(pieces[turn]) > 1 and left > 0:
                ids = pieces[turn][: left + 1]
                found.append(np.array(ids, np.int64))
                left -= len(ids) - 1
    if not found:
        raise ConfigError(
            f"the text has {sum(map(len, sequences))} tokens, too short to predict one; give a longer one"
        )
    return found


@dataclass(frozen=True)
class ClozeItem:
    """A passage whose last word is to be guessed (LAMBADA, arXiv 1606.06031).

    Attributes:
        context: ids of the passage without its last word.
        words: ids of the words to choose from, the right one first.
    """

    context: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]


def passages_of(text: str) -> list[tuple[str, str]]:
    """(passage without its last word, last word) of the text's paragraphs of two sentences or more."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = 0
        kept: list[str] = []
        for sentence in _SENTENCE.split(" ".join(paragraph.split())):
            count = sentence.count(" ") + 1
            if kept and words + count > _MAX_PASSAGE_WORDS:
                break
            kept.append(sentence)
            words += count
        if len(kept) >= 2 and _MIN_PASSAGE_WORDS <= words <= 2 * _MAX_PASSAGE_WORDS:
            found += _split(" ".join(kept))
    return found


def passages_in(path: Path) -> list[tuple[str, str]]:
    """(passage without its last word, last word) of each line: text, or an object with a ``text``.

    Raises:
        ConfigError: the file cannot be read, or no line ends with a word.
    """
    found = []
    for line in read_text(path).split("\n"):
        text = line.strip()
        if text.startswith("{"):
            try:
                text = str(json.loads(text)["text"]).strip()
            except (ValueError, KeyError, TypeError) as exc:
                raise ConfigError(f'{path}: {line[:60]!r} is no object with a "text"') from exc
        found += _split(" ".join(text.split()))
    if not found:
        raise ConfigError(f"{path}: no line is a passage of two words or more; expected one a line")
    return found


def _split(passage: str) -> list[tuple[str, str]]:
    """The passage without its last word, and that word; nothing if there is none."""
    match = _LAST_WORD.search(passage)
    if match is None or not passage[: match.start()].strip() or passage[match.start() - 1] != " ":
        return []
    return [(passage[: match.start()].rstrip(), match.group(1))]


def cloze_items(
    passages: Sequence[tuple[str, str]],
    encode: Callable[[str], list[int]],
    *,
    items: int,
    distractors: int,
    max_tokens: int,
) -> list[ClozeItem]:
    """Items out of passages spread evenly over those given, each with last words of other ones.

    Args:
        passages: from ``passages_of`` or ``passages_in``.
        encode: the tokenizer.
        items: at most; 0: all.
        distractors: words beside the right one; the same ones in every run.
        max_tokens: longest item.

    Raises:
        ConfigError: there are too few passages for one item.
    """
    vocabulary = sorted({word for _, word in passages})
    if len(vocabulary) <= distractors:
        raise ConfigError(
            f"the passages end with {len(vocabulary)} different words, {distractors + 1} are needed for a "
            "cloze item; give more text, or --distractors"
        )
    rng = np.random.default_rng(0)
    order = np.linspace(0, len(passages) - 1, min(items or len(passages), len(passages)))
    found = []
    for index in order.astype(int):
        context, word = passages[index]
        others = [other for other in vocabulary if other.lower() != word.lower()]
        chosen = [word, *rng.choice(others, min(distractors, len(others)), replace=False).tolist()]
        ids = encode(context)
        candidates = [_continuation(ids, encode(f"{context} {other}")) for other in chosen]
        longest = max(map(len, candidates))
        # A tokenizer that joins the last word to what is before it leaves nothing to guess.
        if all(candidates) and len(ids) + longest <= max_tokens and len(set(candidates)) == len(candidates):
            found.append(ClozeItem(tuple(ids), tuple(candidates)))
    if not found:
        raise ConfigError(f"no passage fits into {max_tokens} tokens; give shorter ones, or --context")
    return found


def _continuation(ids: list[int], whole: list[int]) -> tuple[int, ...]:
    """What ``whole`` has behind ``ids``; nothing if it does not go on from there."""
    return tuple(whole[len(ids) :]) if whole[: len(ids)] == ids else ()
