"""Store ``file``: rows of ``ffn.bundle``, read in place by a disk engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashd.disk.engine import MAX_DESTINATIONS, SKIP, ReadBatch, ReadEngine
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.layout.coalesce import RowPlan, plan_rows
from flashd.stats import ReadStats
from flashd.store.base import WeightStore
from flashd.types import FFNGeometry, I64Array, U8Array

# Longest read of scattered rows. Longer ones are hardly faster, and a read that takes much longer than
# its neighbours is the one that everybody waits for.
MAX_READ_BYTES = 256 << 10


class BundleFileStore(WeightStore):
    """Neuron rows at known offsets of one file.

    Args:
        engine: how the file is read; closed with the store.
        geometry: of the rows.
        layer_offset_bytes: where each layer starts.
        max_gap_bytes: longest gap between two wanted rows to read over (the device's break-even).

    Attributes:
        engine: as given.
        max_gap_neurons: longest gap that is read over, in rows.
    """

    def __init__(
        self,
        engine: ReadEngine,
        geometry: FFNGeometry,
        layer_offset_bytes: Sequence[int],
        max_gap_bytes: int = 0,
    ) -> None:
        self.engine = engine
        self.name = f"file/{engine.name}"
        self.geometry = geometry
        self.alignment_bytes = engine.alignment_bytes
        self._layer_offset_bytes = tuple(layer_offset_bytes)
        stride = geometry.stride_bytes
        # Rows that go through scratch memory are read one by one: merging over a gap saves nothing.
        in_place = stride % engine.alignment_bytes == 0
        self.max_gap_neurons = max_gap_bytes // stride if in_place else 0
        self._max_run_neurons = min(MAX_DESTINATIONS, max(1, MAX_READ_BYTES // stride))

    @property
    def reason(self) -> str:
        """See ``WeightStore.reason``."""
        return self.engine.reason

    @property
    def read_stats(self) -> ReadStats:
        """See ``WeightStore.read_stats``."""
        return self.engine.stats

    def register(self, memory: U8Array) -> str:
        """See ``WeightStore.register``."""
        return self.engine.register(memory)

    def unregister(self, memory: U8Array) -> None:
        """See ``WeightStore.unregister``."""
        self.engine.unregister(memory)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        self.check_request(layer, start, stop - 1, stop - start, out)
        offset = self._layer_offset_bytes[layer] + start * out.shape[1]
        await self._read(
            layer, ReadBatch(np.array([offset]), np.array([out.nbytes]), out.reshape(-1), np.array([0]))
        )

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        self.check_rows(layer, ids, out, rows)
        plan = plan_rows(
            ids,
            np.arange(len(ids)) if rows is None else rows,
            max_gap_neurons=self.max_gap_neurons,
            max_run_neurons=self._max_run_neurons,
        )
        await self._read(layer, self._batch(layer, plan, out), prefetch)

    def _batch(self, layer: int, plan: RowPlan, out: U8Array) -> ReadBatch:
        stride = self.geometry.stride_bytes
        # A read with one place each needs no list of places.
        first = None if len(plan.first) == len(plan.row) else plan.first
        return ReadBatch(
            self._layer_offset_bytes[layer] + plan.neuron * stride,
            plan.count * stride,
            out.reshape(-1),
            np.maximum(plan.row * stride, SKIP),  # of GAP, which is negative, too
            first,
        )

    async def _read(self, layer: int, batch: ReadBatch, prefetch: bool = False) -> None:
        """Read; what fails names the layer beside file and offset."""
        try:
            await self.engine.read(batch, prefetch=prefetch)
        except (BundleCorruptError, DiskReadError) as exc:
            raise type(exc)(f"{exc} (layer {layer})") from exc

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.engine.close()
