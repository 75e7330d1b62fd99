"""Where every chunk of a zarr array lies: resolved once, when a store is opened. Needs no zarr."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashd import kernels
from flashd.disk.read_once import ReadOnce
from flashd.errors import BundleCorruptError, DiskReadError, FlashdError
from flashd.store.zarr_layout import ZarrLayout, layout_of
from flashd.types import FFNGeometry, I64Array, U8Array

NO_FILE = -1
_LEFT_OUT = np.uint64(2**64 - 1)
_ENTRY_BYTES = 16
_SUM_BYTES = 4
# A metadata file is a few hundred bytes.
MAX_DOCUMENT_BYTES = 1 << 20
# A shard's index is read whole: this many entries are 64 MiB.
_MAX_INDEX_CHUNKS = 1 << 22
# An index is one small read; several at a time hide a slow device's latency.
_READ_AT_ONCE = 8
_REMEDY = "copy the bundle again or convert the model again"


@dataclass(frozen=True)
class Runs:
    """Neighbouring neurons that go to neighbouring rows; all ``[n]`` int64.

    Attributes:
        neuron: the first of each run.
        row: where it goes.
        count: neurons of the run, at least 1.
    """

    neuron: I64Array
    row: I64Array
    count: I64Array

    def __len__(self) -> int:
        return len(self.neuron)

    def take(self, which: I64Array) -> Runs:
        """Some of them, by index."""
        return Runs(self.neuron[which], self.row[which], self.count[which])

    def copy(self, start: int, rows: U8Array, out: U8Array) -> None:
        """Copy the rows from ``rows``, whose first is neuron ``start``."""
        neuron, row, count = (self.neuron - start).tolist(), self.row.tolist(), self.count.tolist()
        for source, dest, n in zip(neuron, row, count, strict=True):
            out[dest : dest + n] = rows[source : source + n]

    @classmethod
    def of(cls, ids: I64Array, rows: I64Array) -> Runs:
        """Runs of ids in the order given, each id to its row."""
        new = np.diff(ids, prepend=ids[:1] - 2) != 1
        new |= np.diff(rows, prepend=rows[:1] - 2) != 1
        first = np.flatnonzero(new)
        return cls(ids[first], rows[first], np.diff(first, append=len(ids)))

    @classmethod
    def range(cls, start: int, stop: int) -> Runs:
        """One run of neurons ``start..stop-1``, to row 0 and on."""
        return cls(np.array([start]), np.array([0]), np.array([stop - start]))

    def fill(self, value: int, out: U8Array) -> None:
        """Write rows of chunks that were left out."""
        for row, count in zip(self.row.tolist(), self.count.tolist(), strict=True):
            out[row : row + count] = value


@dataclass(frozen=True)
class ChunkTable:
    """Places of one layer's chunks; chunk ``i`` holds neurons ``i * rows`` and on.

    Attributes:
        layout: of the array.
        paths: the files that exist.
        file: ``[n]``, index into ``paths``, or ``NO_FILE`` for a chunk that was left out.
        offset_bytes: ``[n]``, in that file.
        nbytes: ``[n]``, as stored.
    """

    layout: ZarrLayout
    paths: list[str]
    file: I64Array
    offset_bytes: I64Array
    nbytes: I64Array


@dataclass(frozen=True)
class Extents:
    """Raw rows that follow each other in a file, most of a shard for instance; all ``[n]`` int64.

    Attributes:
        neuron: the first of each, ascending from 0.
        file: as in ``ChunkTable``.
        offset_bytes: of the first neuron's row.
    """

    neuron: I64Array
    file: I64Array
    offset_bytes: I64Array


def raw_layouts(root: Path, geometry: FFNGeometry) -> list[ZarrLayout] | None:
    """Layouts of all layers from the metadata files alone, without zarr. Blocking.

    Returns:
        None unless every layer is raw and nothing in the documents is out of the ordinary: zarr decides then,
        and words what is wrong.

    Raises:
        DiskReadError: the device failed.
    """
    v3, v2 = _document(root / "zarr.json"), _document(root / ".zgroup")
    if v3 is not None and v2 is None:
        plain = v3.keys() <= {"zarr_format", "node_type", "attributes"} and v3.get("node_type") == "group"
        name, other, version = "zarr.json", ".zarray", v3.get("zarr_format") if plain else None
    else:  # .zmetadata would hold for the layers, too
        plain = v2 == {"zarr_format": 2} and v3 is None and not (root / ".zmetadata").exists()
        name, other, version = ".zarray", "zarr.json", 2 if plain else None
    if version != (3 if name == "zarr.json" else 2):
        return None
    layouts = []
    for layer in range(geometry.n_layers):
        array = root / f"layers/{layer}"
        metadata = _document(array / name)
        if metadata is None or metadata.get("zarr_format") != version or (array / other).exists():
            return None
        layout = layout_of(metadata, (geometry.n_neurons, geometry.stride_bytes))
        if layout is None or not layout.raw:
            return None
        layouts.append(layout)
    return layouts


def _document(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with ReadOnce(path) as file:
        if file.size_bytes > MAX_DOCUMENT_BYTES:
            return None
        raw = np.empty(file.size_bytes, np.uint8)
        file.read_into(0, raw)
    try:
        document = json.loads(raw.tobytes())
    except (ValueError, RecursionError):  # the latter for thousands of brackets
        return None
    return document if isinstance(document, dict) else None


def locate_layers(
    root: Path, layouts: Sequence[ZarrLayout | None], geometry: FFNGeometry
) -> list[ChunkTable | FlashdError | None]:
    """``locate_chunks`` for every layer that has a layout; the error where it raises one. Blocking."""

    def locate(layer: int) -> ChunkTable | FlashdError | None:
        layout = layouts[layer]
        if layout is None:
            return None
        array = root / f"layers/{layer}"
        try:
            return locate_chunks(array, layout, geometry.n_neurons, geometry.stride_bytes)
        except (BundleCorruptError, DiskReadError) as exc:
            return exc

    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        return list(pool.map(locate, range(len(layouts))))


def in_layer(error: FlashdError, layer: int) -> FlashdError:
    """The same error, naming the layer."""
    return type(error)(f"{error} (layer {layer})")


def locate_chunks(array: Path, layout: ZarrLayout, n_neurons: int, stride_bytes: int) -> ChunkTable:
    """Find the chunks of an array; reads the index of each shard. Blocking.

    Args:
        array: its directory.
        layout: from its metadata.
        n_neurons: its rows.
        stride_bytes: their length.

    Raises:
        BundleCorruptError: a damaged index, or a chunk of a size that it cannot have.
        DiskReadError: the device failed.
    """
    n = -(-n_neurons // layout.chunk_rows)
    paths: list[str] = []
    file = np.full(n, NO_FILE, np.int64)
    offset, nbytes = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for number, first in enumerate(range(0, n, layout.file_chunks)):
        path = f"{array}/{layout.key.format(number)}"
        size = _size(path)
        if size is None:
            continue
        some = slice(first, min(first + layout.file_chunks, n))
        if layout.sharded:
            index = _read_index(path, layout)[: some.stop - first]
            there = ~(index == _LEFT_OUT).all(axis=1)
            _check_inside(path, size, index, there, first)
            index[~there] = 0
            offset[some], nbytes[some] = index.T.astype(np.int64)
            file[some] = np.where(there, len(paths), NO_FILE)
        else:
            file[first], nbytes[first] = len(paths), size
        paths.append(path)
    table = ChunkTable(layout, paths, file, offset, nbytes)
    if layout.raw:
        _check_raw(table, layout.chunk_rows * stride_bytes + layout.trailing_bytes)
    else:
        _check_packed(table, most_stored_bytes(layout.chunk_rows * stride_bytes))
    return table


def most_stored_bytes(chunk_bytes: int) -> int:
    """More than any sane codec makes of ``chunk_bytes``: none doubles what it cannot pack."""
    return 2 * chunk_bytes + (64 << 10)


def _size(path: str) -> int | None:
    """Size of a chunk's file; None if it was left out."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise DiskReadError(f"{path}: {exc.strerror}; check its permissions and the device (dmesg)") from exc
    check_regular(path, status)
    return status.st_size


