"""Store ``file``: rows of ``ffn.bundle``, read in place by a disk engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.layout.coalesce import coalesce_runs
from flashd.store.base import WeightStore
from flashd.types import FFNGeometry, I64Array, U8Array


class BundleFileStore(WeightStore):
    """Neuron rows at known offsets of one file.

    Attributes:
        engine: how the file is read; closed with the store.
    """

    def __init__(self, engine: ReadEngine, geometry: FFNGeometry, layer_offset_bytes: Sequence[int]) -> None:
        self.engine = engine
        self.name = f"file/{'direct' if engine.direct else 'buffered'}"
        self.geometry = geometry
        self.alignment_bytes = engine.alignment_bytes
        self._layer_offset_bytes = tuple(layer_offset_bytes)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        self.check_request(layer, start, stop - 1, stop - start, out)
        await self._read(layer, np.array([start]), np.array([0]), np.array([stop - start]), out)

    async def read_rows(self, layer: int, ids: I64Array, out: U8Array) -> None:
        """See ``WeightStore.read_rows``."""
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        self.check_request(layer, low, high, len(ids), out)
        first, count = coalesce_runs(ids)
        await self._read(layer, ids[first], first, count, out)

    async def _read(self, layer: int, neuron: I64Array, row: I64Array, count: I64Array, out: U8Array) -> None:
        """Read runs of ``count`` neurons from ``neuron`` on into rows ``row`` on."""
        stride = self.geometry.stride_bytes
        offset = self._layer_offset_bytes[layer] + neuron * stride
        await self.engine.read(ReadBatch(offset, count * stride, out.reshape(-1), row * stride))

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.engine.close()
