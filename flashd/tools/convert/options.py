"""What a conversion can be asked for, and what it reports while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flashd.types import DType, StoreKind


@dataclass(frozen=True)
class ConvertOptions:
    """Choices of one conversion.

    Attributes:
        dtype: weight type of the bundle. ``auto``: the narrowest that holds the checkpoint's
            values exactly; f16 for quantised GGUF files.
        store: one bundle file, or a zarr group.
        overwrite: replace a bundle that is already there, at the very end.
        tokenizer: a ``tokenizer.json``, or a directory with one, to use instead of the source's.
    """

    dtype: DType | Literal["auto"] = "auto"
    store: StoreKind = "file"
    overwrite: bool = False
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Progress:
    """How far a conversion is. Bytes are bytes of the bundle, over all phases together.

    Attributes:
        phase: ``resume`` (checking what an earlier run wrote), ``resident``, ``ffn``, ``finish``.
    """

    phase: str
    done_bytes: int
    total_bytes: int