def check_regular(path: str | Path, status: os.stat_result) -> None:
    """Refuse what is no file: opening a FIFO would wait for its writer for ever.

    Raises:
        BundleCorruptError: named after ``path``.
    """
    if not stat.S_ISREG(status.st_mode):
        raise BundleCorruptError(f"{path}: not a regular file ({stat.filemode(status.st_mode)}); {_REMEDY}")


def _read_index(path: str, layout: ZarrLayout) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Offset and length of every chunk of a shard, ``[file_chunks, 2]``."""
    index_bytes = layout.file_chunks * _ENTRY_BYTES
    if layout.file_chunks > _MAX_INDEX_CHUNKS:
        raise BundleCorruptError(
            f"{path}: a shard of {layout.file_chunks} chunks, expected at most {_MAX_INDEX_CHUNKS}; {_REMEDY}"
        )
    with ReadOnce(path) as file:
        at = 0 if layout.index_at_start else file.size_bytes - index_bytes - _SUM_BYTES
        # Before the memory is asked for: a damaged document may promise any number of chunks.
        if file.size_bytes < index_bytes + _SUM_BYTES:
            raise BundleCorruptError(
                f"{path}: {file.size_bytes} bytes, its index alone has {index_bytes + _SUM_BYTES}; {_REMEDY}"
            )
        raw = np.empty(index_bytes + _SUM_BYTES, np.uint8)
        file.read_into(at, raw)
    got = np.empty(1, np.uint32)
    kernels.crc32c(raw[:index_bytes].reshape(1, -1), got)
    expected = int.from_bytes(raw[index_bytes:].tobytes(), "little")
    if got[0] != expected:
        raise BundleCorruptError(
            f"{path}: the shard's index has checksum {got[0]:08x}, expected {expected:08x}; {_REMEDY}"
        )
    return raw[:index_bytes].view("<u8").astype(np.uint64).reshape(-1, 2)


def _check_inside(
    path: str,
    size: int,
    index: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
    there: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    first: int,
) -> None:
    # Each by itself: the sum of two huge numbers would wrap around.
    end = np.uint64(size)
    bad = there & ((index[:, 0] > end) | (index[:, 1] > end - np.minimum(index[:, 0], end)))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise BundleCorruptError(
            f"{path}: chunk {first + i} has {index[i, 1]} bytes at {index[i, 0]}, "
            f"but the shard ends at {size}; {_REMEDY}"
        )


def _check_raw(table: ChunkTable, expected_bytes: int) -> None:
    bad = np.flatnonzero((table.file != NO_FILE) & (table.nbytes != expected_bytes))
    if bad.size:
        i = int(bad[0])
        raise BundleCorruptError(
            f"{table.paths[table.file[i]]}: chunk {i} has {table.nbytes[i]} bytes, "
            f"expected {expected_bytes}; {_REMEDY}"
        )


def _check_packed(table: ChunkTable, most_bytes: int) -> None:
    bad = np.flatnonzero((table.file != NO_FILE) & ((table.nbytes > most_bytes) | (table.nbytes < 0)))
    if bad.size:
        i = int(bad[0])
        raise BundleCorruptError(
            f"{table.paths[table.file[i]]}: chunk {i} has {table.nbytes[i]} bytes, "
            f"expected at most {most_bytes}; {_REMEDY}"
        )


def extents_of(table: ChunkTable, stride_bytes: int) -> Extents:
    """Join the raw chunks of a layer that follow each other in a file, or that were left out."""
    chunk_bytes = table.layout.chunk_rows * stride_bytes
    follows = (np.diff(table.file) == 0) & (
        (table.file[1:] == NO_FILE) | (np.diff(table.offset_bytes) == chunk_bytes)
    )
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Extents(first * table.layout.chunk_rows, table.file[first], table.offset_bytes[first])


def split_runs(bounds: I64Array, runs: Runs) -> tuple[I64Array, Runs]:
    """Cut runs where another chunk or extent begins.

    Args:
        bounds: ``[n]``, the first neuron of each chunk or extent, ascending from 0.
        runs: what is wanted.

    Returns:
        Index into ``bounds`` of every part, and the parts.
    """
    first = np.searchsorted(bounds, runs.neuron, "right") - 1
    last = np.searchsorted(bounds, runs.neuron + runs.count - 1, "right") - 1
    parts = last - first + 1
    total = int(parts.sum())
    if total == len(parts):
        return first, runs
    run = np.repeat(np.arange(len(parts)), parts)
    index = first[run] + np.arange(total) - np.repeat(np.cumsum(parts) - parts, parts)
    begin, end = runs.neuron[run], (runs.neuron + runs.count)[run]
    start = np.maximum(bounds[index], begin)
    stop = np.minimum(np.append(bounds[1:], np.iinfo(np.int64).max)[index], end)
    return index, Runs(start, runs.row[run] + start - begin, stop - start)
