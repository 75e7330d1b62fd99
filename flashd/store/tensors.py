"""Reading whole safetensors files into anonymous memory, hashed on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.read_once import ReadOnce
from flashd.errors import BundleCorruptError
from flashd.layout.geometry import round_up
from flashd.layout.safetensors_header import PREFIX_BYTES, TensorEntry, header_length, parse_header
from flashd.types import NUMPY_DTYPE, SAFETENSORS_DTYPE, WeightArray

_TENSOR_ALIGN_BYTES = 64
_DTYPES = {SAFETENSORS_DTYPE[name]: dtype for name, dtype in NUMPY_DTYPE.items()}


def tensor_entries(path: Path, remedy: str) -> Mapping[str, TensorEntry]:
    """Name, dtype, shape and place of every tensor of a file; reads the header alone.

    Args:
        path: the file.
        remedy: what to do about damage, for messages.

    Raises:
        BundleCorruptError: as ``load_tensors``.
    """
    with ReadOnce(path) as file:
        return _entries(_read_header(file, str(path)), file.size_bytes, str(path), remedy)


def load_tensors(path: Path, remedy: str) -> tuple[dict[str, WeightArray], str]:
    """Read all tensors; nothing of them stays in the page cache.

    Args:
        path: the file.
        remedy: what to do about damage, for messages.

    Returns:
        Arrays by name (float32, float16, or uint16 holding bfloat16 bits; their memory is freed when the
        last of them is) and the SHA-256 of header and tensors: the file's, if it has no gaps.

    Raises:
        BundleCorruptError: the file is no safetensors file, truncated, or holds other things.
        DiskReadError: the device failed.
    """
    with ReadOnce(path) as file:
        header = _read_header(file, str(path))
        tensors = _entries(header, file.size_bytes, str(path), remedy)
        starts: dict[str, int] = {}
        position = 0
        for name, entry in tensors.items():
            starts[name] = position
            position += round_up(entry.nbytes, _TENSOR_ALIGN_BYTES)
        arena = aligned_empty(position, huge_pages=True)
        loaded: dict[str, WeightArray] = {}
        digest = hashlib.sha256(header)
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].start_byte):
            raw = arena[starts[name] : starts[name] + entry.nbytes]
            file.read_into(entry.start_byte, raw)
            digest.update(raw.data)
            loaded[name] = raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)
    return loaded, digest.hexdigest()


def _read_header(file: ReadOnce, where: str) -> bytes:
    """The file's first bytes: length prefix and header."""
    prefix = np.empty(min(PREFIX_BYTES, file.size_bytes), np.uint8)
    file.read_into(0, prefix)
    length = header_length(prefix.tobytes(), file.size_bytes, where)
    raw = np.empty(PREFIX_BYTES + length, np.uint8)
    file.read_into(0, raw)
    return raw.tobytes()


def _entries(header: bytes, file_bytes: int, where: str, remedy: str) -> Mapping[str, TensorEntry]:
    tensors = parse_header(header[PREFIX_BYTES:], file_bytes, where)
    for name, entry in tensors.items():
        if entry.dtype not in _DTYPES or not 1 <= len(entry.shape) <= 2 or 0 in entry.shape:
            raise BundleCorruptError(
                f"{where}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, expected a vector or matrix "
                f"of {', '.join(_DTYPES)}; {remedy}"
            )
    total = sum(entry.nbytes for entry in tensors.values())
    if total > file_bytes:  # overlapping tensors, which could ask for any amount of memory
        raise BundleCorruptError(f"{where}: {total} bytes of tensors in {file_bytes}; {remedy}")
    return tensors
