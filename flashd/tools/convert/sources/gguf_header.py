"""The header of a GGUF file: metadata and tensor table.

Read here and not with ``gguf.GGUFReader``, which keeps an array object for every string: a
vocabulary of 128k tokens would cost it the better part of a gigabyte.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flashd.errors import ConversionError
from flashd.models.families import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL = 7
_MAX_DIMS = 4
# A vocabulary of 256 thousand tokens with its merges takes some 16 MB and a million values. Each
# value is a Python object: what is allowed here is some 400 MB of them.
_MAX_HEADER_BYTES = 64 << 20
_MAX_VALUES = 1 << 22
_DEFAULT_ALIGNMENT_BYTES = 32


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table; shape outermost first, offset absolute in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key (strings, numbers, lists) and the tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_header(path: Path) -> GGUFHeader:
    """Parse the front of a GGUF file.

    Raises:
        ConversionError: not GGUF, a version that isn't 2 or 3, truncated or malformed.
    """
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return _Parser(file, path.stat().st_size).header()
    except OSError as exc:
        raise ConversionError(f"cannot read {path}: {exc.strerror}; check the path and permissions") from exc
    except (ValueError, RecursionError) as exc:
        raise ConversionError(f"{path}: {exc}; download it again") from exc


class _Parser:
    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._left_bytes = size_bytes
        self._left_values = _MAX_VALUES

    def header(self) -> GGUFHeader:
        """The whole header. Raises ``ValueError``."""
        if self._bytes(4) != _MAGIC:
            raise ValueError("not a GGUF file (no magic bytes)")
        version = self._number("<I")
        if version not in _VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ValueError(f"GGUF {what}, expected little-endian version 2 or 3")
        n_tensors, n_keys = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        self._count(n_keys)
        self._count(n_tensors)
        for _ in range(n_keys):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        table = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {shown(alignment)}")
        start = -(-(self._size_bytes - self._left_bytes) // alignment) * alignment
        tensors = tuple(GGUFTensor(name, shape, kind, start + at) for name, shape, kind, at in table)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("two tensors of the same name")
        return GGUFHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n_dims = self._string(), self._number("<I")
        if n_dims > _MAX_DIMS:
            raise ValueError(f"tensor {shown(name)} with {n_dims} dimensions")
        dims = struct.unpack(f"<{n_dims}Q", self._bytes(8 * n_dims))
        kind, offset = struct.unpack("<IQ", self._bytes(12))
        return name, tuple(reversed(dims)), kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0]
        if kind != _ARRAY:
            raise ValueError(f"metadata of unknown type {kind}")
        element, count = struct.unpack("<IQ", self._bytes(12))
        self._count(count)
        if element in _SCALARS:
            return self._numbers(element, count)
        if element != _STRING:
            raise ValueError(f"metadata array of type {element}")
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._bytes(count * dtype.itemsize), dtype)
        return list((values != 0).tolist() if kind == _BOOL else values.tolist())

    def _string(self) -> str:
        count = int.from_bytes(self._bytes(8), "little")
        return self._bytes(count).decode("utf-8", errors="replace")

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _count(self, values: int) -> None:
        self._left_values -= values
        if self._left_values < 0:
            raise ValueError(f"a header of more than {_MAX_VALUES} values, more than any real model has")

    def _bytes(self, count: int) -> bytes:
        if count > self._left_bytes:
            raise ValueError(f"truncated: {self._left_bytes} bytes left in the header, expected {count}")
        if self._size_bytes - self._left_bytes + count > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of more than {_MAX_HEADER_BYTES} bytes, more than any real model has")
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError(f"truncated at byte {self._size_bytes}")
        self._left_bytes -= count
        return data
