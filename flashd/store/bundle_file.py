"""Store ``file``: rows of ``ffn.bundle``, read in place by a disk engine."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from flashd.disk.engine import MAX_DESTINATIONS, ReadBatch, ReadEngine, ReadTicket, RowBatch, RowCheck
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.stats import ReadStats
from flashd.store.base import WeightStore
from flashd.store.tickets import LayerTicket, of_layer
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
        self.has_tickets = engine.has_tickets
        self._layer_offset_bytes = tuple(layer_offset_bytes)
        stride = geometry.stride_bytes
        # Rows that go through scratch memory are read one by one: merging over a gap saves nothing.
        in_place = stride % engine.alignment_bytes == 0
        self.max_gap_neurons = max_gap_bytes // stride if in_place else 0
        self._last_out: Callable[[], U8Array | None] = lambda: None
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
        batch = ReadBatch(np.array([offset]), np.array([out.nbytes]), out.reshape(-1), np.array([0]))
        try:
            await self.engine.read(batch)
        except (BundleCorruptError, DiskReadError) as exc:
            raise of_layer(exc, layer) from exc

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        self.check_rows(layer, ids, out, rows)
        if not len(ids):
            return
        batch = self._batch(layer, ids, out, rows)
        try:
            await self.engine.read_rows(batch, prefetch=prefetch)
        except (BundleCorruptError, DiskReadError) as exc:
            raise of_layer(exc, layer) from exc

    def start_rows(
        self,
        layer: int,
        ids: I64Array,
        out: U8Array,
        rows: I64Array | None,
        loop: asyncio.AbstractEventLoop,
        *,
        prefetch: bool = False,
        check: RowCheck | None = None,
    ) -> ReadTicket:
        """See ``WeightStore.start_rows``."""
        if not len(ids) or not self.has_tickets:
            return super().start_rows(layer, ids, out, rows, loop, prefetch=prefetch)
        if rows is None or self._last_out() is not out:  # these checks take as long as the rest
            self.check_request(layer, 0, 0, len(ids) if rows is None else len(out), out)
            self._last_out = weakref.ref(out)
        elif not 0 <= layer < self.geometry.n_layers:
            raise IndexError(f"layer {layer} of {self.geometry.n_layers}")
        try:
            ticket = self.engine.start_rows(self._batch(layer, ids, out, rows, check), prefetch=prefetch)
        except (TypeError, ValueError):
            # The engine has looked at all of them, which takes as long here again: only for the message.
            self.check_rows(layer, ids, out, rows)
            raise
        return LayerTicket(ticket, layer)

    @property
    def busy_ns(self) -> int | None:
        """See ``WeightStore.busy_ns``."""
        return self.engine.busy_ns

    def _batch(
        self,
        layer: int,
        ids: I64Array,
        out: U8Array,
        rows: I64Array | None,
        check: RowCheck | None = None,
    ) -> RowBatch:
        return RowBatch(
            self._layer_offset_bytes[layer],
            ids,
            np.arange(len(ids)) if rows is None else rows,
            out,
            self.max_gap_neurons,
            self._max_run_neurons,
            self.geometry.n_neurons,
            check,
        )

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.engine.close()
