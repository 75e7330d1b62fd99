"""The contract of a checkpoint format, and exact reads of byte ranges."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashd.errors import ConversionError
from flashd.types import NUMPY_DTYPE, DType, U8Array, WeightArray


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        shape: outermost dimension first; a linear layer's matrix is ``[out, in]``.
        stored: dtype by the format's own name, for messages and provenance, e.g. ``q4_1``.
        dtype: what ``read_rows`` returns; None: flashd cannot read it as a weight.
        file: the file that holds it.
    """

    shape: tuple[int, ...]
    stored: str
    dtype: DType | None
    file: Path

    @property
    def quantized(self) -> bool:
        """Whether reading it expands blocks of integers to float32."""
        return self.dtype is not None and self.stored != self.dtype


class TensorSource(ABC):
    """A checkpoint's tensors.

    Attributes:
        format: what provenance calls it.
        files: every file that belongs to the checkpoint's weights.
        tensors: what is in it, by name.
        identity: what tells it from others beside its files; empty if these are all.
    """

    format: str
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    identity: str = ""

    @abstractmethod
    def read_rows(self, name: str, start: int, stop: int) -> WeightArray:
        """Rows ``start..stop-1`` along the first axis, in the dtype its ``TensorInfo`` says.

        Raises:
            ConversionError: the file is truncated or cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Close its files. Idempotent."""


class SourceFile:
    """A checkpoint file, read with ``pread``: its pages never count as this process's memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise ConversionError(
                f"cannot open {path}: {exc.strerror}; check the path and permissions"
            ) from exc
        self.size_bytes = os.fstat(self._fd).st_size

    def read(self, offset_bytes: int, count_bytes: int) -> bytes:
        """A small range, e.g. a header."""
        out = np.empty(max(0, min(count_bytes, self.size_bytes - offset_bytes)), np.uint8)
        self.read_into(offset_bytes, out)
        return out.tobytes()

    def read_into(self, offset_bytes: int, out: U8Array) -> None:
        """Fill ``out`` from ``offset_bytes`` on; ``ConversionError`` if the file ends earlier."""
        view, done = out.data, 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset_bytes + done)
            except OSError as exc:
                raise ConversionError(f"cannot read {self.path}: {exc.strerror}; check the disk") from exc
            if count == 0:
                raise ConversionError(
                    f"{self.path}: truncated, ends at byte {offset_bytes + done}, expected at least "
                    f"{offset_bytes + len(view)}; download it again"
                )
            done += count

    def read_array(self, offset_bytes: int, shape: tuple[int, ...], dtype: DType) -> WeightArray:
        """A contiguous array of weights."""
        out = np.empty(shape, NUMPY_DTYPE[dtype])
        self.read_into(offset_bytes, out.reshape(-1).view(np.uint8))
        return out

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
