"""zarr's codecs, held to the size that a chunk has: some hundred bytes of a packed chunk may say that
they are gigabytes, which would be in memory before anyone compares the shape.

Where the size is known, nothing beyond it is decoded; behind another compressor it is not, and what no
codec makes of a chunk is refused. Codecs that are not in ``_UNPACK`` are zarr's. Imports zarr.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, cast

import numcodecs  # type: ignore[import-untyped]  # it has no types
import numpy as np
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, TransposeCodec
from zarr.codecs._v2 import V2Codec
from zarr.core.array import AsyncArray
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer

from flashd.store.zarr_chunks import most_stored_bytes
from flashd.types import U8Array

_CRC_BYTES = 4
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPED = 0x184D2A50
_ZSTD_REPEATED, _ZSTD_PACKED = 1, 2
_ZSTD_BLOCK_BYTES = 128 << 10


def bound_codecs(array: AsyncArray[Any]) -> None:
    """Let ``array`` decode only as much as its chunks have."""
    pipeline = array.codec_pipeline
    chunk_bytes = prod(array.chunks) * array.dtype.itemsize
    # As zarr itself sets it: the class is frozen, and its constructor takes no pipeline.
    bounded = _bounded(cast(Iterable[Codec], pipeline), chunk_bytes)
    object.__setattr__(array, "codec_pipeline", type(pipeline).from_codecs(bounded))


def _bounded(codecs: Iterable[Codec], chunk_bytes: int) -> list[Codec]:
    """The same codecs in the same order, bounded; ``chunk_bytes`` is for format 2 only."""
    bounded: list[Codec] = []
    # Bytes that a codec is given beside those of the chunk; None if nobody knows.
    extra_bytes: int | None = 0
    for codec in codecs:
        if isinstance(codec, ShardingCodec):
            extra_bytes = None
            inside = _bounded(codec.codecs, chunk_bytes)
            codec = ShardingCodec(
                chunk_shape=codec.chunk_shape,
                codecs=inside,
                index_codecs=codec.index_codecs,
                index_location=codec.index_location,
            )
        elif isinstance(codec, V2Codec):
            packed = codec.compressor is not None and codec.compressor.codec_id in _UNPACK
            if packed:
                size_bytes = None if codec.filters else chunk_bytes
                compressor = _BoundedNumcodec(codec.compressor, size_bytes, most_stored_bytes(chunk_bytes))
                codec = V2Codec(filters=codec.filters, compressor=compressor)
        elif isinstance(codec, BytesBytesCodec):
            name = _name(codec)
            if name in _UNPACK:
                bounded.append(_BoundedCodec(codec, name, extra_bytes))
                extra_bytes = None
                continue
            known = isinstance(codec, Crc32cCodec) and extra_bytes is not None
            extra_bytes = extra_bytes + _CRC_BYTES if known and extra_bytes is not None else None
        elif not isinstance(codec, BytesCodec | TransposeCodec):
            extra_bytes = None
        bounded.append(codec)
    return bounded


def _name(codec: Codec) -> str:
    return str(codec.to_dict().get("name", "")).removeprefix("numcodecs.")


class _BoundedCodec(BytesBytesCodec):
    """A compressor of format 3.

    Args:
        codec: zarr's.
        name: of the format, a key of ``_UNPACK``.
        extra_bytes: what a chunk has beside its elements; None if unknown.
    """

    is_fixed_size = False

    def __init__(self, codec: BytesBytesCodec, name: str, extra_bytes: int | None) -> None:
        self._codec = codec
        self._format = name
        self._extra_bytes = extra_bytes

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """As the codec itself."""
        return self._codec.compute_encoded_size(input_byte_length, chunk_spec)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        chunk_bytes = prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        size_bytes = None if self._extra_bytes is None else chunk_bytes + self._extra_bytes
        stored = np.asarray(chunk_data.as_numpy_array()).view(np.uint8)
        rows = unpack(self._format, stored, size_bytes, most_stored_bytes(chunk_bytes))
        return chunk_spec.prototype.buffer.from_array_like(rows)


class _BoundedNumcodec:
    """A compressor of format 2; decodes as ``_BoundedCodec`` does."""

    def __init__(self, codec: Any, size_bytes: int | None, limit_bytes: int) -> None:
        self._codec = codec
        self.codec_id = codec.codec_id
        self._size_bytes = size_bytes
        self._limit_bytes = limit_bytes

    def encode(self, buf: Any) -> Any:
        """As the codec itself."""
        return self._codec.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> U8Array:
        """The chunk's bytes; ``out`` is not used by zarr."""
        stored = np.asarray(buf).view(np.uint8).reshape(-1)
        return unpack(self.codec_id, stored, self._size_bytes, self._limit_bytes)

    def get_config(self) -> Any:
        """As the codec itself."""
        return self._codec.get_config()

    @classmethod
    def from_config(cls, config: Any) -> _BoundedNumcodec:
        """Refused: only a registry of codecs calls this, and this one is in none."""
        raise NotImplementedError(f"a bounded codec from {config}")


