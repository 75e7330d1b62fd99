"""What a zarr array's metadata says about the places of its chunks. Pure; needs no zarr.

Only what is understood completely is answered: anything else is zarr's to judge. Known are formats
2 and 3, chunks of whole rows, and sharding with the standard index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_V3_KEYS = {
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value",
    "codecs", "attributes", "dimension_names", "storage_transformers",
}  # fmt: skip
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_CRC_BYTES = 4
# More than any model has; keeps sums of offsets far from what an int64 holds.
_MAX_CHUNK_ROWS = 1 << 32


@dataclass(frozen=True)
class ZarrLayout:
    """Where the chunks of one array ``[n_neurons, stride_bytes]`` of uint8 lie.

    Attributes:
        chunk_rows: neurons of a chunk; what is decoded as one.
        file_chunks: chunks of a file: 1, or those of a shard.
        sharded: whether a file has an index.
        index_at_start: where the index of a shard is.
        key: path of a file below the array, with ``{}`` for its number.
        raw: whether a chunk is its rows, so that each can be read by itself.
        trailing_bytes: bytes of a raw chunk behind its rows: the checksum of a crc32c codec.
        fill_value: every byte of a chunk that was left out.
    """

    chunk_rows: int
    file_chunks: int
    sharded: bool
    index_at_start: bool
    key: str
    raw: bool
    trailing_bytes: int
    fill_value: int


def layout_of(metadata: Mapping[str, Any], shape: tuple[int, int]) -> ZarrLayout | None:
    """Layout of an array from its ``zarr.json`` or ``.zarray``.

    Args:
        metadata: the parsed document.
        shape: ``(n_neurons, stride_bytes)`` that the array must have.

    Returns:
        None where only zarr itself knows: another shape or dtype, chunks that cut rows, nested shards,
        unusual index codecs, extensions.
    """
    if metadata.get("shape") != list(shape):
        return None
    version = metadata.get("zarr_format")
    if version == 2:
        return _layout_v2(metadata, shape)
    return _layout_v3(metadata, shape) if version == 3 else None


def _layout_v2(metadata: Mapping[str, Any], shape: tuple[int, int]) -> ZarrLayout | None:
    rows = _chunk_rows(metadata.get("chunks"), shape)
    key = {".": "{}.0", "/": "{}/0"}.get(metadata.get("dimension_separator", "."))
    fill = metadata.get("fill_value")
    fill = 0 if fill is None else _byte(fill)
    if rows is None or key is None or fill is None or metadata.get("dtype") != "|u1":
        return None
    packed = metadata.get("compressor") is not None or metadata.get("filters") is not None
    raw = not packed and metadata.get("order") == "C"
    return ZarrLayout(rows, 1, False, False, key, raw, 0, fill)


def _layout_v3(metadata: Mapping[str, Any], shape: tuple[int, int]) -> ZarrLayout | None:
    if not _understood(metadata) or metadata.get("data_type") != "uint8":
        return None
    grid = _named(metadata.get("chunk_grid"))
    key = _key(metadata.get("chunk_key_encoding"))
    fill = _byte(metadata.get("fill_value"))
    codecs = _codecs(metadata.get("codecs"))
    if grid is None or grid[0] != "regular" or key is None or fill is None or not codecs:
        return None
    rows = _chunk_rows(grid[1].get("chunk_shape"), shape)
    if rows is None:
        return None
    if codecs[0][0] == "sharding_indexed":
        return _sharded(codecs, rows, shape, key, fill)
    return _chunks(codecs, rows, 1, key, fill)


def _sharded(
    codecs: Sequence[tuple[str, Mapping[str, Any]]], rows: int, shape: tuple[int, int], key: str, fill: int
) -> ZarrLayout | None:
    options = codecs[0][1]
    inner_rows = _chunk_rows(options.get("chunk_shape"), shape)
    inner = _codecs(options.get("codecs"))
    location = options.get("index_location", "end")
    if len(codecs) > 1 or inner_rows is None or rows % inner_rows or not inner:
        return None
    if not options.keys() <= {"chunk_shape", "codecs", "index_codecs", "index_location"}:
        return None
    index = _codecs(options.get("index_codecs", _INDEX_CODECS))
    if index != _codecs(_INDEX_CODECS) or location not in ("start", "end"):
        return None
    return _chunks(inner, inner_rows, rows // inner_rows, key, fill, location)


def _chunks(
    codecs: Sequence[tuple[str, Mapping[str, Any]]],
    rows: int,
    per_file: int,
    key: str,
    fill: int,
    index: str | None = None,
) -> ZarrLayout | None:
    names = [name for name, _ in codecs]
    if "sharding_indexed" in names:
        return None
    # The byte order is nothing to single bytes. A checksum over a whole chunk can't be compared when one
    # row is read; the bundle has checksums of its own for every row.
    raw = names in (["bytes"], ["bytes", "crc32c"])
    trailing = _CRC_BYTES if raw and len(names) > 1 else 0
    return ZarrLayout(rows, per_file, index is not None, index == "start", key, raw, trailing, fill)


def _understood(metadata: Mapping[str, Any]) -> bool:
    """Whether a document of format 3 is an array without extensions that one has to know."""
    extra = (metadata[key] for key in metadata.keys() - _V3_KEYS)
    ignorable = all(isinstance(value, dict) and value.get("must_understand") is False for value in extra)
    return ignorable and metadata.get("node_type") == "array" and not metadata.get("storage_transformers")


def _chunk_rows(value: object, shape: tuple[int, int]) -> int | None:
    """Rows of a chunk, if it has whole ones."""
    if isinstance(value, list) and len(value) == 2 and value[1] == shape[1] and type(value[0]) is int:
        return value[0] if 0 < value[0] <= _MAX_CHUNK_ROWS else None
    return None


def _key(encoding: object) -> str | None:
    named = _named(encoding)
    if named is None or named[0] not in ("default", "v2"):
        return None
    separator = named[1].get("separator", "/" if named[0] == "default" else ".")
    if separator not in (".", "/"):
        return None
    return f"c{separator}{{}}{separator}0" if named[0] == "default" else f"{{}}{separator}0"


def _codecs(value: object) -> list[tuple[str, Mapping[str, Any]]] | None:
    if not isinstance(value, list):
        return None
    named = [_named(codec) for codec in value]
    known = [codec for codec in named if codec is not None]
    return known if len(known) == len(named) else None


def _named(value: object) -> tuple[str, Mapping[str, Any]] | None:
    """Name and configuration of an extension point; format 3 allows the bare name."""
    if isinstance(value, str):
        return value, {}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    configuration = value.get("configuration", {})
    return (value["name"], configuration) if isinstance(configuration, dict) else None


def _byte(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= 255 else None
