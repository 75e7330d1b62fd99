"""FFN matrices of a checkpoint -> neuron rows ``[up | gate | down]``, block by block.

The down projection is stored ``[d, d_ffn]``; its columns become parts of rows. Reading columns
from disk would be one small read per model dimension, so one layer's down matrix is read in file
order, kept in the bundle's dtype (the largest thing in memory here) and transposed from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from flashd.layout.manifest import FileEntry
from flashd.models.families import FFNNames
from flashd.tools.convert.background import BackgroundWriter
from flashd.tools.convert.cast import cast_into
from flashd.tools.convert.sources.base import TensorSource
from flashd.types import NUMPY_DTYPE, FFNGeometry, U8Array, WeightArray

_READ_BYTES = 4 << 20
# A tile of the transposition, in neurons and model dimensions: measured 3 GB/s, whole matrices 0.3.
_TILE_NEURONS = 128
_TILE_MODEL = 64


class FFNWriter(Protocol):
    """Takes finished rows, layer after layer, and makes them durable."""

    block_rows: int  # rows of one ``write``; the last of a layer may be shorter

    def write(self, layer: int, start: int, rows: U8Array) -> None:
        """Append rows ``[n, stride_bytes]`` of a layer. Called in order, in the background."""
        ...

    def end_layer(self, layer: int) -> None:
        """The layer is complete."""
        ...

    def sync(self) -> None:
        """Make all complete layers durable."""
        ...

    def sizes(self) -> dict[str, int]:
        """Size of each file that only grows."""
        ...

    def zarr_files(self) -> list[tuple[str, int, str]]:
        """Name, size and SHA-256 of files that a resuming run must know."""
        ...

    def entries(self) -> list[FileEntry]:
        """What has been written, once all layers are complete."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class RowBuilder:
    """Makes the rows of any layer. Keeps one matrix of ``[d, d_ffn]`` between layers."""

    def __init__(self, source: TensorSource, geometry: FFNGeometry) -> None:
        self._source = source
        self._geometry = geometry
        self._down = np.empty((geometry.d_model, geometry.n_neurons), NUMPY_DTYPE[geometry.dtype])

    def write_layer(
        self, layer: int, names: FFNNames, writer: FFNWriter, background: BackgroundWriter
    ) -> None:
        """Build one layer's rows and hand them to the writer, through the background."""
        geometry = self._geometry
        self._load_down(names.down)
        for start in range(0, geometry.n_neurons, writer.block_rows):
            stop = min(start + writer.block_rows, geometry.n_neurons)
            raw = background.buffer((stop - start) * geometry.stride_bytes).reshape(stop - start, -1)
            self._fill(raw, names, start, stop)
            background.submit(raw.size, writer.write, layer, start, raw)

    def _load_down(self, name: str) -> None:
        for start, stop in self._pieces(name, 0, self._geometry.d_model):
            self._read_into(self._down[start:stop], name, start, stop)

    def _fill(self, raw: U8Array, names: FFNNames, start: int, stop: int) -> None:
        """Rows ``start..stop-1``: up, gate and down side by side, padding zero."""
        geometry, d = self._geometry, self._geometry.d_model
        raw[:, geometry.row_bytes :] = 0
        rows: WeightArray = raw.view(NUMPY_DTYPE[geometry.dtype])
        column = 0
        for name in (names.up, names.gate):
            if name is not None:
                for low, high in self._pieces(name, start, stop):
                    part = rows[low - start : high - start, column : column + d]
                    self._read_into(part, name, low, high)
                column += d
        _transpose(self._down[:, start:stop], rows[:, column : column + d])

    def _pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Row ranges of about ``_READ_BYTES``: what is read stays in cache for the conversion."""
        columns = self._source.tensors[name].shape[1]
        step = max(1, _READ_BYTES // (columns * 4))
        for low in range(start, stop, step):
            yield low, min(low + step, stop)

    def _read_into(self, out: WeightArray, name: str, start: int, stop: int) -> None:
        dtype = self._source.tensors[name].dtype
        assert dtype is not None
        block = self._source.read_rows(name, start, stop)
        cast_into(out, block, dtype, self._geometry.dtype, name)


def _transpose(source: WeightArray, out: WeightArray) -> None:
    """``out[i, j] = source[j, i]``, in tiles."""
    for i in range(0, out.shape[0], _TILE_NEURONS):
        for j in range(0, out.shape[1], _TILE_MODEL):
            tile = source[j : j + _TILE_MODEL, i : i + _TILE_NEURONS]
            out[i : i + _TILE_NEURONS, j : j + _TILE_MODEL] = tile.T
