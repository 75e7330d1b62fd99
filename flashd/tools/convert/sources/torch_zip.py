"""``pytorch_model.bin``: a zip archive of one pickle and raw storages, read without torch."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from math import prod
from pathlib import Path

import numpy as np

from flashd.errors import ConversionError
from flashd.tools.convert.sources.base import SourceFile, TensorInfo, TensorSource
from flashd.tools.convert.sources.unpickle import MAX_PICKLE_BYTES, PickledTensor, load_tensors
from flashd.types import DTYPES, NUMPY_DTYPE, DType, WeightArray

# Some 60 thousand tensors; zipfile makes an object of each entry.
_MAX_DIRECTORY_BYTES = 8 << 20
_MAX_BYTEORDER_BYTES = 16
_LOCAL_HEADER_BYTES = 30
_LEGACY_PICKLE_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_RESAVE = "load it with torch and save it again (torch.save of today writes zip files), or use safetensors"


class TorchZipSource(TensorSource):
    """Tensors of ``.bin`` shards in torch's zip format.

    Args:
        shards: file -> names it must hold, or None: all that it holds.
    """

    format = "pytorch"

    def __init__(self, shards: dict[Path, set[str] | None]) -> None:
        self.files = tuple(shards)
        self.tensors = {}
        self._open: dict[Path, SourceFile] = {}
        self._views: dict[str, tuple[PickledTensor, int]] = {}
        try:
            for path, wanted in shards.items():
                self._open[path] = SourceFile(path)
                self._read_archive(self._open[path], wanted)
        except BaseException:
            self.close()
            raise

    def _read_archive(self, file: SourceFile, wanted: set[str] | None) -> None:
        where = str(file.path)
        _refuse_legacy(file)
        members = _members(file)
        root = next((n[: -len("data.pkl")] for n in members if n.endswith("/data.pkl")), None)
        if root is None:
            raise ConversionError(f"{where}: a zip archive without torch's data.pkl; {_RESAVE}")
        order = members.get(f"{root}byteorder")
        if order is not None and _small_member(file, order, _MAX_BYTEORDER_BYTES).strip() != b"little":
            raise ConversionError(f"{where}: storages that are not little-endian; {_RESAVE}")
        views = load_tensors(_small_member(file, members[f"{root}data.pkl"], MAX_PICKLE_BYTES), where)
        for name in wanted or ():
            if name not in views:
                raise ConversionError(
                    f"{where}: no tensor {name!r}, which the index places there; index and shards do not "
                    "belong together: download them again"
                )
        for name, view in views.items():
            if wanted is None or name in wanted:
                self._add(file, name, view, members.get(f"{root}data/{view.storage.key}"))

    def _add(self, file: SourceFile, name: str, view: PickledTensor, member: zipfile.ZipInfo | None) -> None:
        where = f"{file.path}: tensor {name!r}"
        if member is None:
            raise ConversionError(f"{where}: its storage is not in the file; download it again")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ConversionError(f"{where}: a compressed storage, expected a stored one; {_RESAVE}")
        count, item_bytes = prod(view.shape), view.element.item_bytes
        if count and (view.last + 1) * item_bytes > member.file_size:
            raise ConversionError(
                f"{where}: reaches element {view.last} of a storage of {member.file_size} bytes; download it "
                "again"
            )
        if count * item_bytes > member.file_size:
            # A few bytes could otherwise stand for a weight of any size.
            raise ConversionError(
                f"{where}: shows the {member.file_size} bytes of its storage several times over, expected a "
                "weight of its own; call contiguous() on it and save it again"
            )
        start = _data_offset(file, member)
        if start + member.file_size > file.size_bytes:
            raise ConversionError(
                f"{where}: truncated, its storage ends at byte {start + member.file_size} of a file of "
                f"{file.size_bytes}; download it again"
            )
        dtype: DType | None = next((d for d in DTYPES if d == view.element.name), None)
        self.tensors[name] = TensorInfo(view.shape, view.element.name, dtype, file.path)
        self._views[name] = (view, start)

    def read_rows(self, name: str, start: int, stop: int) -> WeightArray:
        """See ``TensorSource.read_rows``. A view that isn't contiguous is read as the span of
        elements that its rows touch."""
        info, (view, data_start) = self.tensors[name], self._views[name]
        assert info.dtype is not None
        file, item = self._open[info.file], NUMPY_DTYPE[info.dtype].itemsize
        shape = (stop - start, *view.shape[1:])
        if not prod(shape):
            return np.empty(shape, NUMPY_DTYPE[info.dtype])
        first = view.offset + start * view.stride[0]
        span = 1 + sum((n - 1) * step for n, step in zip(shape, view.stride, strict=True))
        raw = file.read_array(data_start + first * item, (span,), info.dtype)
        strides = tuple(step * item for step in view.stride)
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False))

    def close(self) -> None:
        """See ``TensorSource.close``."""
        for file in self._open.values():
            file.close()


class _BoundedFile(io.FileIO):
    """A file that zipfile cannot be made to read at a stroke: what it asks for, it asks by numbers
    from the file."""

    def read(self, size: int | None = -1, /) -> bytes:
        """See ``io.FileIO.read``; ``ValueError`` if it would be too much."""
        if size is None or size < 0:
            size = self._rest_bytes()
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size} bytes, expected at most {_MAX_DIRECTORY_BYTES}")
        return super().read(size)

    def _rest_bytes(self) -> int:
        here = self.tell()
        rest = self.seek(0, io.SEEK_END) - here
        self.seek(here)
        return rest


def _members(file: SourceFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's directory."""
    try:
        with _BoundedFile(file.path) as raw, zipfile.ZipFile(raw) as archive:
            return {info.filename: info for info in archive.infolist()}
    except Exception as exc:  # zipfile raises what a damaged archive provokes
        reason = " ".join(str(exc).split())[:200]
        raise ConversionError(f"{file.path}: damaged or truncated zip ({reason}); download it again") from exc


def _small_member(file: SourceFile, member: zipfile.ZipInfo, limit_bytes: int) -> bytes:
    """A whole member; torch stores them as they are, so none can be larger than it looks."""
    name = f"{file.path}: {member.filename.rpartition('/')[2]!r}"
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ConversionError(f"{name} is compressed or encrypted, expected a stored member; {_RESAVE}")
    if member.file_size > limit_bytes:
        raise ConversionError(
            f"{name} has {member.file_size} bytes, expected at most {limit_bytes}; {_RESAVE}"
        )
    data = file.read(_data_offset(file, member), member.file_size)
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        raise ConversionError(f"{name} is damaged or truncated; download it again")
    return data


def _data_offset(file: SourceFile, member: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind its local header, whose extra field is not
    the central directory's (torch pads there, to align storages)."""
    header = file.read(member.header_offset, _LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ConversionError(f"{file.path}: no zip member at byte {member.header_offset}; download it again")
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    return int(member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


def _refuse_legacy(file: SourceFile) -> None:
    head = file.read(0, 512)
    if head.startswith(b"PK"):
        return
    if head[257:262] == b"ustar":
        raise ConversionError(f"{file.path}: torch's legacy tar format, expected its zip format; {_RESAVE}")
    if head.startswith(_LEGACY_PICKLE_MAGIC):
        raise ConversionError(
            f"{file.path}: torch's legacy pickle format, expected its zip format; {_RESAVE}"
        )
    raise ConversionError(f"{file.path}: not a torch checkpoint (no zip archive); download it again")
