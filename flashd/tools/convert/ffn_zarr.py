"""``ffn.zarr/``: a zarr v3 group with one array per layer, ``layers/{i}``: uint8
``[n_neurons, stride_bytes]``, sharded.

Inner chunks are groups of whole rows without compressor or checksum, so that a row's place in a
shard follows from the shard's index and can be read straight into the window. zarr is imported
here and nowhere else in the converter.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import zarr
from zarr.core.buffer import Buffer
from zarr.storage import LocalStore

from flashd.layout.manifest import SUMS, ZARR, FileEntry
from flashd.tools.convert.ffn_file import open_sums, row_sums
from flashd.tools.convert.files import hash_file, sync_path
from flashd.types import FFNGeometry, U8Array

_CHUNK_BYTES = 256 << 10
_SHARD_BYTES = 32 << 20


class _HashingStore(LocalStore):
    """Notes size and SHA-256 of each file as zarr writes it."""

    def __init__(self, root: Path | str, *, read_only: bool = False) -> None:
        super().__init__(root, read_only=read_only)
        self.written: dict[str, tuple[int, str]] = {}

    async def set(self, key: str, value: Buffer) -> None:
        """Write one file."""
        await super().set(key, value)
        data = value.as_buffer_like()
        self.written[key] = (memoryview(data).nbytes, hashlib.sha256(data).hexdigest())


class ZarrWriter:
    """Writes ``ffn.zarr`` and ``ffn.sums``, resuming behind ``layers`` layers. See ``FFNWriter``.

    Args:
        root: the bundle's directory.
        geometry: the rows.
        layers: complete layers from an earlier run.
        files: name, size, SHA-256 of the files they consist of.
    """

    def __init__(
        self, root: Path, geometry: FFNGeometry, layers: int, files: list[tuple[str, int, str]]
    ) -> None:
        self._root = root
        self._geometry = geometry
        # zarr pads the last chunk to a whole one: chunks of equal size waste the least.
        chunks = -(-geometry.n_neurons // max(1, _CHUNK_BYTES // geometry.stride_bytes))
        self._chunk_rows = -(-geometry.n_neurons // chunks)
        per_shard = max(1, _SHARD_BYTES // (self._chunk_rows * geometry.stride_bytes))
        self.block_rows = self._chunk_rows * min(per_shard, chunks)
        self._files = [FileEntry(*file) for file in files] if layers else []
        self._unsynced: list[Path] = []
        self._remove_strays()
        self._store = _HashingStore(root / ZARR)
        if layers:
            self._group = zarr.open_group(self._store, mode="r+")
        else:
            self._group = zarr.create_group(self._store, attributes=_attributes(geometry))
        self._array: zarr.Array[Any] | None = None
        self._sums = open_sums(root, geometry, layers)

    def _remove_strays(self) -> None:
        """Files of a layer that was being written when the earlier run ended."""
        top = self._root / ZARR
        known = {file.name for file in self._files}
        if not known and top.exists():
            shutil.rmtree(top)
        for folder, _, names in os.walk(top, topdown=False):
            for name in names:
                path = Path(folder, name)
                if path.relative_to(self._root).as_posix() not in known:
                    path.unlink()
            if not any(Path(folder).iterdir()):
                Path(folder).rmdir()

    def write(self, layer: int, start: int, rows: U8Array) -> None:
        """See ``FFNWriter.write``; rows are one whole shard, or the last one of the layer."""
        if start == 0:
            stride = self._geometry.stride_bytes
            self._array = self._group.create_array(
                f"layers/{layer}",
                shape=(self._geometry.n_neurons, stride),
                dtype="uint8",
                chunks=(self._chunk_rows, stride),
                shards=(self.block_rows, stride),
                compressors=None,
                filters=None,
                fill_value=0,
                # A chunk of zeros would otherwise be left out, and have no place in the shard.
                config={"write_empty_chunks": True},
            )
        assert self._array is not None
        self._array[start : start + len(rows)] = rows
        self._sums.write(row_sums(rows))

    def end_layer(self, layer: int) -> None:
        """Note the files that the layer consists of."""
        self._array = None
        self._take_written()

    def _take_written(self) -> None:
        for key, (size_bytes, sha256) in self._store.written.items():
            name = f"{ZARR}/{key}"
            self._files = [file for file in self._files if file.name != name]
            self._files.append(FileEntry(name, size_bytes, sha256))
            self._unsynced.append(self._root / name)
        self._store.written.clear()

    def sync(self) -> None:
        """See ``FFNWriter.sync``."""
        self._add_unseen()
        folders = {self._root}
        for path in self._unsynced:
            sync_path(path)
            folders.update(p for p in path.parents if p.is_relative_to(self._root))
        for folder in folders:
            sync_path(folder)
        self._unsynced = []
        self._sums.sync()

    def _add_unseen(self) -> None:
        """Metadata that zarr wrote by another way than ``set``."""
        known = {file.name for file in self._files}
        for path in sorted((self._root / ZARR).rglob("zarr.json")):
            if path.relative_to(self._root).as_posix() not in known:
                self._files.append(hash_file(path, self._root))
                self._unsynced.append(path)

    def sizes(self) -> dict[str, int]:
        """See ``FFNWriter.sizes``."""
        return {SUMS: self._sums.size_bytes}

    def zarr_files(self) -> list[tuple[str, int, str]]:
        """What a resuming run needs to know."""
        return [(file.name, file.size_bytes, file.sha256) for file in self._files]

    def entries(self) -> list[FileEntry]:
        """See ``FFNWriter.entries``."""
        return [*sorted(self._files, key=lambda file: file.name), self._sums.entry(self._root)]

    def close(self) -> None:
        """See ``FFNWriter.close``."""
        self._store.close()
        self._sums.close()


def _attributes(geometry: FFNGeometry) -> dict[str, object]:
    """What the group says about itself to anyone who opens it with zarr."""
    parts = ["up", "gate", "down"] if geometry.gated else ["up", "down"]
    return {
        "flashd_format": 1,
        "content": "feed-forward neurons: array layers/{i}, one row of bytes per neuron",
        "row": parts,
        "row_part_elements": geometry.d_model,
        "dtype": geometry.dtype,
        "row_bytes": geometry.row_bytes,
        "stride_bytes": geometry.stride_bytes,
    }
