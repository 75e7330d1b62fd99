"""One or several ``.safetensors`` files."""

from __future__ import annotations

from math import prod
from pathlib import Path

from flashd.errors import BundleCorruptError, ConversionError
from flashd.layout.safetensors_header import PREFIX_BYTES, header_length, parse_header
from flashd.tools.convert.sources.base import SourceFile, TensorInfo, TensorSource
from flashd.types import NUMPY_DTYPE, SAFETENSORS_DTYPE, DType, WeightArray

_DTYPES: dict[str, DType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Some 200 thousand tensors; parsed, the smallest JSON items take 25 times their text.
_MAX_HEADER_BYTES = 32 << 20
assert set(_DTYPES) == set(SAFETENSORS_DTYPE.values())


class SafetensorsSource(TensorSource):
    """Tensors of ``.safetensors`` shards.

    Args:
        shards: file -> names it must hold, or None: all that it holds.
    """

    format = "safetensors"

    def __init__(self, shards: dict[Path, set[str] | None]) -> None:
        self.files = tuple(shards)
        self.tensors = {}
        self._open: dict[Path, SourceFile] = {}
        self._start_bytes: dict[str, int] = {}
        try:
            for path, wanted in shards.items():
                self._open[path] = SourceFile(path)
                self._read_header(self._open[path], wanted)
        except BaseException:
            self.close()
            raise

    def _read_header(self, file: SourceFile, wanted: set[str] | None) -> None:
        where = str(file.path)
        try:
            length = header_length(file.read(0, PREFIX_BYTES), file.size_bytes, where)
            if length > _MAX_HEADER_BYTES:
                raise ConversionError(
                    f"{where}: header of {length} bytes, expected at most {_MAX_HEADER_BYTES}; download it "
                    "again"
                )
            entries = parse_header(file.read(PREFIX_BYTES, length), file.size_bytes, where)
        except BundleCorruptError as exc:
            raise ConversionError(str(exc)) from exc
        for name in wanted or ():
            if name not in entries:
                raise ConversionError(
                    f"{where}: no tensor {name!r}, which the index places there; index and shards do not "
                    "belong together: download them again"
                )
        for name, entry in entries.items():
            if wanted is None or name in wanted:
                dtype = _DTYPES.get(entry.dtype)
                self.tensors[name] = TensorInfo(entry.shape, dtype or entry.dtype, dtype, file.path)
                self._start_bytes[name] = entry.start_byte

    def read_rows(self, name: str, start: int, stop: int) -> WeightArray:
        """See ``TensorSource.read_rows``."""
        info = self.tensors[name]
        assert info.dtype is not None
        row_bytes = prod(info.shape[1:]) * NUMPY_DTYPE[info.dtype].itemsize
        offset = self._start_bytes[name] + start * row_bytes
        return self._open[info.file].read_array(offset, (stop - start, *info.shape[1:]), info.dtype)

    def close(self) -> None:
        """See ``TensorSource.close``."""
        for file in self._open.values():
            file.close()