def unpack(name: str, stored: U8Array, size_bytes: int | None, limit_bytes: int) -> U8Array:
    """Decode a chunk that may be anything.

    Args:
        name: the format.
        stored: the chunk, ``[n]``.
        size_bytes: what it must decode to; None if unknown.
        limit_bytes: what it may decode to where the size is unknown.

    Returns:
        The bytes, ``[size_bytes]``.

    Raises:
        ValueError: another size. What the codec raises otherwise.
    """
    rows = _UNPACK[name](stored, size_bytes, limit_bytes)
    _check(len(rows), size_bytes, limit_bytes)
    return rows


def _check(got_bytes: int, size_bytes: int | None, limit_bytes: int) -> None:
    if size_bytes is None and got_bytes > limit_bytes:
        raise ValueError(f"decodes to {got_bytes} bytes, expected at most {limit_bytes}")
    if size_bytes is not None and got_bytes != size_bytes:
        more = " or more" if got_bytes > size_bytes else ""
        raise ValueError(f"decodes to {got_bytes} bytes{more}, expected {size_bytes}")


def _zstd(stored: U8Array, size_bytes: int | None, limit_bytes: int) -> U8Array:
    declared, most = _zstd_content(stored.tobytes())
    if declared is not None:
        _check(declared, size_bytes, limit_bytes)
    elif size_bytes is None:
        # How much the blocks hold is known only roughly.
        _check(most, None, 4 * limit_bytes)
    else:  # the codec stops at the end of what it is given, and says when it is not full
        rows = np.empty(size_bytes, np.uint8)
        numcodecs.Zstd().decode(stored, rows)
        return rows
    return np.frombuffer(numcodecs.Zstd().decode(stored), np.uint8)


def _zstd_content(stored: bytes) -> tuple[int | None, int]:
    """What zstd frames (RFC 8878, 3.1) decode to by their headers, None if one of them does not say,
    and the most that their blocks can hold. Each frame counts: the codec decodes all."""
    declared: int | None = 0
    most = at = 0
    while at < len(stored):
        magic = int.from_bytes(stored[at : at + 4], "little")
        if magic & ~15 == _ZSTD_SKIPPED:
            at += 8 + int.from_bytes(stored[at + 4 : at + 8], "little")
            continue
        if magic != _ZSTD_MAGIC or at + 6 > len(stored):
            raise ValueError(f"no zstd frame at byte {at}")
        flags = stored[at + 4]
        single = flags >> 5 & 1
        field = (single, 2, 4, 8)[flags >> 6]
        at += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3]
        # The form of two bytes counts from 256.
        content = int.from_bytes(stored[at : at + field], "little") + (256 if field == 2 else 0)
        declared = declared + content if field and declared is not None else None
        at += field
        last = False
        while not last:
            if at + 3 > len(stored):
                raise ValueError("the zstd frame is cut short")
            block = int.from_bytes(stored[at : at + 3], "little")
            last, kind, nbytes = bool(block & 1), block >> 1 & 3, block >> 3
            at += 3 + (1 if kind == _ZSTD_REPEATED else nbytes)
            most += nbytes if kind < _ZSTD_PACKED else _ZSTD_BLOCK_BYTES
        at += 4 * (flags >> 2 & 1)  # a checksum
    return declared, most


def _headed(codec: Any, at: int) -> Callable[[U8Array, int | None, int], U8Array]:
    """A format whose header has the size in four bytes at ``at``; the decoder takes it at its word."""

    def decode(stored: U8Array, size_bytes: int | None, limit_bytes: int) -> U8Array:
        _check(int.from_bytes(stored[at : at + 4].tobytes(), "little"), size_bytes, limit_bytes)
        return np.frombuffer(codec.decode(stored), np.uint8)

    return decode


def _file(opener: Callable[[io.BytesIO], Any]) -> Callable[[U8Array, int | None, int], U8Array]:
    """A format that says no size: read one byte more than it may have, which also reads its checksum."""

    def decode(stored: U8Array, size_bytes: int | None, limit_bytes: int) -> U8Array:
        most = limit_bytes if size_bytes is None else size_bytes
        with opener(io.BytesIO(stored.tobytes())) as file:
            return np.frombuffer(file.read(most + 1), np.uint8)

    return decode


def _zlib(stored: U8Array, size_bytes: int | None, limit_bytes: int) -> U8Array:
    most = limit_bytes if size_bytes is None else size_bytes
    stream = zlib.decompressobj()
    rows = np.frombuffer(stream.decompress(stored.tobytes(), most + 1), np.uint8)
    if len(rows) <= most and not stream.eof:
        raise ValueError("incomplete or truncated zlib stream")
    return rows


_UNPACK: dict[str, Callable[[U8Array, int | None, int], U8Array]] = {
    "zstd": _zstd,
    "blosc": _headed(numcodecs.Blosc(), 4),
    "lz4": _headed(numcodecs.LZ4(), 0),
    "gzip": _file(lambda raw: gzip.GzipFile(fileobj=raw)),
    "bz2": _file(bz2.BZ2File),
    "zlib": _zlib,
}
