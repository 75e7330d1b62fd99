"""Store ``memory``: every row in RAM, for models that fit and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.store.base import WeightStore
from flashd.types import FFNGeometry, I64Array, U8Array

_LOAD_BYTES = 4 << 20


class InMemoryStore(WeightStore):
    """Copies rows out of an array; make it with ``await InMemoryStore.load(other_store)``.

    Attributes:
        all_rows: ``[layers, n_neurons, stride_bytes]``, not to be written; empty once it is closed.
    """

    name = "memory"
    alignment_bytes = 1

    def __init__(self, geometry: FFNGeometry, rows: U8Array, layers: Sequence[int] | None = None) -> None:
        """Take ``rows``, ``[len(layers), n_neurons, stride_bytes]`` uint8, without copying; all layers
        where ``layers`` is None."""
        layers = range(geometry.n_layers) if layers is None else layers
        expected = (len(layers), geometry.n_neurons, geometry.stride_bytes)
        if rows.shape != expected or rows.dtype != np.uint8:
            raise ValueError(f"rows are {rows.dtype}{rows.shape}, expected uint8{expected}")
        self.geometry = geometry
        self.all_rows = rows
        self._rows: dict[int, U8Array] | None = dict(zip(layers, rows, strict=True))

    @classmethod
    async def load(cls, source: WeightStore, layers: Sequence[int] | None = None) -> InMemoryStore:
        """Read all rows of ``source``, which stays open and is the caller's to close; or those of some
        layers, which are all that there is then."""
        geometry = source.geometry
        layers = range(geometry.n_layers) if layers is None else layers
        shape = (len(layers), geometry.n_neurons, geometry.stride_bytes)
        alignment = max(4096, source.alignment_bytes)
        nbytes = len(layers) * geometry.layer_bytes
        rows = aligned_empty(nbytes, alignment, huge_pages=True).reshape(shape)
        step = max(1, _LOAD_BYTES // geometry.stride_bytes)
        for at, layer in enumerate(layers):
            for start in range(0, geometry.n_neurons, step):
                stop = min(start + step, geometry.n_neurons)
                out = rows[at, start:stop]
                if out.ctypes.data % source.alignment_bytes == 0:
                    await source.read_range(layer, start, stop, out)
                    continue
                aligned = aligned_empty(out.nbytes, alignment).reshape(out.shape)
                await source.read_range(layer, start, stop, aligned)
                out[:] = aligned
        return cls(geometry, rows, layers)

    def layer(self, layer: int) -> U8Array:
        """The rows of one layer, ``[n_neurons, stride_bytes]``, where they are; not to be written."""
        return self._layer(layer)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        self.check_request(layer, start, stop - 1, stop - start, out)
        out[:] = self._layer(layer)[start:stop]

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        self.check_rows(layer, ids, out, rows)
        if rows is None:
            np.take(self._layer(layer), ids, axis=0, out=out, mode="clip")
        else:
            out[rows] = self._layer(layer)[ids]

    def _layer(self, layer: int) -> U8Array:
        if self._rows is None:
            raise ValueError("the in-memory store is closed")
        if layer not in self._rows:
            raise IndexError(f"layer {layer} was not loaded, only {sorted(self._rows)}")
        return self._rows[layer]

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        self._rows = None
        self.all_rows = self.all_rows[:0]
