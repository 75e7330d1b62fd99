"""The small files beside the weights: read with a limit, and as text that can be written again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flashd.errors import ConversionError

# The largest of real models are some 2 MB; an object of the smallest items takes 25 times its text.
MAX_JSON_BYTES = 8 << 20
# The largest vocabularies (256 thousand tokens and their merges) are some 35 MB.
MAX_VOCABULARY_BYTES = 64 << 20


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """A whole file.

    Raises:
        ConversionError: it cannot be read, or is longer than ``limit_bytes``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as exc:
        raise ConversionError(f"cannot read {path}: {exc.strerror}; check the path and permissions") from exc
    if len(data) > limit_bytes:
        raise ConversionError(
            f"{path}: more than {limit_bytes} bytes, expected at most that; download it again"
        )
    return data


def read_text(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> str:
    """A UTF-8 file; errors as ``read_bounded``, and ``ConversionError`` if it is no UTF-8."""
    try:
        return read_bounded(path, limit_bytes).decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ConversionError(
            f"{path}: not UTF-8 text (at byte {exc.start}), expected that; download it again"
        ) from exc


def read_json(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object whose texts are all Unicode: an escape such as ``\\ud800`` alone is none, and
    would fail only when it is written.

    Raises:
        ConversionError: it cannot be read, is too long, or no such object.
    """
    try:
        value = json.loads(read_bounded(path, limit_bytes))
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ConversionError(
            f"{path}: holds the lone surrogate {exc.object[exc.start]!a}, which is no text; download it "
            "again or correct it"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise ConversionError(f"{path}: not valid JSON ({exc}); download it again") from exc
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: a JSON {type(value).__name__}, expected an object; download it again")
    return value


def printable(name: str) -> str:
    """A name out of the file system, or out of a file, as text that can be written: what is no
    Unicode becomes U+FFFD or an escape."""
    try:
        return os.fsencode(name).decode("utf-8", errors="replace")
    except UnicodeEncodeError:
        return ascii(name)
