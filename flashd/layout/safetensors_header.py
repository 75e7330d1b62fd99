"""The header of the safetensors format, read and written without loading a tensor.

The ``safetensors`` library hands out whole tensors as NumPy arrays and knows no bfloat16 there;
flashd needs byte ranges (to stream a model larger than RAM) and bfloat16 without torch. The
format is an 8-byte length, a JSON object and the raw bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from flashd.errors import BundleCorruptError

_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_MAX_HEADER_BYTES = 100 << 20
_MAX_DIMS = 8
PREFIX_BYTES = 8


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: dtype by its safetensors name, shape, and absolute byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start_byte: int
    end_byte: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data."""
        return self.end_byte - self.start_byte


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length in bytes of the JSON header, from the file's first 8 bytes."""
    if len(prefix) < PREFIX_BYTES:
        raise BundleCorruptError(f"{where}: {file_bytes} bytes is too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(_MAX_HEADER_BYTES, file_bytes - PREFIX_BYTES):
        raise BundleCorruptError(
            f"{where}: header of {length} bytes in a file of {file_bytes}; the file is truncated "
            "or no safetensors file: download it again"
        )
    return int(length)


def parse_header(raw: bytes, file_bytes: int, where: str) -> dict[str, TensorEntry]:
    """Tensors by name.

    Raises:
        BundleCorruptError: the header is malformed, or a tensor ends behind the file's end.
    """
    try:
        body = json.loads(raw)
        return {
            name: _entry(name, item, PREFIX_BYTES + len(raw), file_bytes)
            for name, item in body.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise BundleCorruptError(f"{where}: {exc}; download or convert it again") from exc


def _entry(name: str, item: Any, data_start: int, file_bytes: int) -> TensorEntry:
    dtype, shape = item["dtype"], tuple(item["shape"])
    start, end = item["data_offsets"]
    if len(shape) > _MAX_DIMS or not all(
        isinstance(n, int) and 0 <= n < 1 << 63 for n in (*shape, start, end)
    ):
        raise ValueError(f"tensor {name!r} has a shape or offset that no tensor has")
    if dtype in _ITEM_BYTES and end - start != prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r}: {end - start} bytes for {dtype} {list(shape)}")
    if end < start or data_start + end > file_bytes:
        raise ValueError(
            f"tensor {name!r} ends at byte {data_start + end} of a file of {file_bytes}: truncated"
        )
    return TensorEntry(str(dtype), shape, data_start + start, data_start + end)


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Header bytes for tensors laid out in the mapping's order, and where each will lie.

    Args:
        tensors: name -> (safetensors dtype, shape).

    Returns:
        The file's first bytes (length prefix included; padded so that data starts on 64) and
        the absolute byte range of every tensor.
    """
    items: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + prod(shape) * _ITEM_BYTES[dtype]
        items[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(items, separators=(",", ":")).encode()
    raw += b" " * (-(PREFIX_BYTES + len(raw)) % 64)
    data_start = PREFIX_BYTES + len(raw)
    entries = {
        name: TensorEntry(
            item["dtype"],
            tuple(item["shape"]),
            data_start + item["data_offsets"][0],
            data_start + item["data_offsets"][1],
        )
        for name, item in items.items()
    }
    return struct.pack("<Q", len(raw)) + raw, entries
