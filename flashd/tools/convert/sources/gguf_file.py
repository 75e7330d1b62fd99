"""A GGUF file's tensors: plain floats as they are, quantised blocks expanded to float32.

The ``gguf`` package is imported here and nowhere else, and only when a GGUF file is converted.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np

from flashd.errors import ConversionError
from flashd.models.families import shown
from flashd.tools.convert.sources.base import SourceFile, TensorInfo, TensorSource
from flashd.tools.convert.sources.gguf_header import GGUFTensor, read_header
from flashd.types import DType, WeightArray

_PLAIN: dict[str, DType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Elements expanded at once: the expansion's scratch is a multiple of them.
_DEQUANTIZE_ELEMENTS = 1 << 20
# gguf expands 16 rows at a time; long rows keep it out of Python.
_DEQUANTIZE_ROW_ELEMENTS = 1 << 14


class GGUFSource(TensorSource):
    """Tensors and metadata of one GGUF file."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.files = (path,)
        self.metadata: dict[str, Any] = header.metadata
        parts = self.metadata.get("split.count")
        if parts is not None and (type(parts) is not int or parts > 1):
            raise ConversionError(
                f"{path}: one of {shown(parts)} parts (split.count), expected a whole file; merge them "
                "with llama-gguf-split --merge"
            )
        self._file = SourceFile(path)
        self.tensors = {}
        self._table = {tensor.name: tensor for tensor in header.tensors}
        try:
            for tensor in header.tensors:
                self.tensors[tensor.name] = self._info(tensor)
        except BaseException:
            self.close()
            raise

    def _info(self, tensor: GGUFTensor) -> TensorInfo:
        path = self._file.path
        try:
            kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        except ValueError:
            return TensorInfo(tensor.shape, f"ggml type {tensor.ggml_type}", None, path)
        dtype = _PLAIN.get(kind.name)
        if dtype is None and _can_dequantize(kind):
            dtype = "f32"
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if tensor.shape and tensor.shape[-1] % block:
            raise ConversionError(
                f"{path}: tensor {tensor.name!r} has rows of {tensor.shape[-1]}, no multiple of "
                f"{kind.name}'s block of {block}; download it again"
            )
        end = tensor.offset_bytes + prod(tensor.shape) // block * block_bytes
        if end > self._file.size_bytes:
            raise ConversionError(
                f"{path}: truncated, tensor {tensor.name!r} ends at byte {end} of a file of "
                f"{self._file.size_bytes}; download it again"
            )
        return TensorInfo(tensor.shape, kind.name.lower(), dtype, path)

    def read_rows(self, name: str, start: int, stop: int) -> WeightArray:
        """See ``TensorSource.read_rows``."""
        tensor, info = self._table[name], self.tensors[name]
        assert info.dtype is not None
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if len(tensor.shape) == 1 and info.quantized:
            raw = np.empty(tensor.shape[0] // block * block_bytes, np.uint8)
            self._file.read_into(tensor.offset_bytes, raw)
            return np.asarray(_dequantize(raw, kind, block, block_bytes)[start:stop], np.float32)
        columns = prod(tensor.shape[1:])
        row_bytes = columns // block * block_bytes
        offset = tensor.offset_bytes + start * row_bytes
        if not info.quantized:
            return self._file.read_array(offset, (stop - start, *tensor.shape[1:]), info.dtype)
        out = np.empty((stop - start, *tensor.shape[1:]), np.float32)
        step = max(1, _DEQUANTIZE_ELEMENTS // max(columns, 1))
        for row in range(0, stop - start, step):
            rows = out[row : row + step]
            raw = np.empty(len(rows) * row_bytes, np.uint8)
            self._file.read_into(offset + row * row_bytes, raw)
            rows.reshape(-1)[:] = _dequantize(raw, kind, block, block_bytes)
        return out

    def close(self) -> None:
        """See ``TensorSource.close``."""
        self._file.close()


def _dequantize(raw: Any, kind: Any, block: int, block_bytes: int) -> Any:
    """Flat quantised bytes -> flat float32. Blocks are independent, so how they are cut into
    rows changes the speed and no value."""
    n_blocks = raw.size // block_bytes
    per_row = max(1, _DEQUANTIZE_ROW_ELEMENTS // block)
    whole = n_blocks // per_row * per_row
    parts = []
    if whole:
        parts.append(gguf.dequantize(raw[: whole * block_bytes].reshape(-1, per_row * block_bytes), kind))
    if whole < n_blocks:
        parts.append(gguf.dequantize(raw[whole * block_bytes :].reshape(1, -1), kind))
    return np.concatenate([part.reshape(-1) for part in parts])


def _can_dequantize(kind: Any) -> bool:
    """Whether the installed gguf package expands this type."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
