"""The FFN of a model whose rows are all in RAM: nothing to read, nothing to copy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from flashd.kernels.lane import ComputeLane
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.stream import ring_slice_rows
from flashd.stats import StreamStats
from flashd.store.in_memory import InMemoryStore
from flashd.types import Activation, BoolArray, F32Array


class ResidentFFN:
    """An ``FFNSource`` over an in-memory store, with the same bits as ``StreamingFFN``.

    Args:
        store: all rows of the layers that it is asked for; stays the caller's to close.
        lane: where the math runs.
        activation: of the hidden units.
        up_bias: per layer ``[n_neurons]`` or None.
        gate_bias: likewise.
        thresholds: per layer, activations up to it count as zero; empty: 0 for all.
        stats: counts slices.
    """

    def __init__(
        self,
        store: InMemoryStore,
        lane: ComputeLane,
        activation: Activation,
        up_bias: Sequence[F32Array | None],
        gate_bias: Sequence[F32Array | None],
        thresholds: Sequence[float] = (),
        stats: StreamStats | None = None,
    ) -> None:
        self.stats = stats or StreamStats()
        self._store = store
        self._lane = lane
        self._dense = DenseFFN(store.geometry, activation)
        self._up_bias = list(up_bias)
        self._gate_bias = list(gate_bias)
        self._thresholds = list(thresholds) or [0.0] * store.geometry.n_layers
        # A prompt's sums go block by block: the blocks must be those of the streamed FFN.
        self._slice_rows = ring_slice_rows(store.geometry)

    async def apply(
        self,
        layer: int,
        x: Callable[[], F32Array],
        mask: Callable[[F32Array], BoolArray] | None = None,
    ) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``; ``mask`` as for ``StreamingFFN.apply``."""
        out = await self._lane.run(self._apply, layer, x, mask)
        return lambda: out

    def apply_on_lane(
        self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop
    ) -> Callable[[], F32Array]:
        """See ``LaneFFNSource.apply_on_lane``."""
        out = self._apply(layer, x, None)
        return lambda: out

    def _apply(
        self, layer: int, make_x: Callable[[], F32Array], mask: Callable[[F32Array], BoolArray] | None
    ) -> F32Array:
        x = make_x()
        used = None if mask is None else mask(x)
        rows, up, gate = self._store.layer(layer), self._up_bias[layer], self._gate_bias[layer]
        acc = np.zeros(x.shape, np.float32)
        for start in range(0, len(rows), self._slice_rows):
            part = slice(start, start + self._slice_rows)
            weights = SliceWeights(
                rows[part],
                None if up is None else up[part],
                None if gate is None else gate[part],
                self._thresholds[layer],
            )
            self._dense.add(weights, x, acc, None if used is None else np.ascontiguousarray(used[:, part]))
            self.stats.slices += 1
        return acc

    async def close(self) -> None:
        """Nothing is in flight between two calls."""
