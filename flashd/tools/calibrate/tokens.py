"""Texts -> sequences of tokens: of every stretch of a file most trains, then some validates, then some tests.

The parts are long pieces of text: tokens from the middle of a page that was trained on would flatter the
predictor. A file has several stretches, as it may change its kind of text on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flashd.errors import CalibrationError
from flashd.layout.manifest import TOKENIZER, Manifest
from flashd.runtime.tokenizer import Tokenizer
from flashd.types import I64Array

MAX_SEQUENCE_TOKENS = 512
SPLITS = ("train", "validation", "test")
# Where in a stretch the parts begin, how many stretches a file has, and of how many sequences at least.
_STARTS = (0.0, 0.8, 0.9)
_STRETCHES, _STRETCH_SEQUENCES = 8, 10
_MIN_SEQUENCE_TOKENS = 8
# A token of any language is hardly ever longer on average: what is read of a large file.
_BYTES_PER_TOKEN = 16
_READ_BYTES = 8 << 20
_MIN_SAMPLES, _MAX_SAMPLES = 10_000, 200_000
_SAMPLES_TIMES_WEIGHTS = 6e13


@dataclass(frozen=True)
class Sequences:
    """Token sequences in the order of recording: training, validation, test.

    Attributes:
        tokens: ``int64[n]`` each.
        split: index into ``SPLITS`` of each.
    """

    tokens: list[I64Array]
    split: list[int]

    @property
    def total(self) -> int:
        """Tokens in all."""
        return sum(map(len, self.tokens))

    def part(self, split: str) -> list[I64Array]:
        """The sequences of one part."""
        wanted = SPLITS.index(split)
        return [tokens for tokens, which in zip(self.tokens, self.split, strict=True) if which == wanted]

    def rows(self, split: str) -> slice:
        """Where its tokens are among all tokens."""
        wanted = SPLITS.index(split)
        sizes = [sum(len(t) for t in self.part(name)) for name in SPLITS]
        return slice(sum(sizes[:wanted]), sum(sizes[: wanted + 1]))


def default_samples(parameters: int) -> int:
    """Tokens for a model of so many weights: what takes about as long for each, within bounds."""
    return int(min(_MAX_SAMPLES, max(_MIN_SAMPLES, _SAMPLES_TIMES_WEIGHTS / max(1, parameters))))


def read_sequences(
    directory: Path, manifest: Manifest, texts: Sequence[Path], samples: int, note: Callable[[str], None]
) -> Sequences:
    """Tokenize texts.

    Args:
        directory: the bundle, for its tokenizer.
        manifest: of the bundle.
        texts: files in UTF-8; of each as much as its share of ``samples``, from all over it.
        samples: tokens at most.
        note: told when the texts are shorter.

    Raises:
        CalibrationError: no tokenizer, or a text that cannot be read or is too short.
    """
    if manifest.tokenizer is None or not any(entry.name == TOKENIZER for entry in manifest.files):
        raise CalibrationError(
            f"{directory}: the bundle has no tokenizer; convert it again with --tokenizer tokenizer.json"
        )
    tokenizer = Tokenizer(directory / TOKENIZER, manifest.tokenizer)
    bos = manifest.tokenizer.bos_id if manifest.tokenizer.add_bos else None
    length = min(MAX_SEQUENCE_TOKENS, manifest.model.max_context)
    files = []
    left = samples
    for index, path in enumerate(texts):
        share = -(-left // (len(texts) - index))
        ids = spread(tokenizer.encode(read_text(path, share * _BYTES_PER_TOKEN), plain=False), share)
        if ids and max(ids) >= manifest.model.vocab_size:
            raise CalibrationError(
                f"{directory}: its tokenizer has more tokens than the model; convert again"
            )
        left -= len(ids)
        files.append(cut(ids, length, bos))
    if left > 0:
        note(f"the texts have {samples - left} tokens, fewer than the {samples} wanted; more would be better")
    return split_files(files)


def read_text(path: Path, limit_bytes: int) -> str:
    """A text, or pieces from all over it where it is longer; of a pipe, the first bytes.

    Raises:
        CalibrationError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size if path.is_file() else 0
            if size_bytes <= limit_bytes:
                return _read(file, limit_bytes).decode("utf-8", errors="replace")
            pieces = []
            for i in range(_STRETCHES):
                file.seek(i * size_bytes // _STRETCHES)
                piece = _read(file, limit_bytes // _STRETCHES).decode("utf-8", errors="ignore")
                # A piece from the middle begins and ends with a part of a word.
                pieces.append(piece[piece.find(" ") + 1 if i else 0 : piece.rfind(" ") + 1 or None])
            return "".join(pieces)
    except OSError as exc:
        raise CalibrationError(f"{path}: cannot read the text: {exc.strerror}; check --text") from exc


def _read(file: BinaryIO, limit_bytes: int) -> bytes:
    # In pieces: read() makes room for all that it is asked for, however short the file is.
    text = bytearray()
    while piece := file.read(min(_READ_BYTES, limit_bytes - len(text))):
        text += piece
    return bytes(text)


def spread(ids: Sequence[int], count: int) -> Sequence[int]:
    """As many of a text's tokens, in stretches from all over it."""
    if len(ids) <= count:
        return ids
    kept: list[int] = []
    for i in range(_STRETCHES):
        start, end = (i * len(ids) // _STRETCHES, (i + 1) * count // _STRETCHES)
        kept += ids[start : start + end - len(kept)]
    return kept


def cut(ids: Sequence[int], length: int, bos: int | None) -> list[I64Array]:
    """Sequences of ``length`` tokens, each with the model's first token in front if it wants one."""
    first = [] if bos is None else [bos]
    step = max(1, length - len(first))
    pieces = [first + list(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [np.array(piece, np.int64) for piece in pieces if len(piece) >= min(_MIN_SEQUENCE_TOKENS, length)]


def split_files(files: Sequence[Sequence[I64Array]]) -> Sequences:
    """Cut every file into the three parts.

    Raises:
        CalibrationError: there are not three sequences.
    """
    pairs = []
    for file in files:
        stretches = max(1, min(_STRETCHES, len(file) // _STRETCH_SEQUENCES))
        for i, tokens in enumerate(file):
            place = (i + 0.5) * stretches / len(file) % 1
            pairs.append((sum(place >= start for start in _STARTS) - 1, tokens))
    if len(pairs) < len(SPLITS):
        raise CalibrationError(
            f"the texts give {len(pairs)} sequences of tokens, at least {len(SPLITS)} are needed (to train, "
            "to choose thresholds, to measure); give more text"
        )
    if len({split for split, _ in pairs}) < len(SPLITS):  # short files: the parts go across them
        pairs = [(min(2, max(0, index - len(pairs) + 3)), tokens) for index, (_, tokens) in enumerate(pairs)]
    pairs.sort(key=lambda pair: pair[0])
    return Sequences([tokens for _, tokens in pairs], [split for split, _ in pairs])
