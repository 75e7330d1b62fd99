"""A few layers of a model's shape with made-up weights: what computing takes is measured with the daemon's
own decoder and kernels, before anything is loaded.

Weights lie in more memory than the caches hold, as the model's will. Rows that a mask requests are all in
RAM; rows that are streamed are the bundle's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import numpy as np

from flashd import kernels
from flashd.disk.slabs import SlabBuffer
from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.memory.eviction import make_policy
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.models.decoder import Decoder, Span
from flashd.predictor.every import AllPredictor
from flashd.prefetch.hybrid import HybridFFN
from flashd.prefetch.resident import ResidentFFN
from flashd.prefetch.sparse import SparseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.runtime.costs import CostClock, Reading
from flashd.stats import StreamStats
from flashd.store.in_memory import InMemoryStore
from flashd.store.metered import MeteredStore
from flashd.tools.plan.facts import Times
from flashd.tools.plan.made import FixedPredictor, MaskShape, fill, filled
from flashd.types import Activation, F32Array, ModelSpec, WeightArray

MAX_STEPS = 256
_WARM_STEPS = 3
_LEAST_STEPS = 4
# The slowest steps are somebody else's doing.
_KEPT_SHARE = 0.9


@dataclass(frozen=True)
class Steps:
    """What decoding steps took.

    Attributes:
        times: of a step.
        busy_s: with at least one read outstanding, of a step.
        n_steps: so many were counted.
    """

    times: Times
    busy_s: float
    n_steps: int


class Miniature:
    """Decodes with a few layers.

    Args:
        spec: of the miniature; its context holds ``context`` tokens and ``MAX_STEPS`` more.
        weights: of ``made_weights``.
        store: the bundle's rows.
        lane: where everything is computed.
        context: tokens that are attended to.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, WeightArray],
        store: MeteredStore,
        lane: ComputeLane,
        context: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._store = store
        self._lane = lane
        self._context = context
        self._none = [None] * store.geometry.n_layers

    @property
    def n_layers(self) -> int:
        """Layers that there are weights for."""
        return self._spec.n_layers

    def masked(self, shape: MaskShape) -> MaskedLayers:
        """Layers with a mask whose rows are all in RAM."""
        return MaskedLayers(self._spec, self._store, self._lane, shape)

    async def run(self, source: HybridFFN, waits: StreamStats, n_layers: int, limit_s: float) -> Steps:
        """Decode with the first ``n_layers`` for some seconds."""
        spec = replace(self._spec, n_layers=n_layers)
        decoder = Decoder(spec, self._weights, source, self._lane)
        kv = ContiguousKV(spec, self._context + MAX_STEPS, "f16")
        heads = np.zeros((self._context, spec.n_kv_heads, spec.d_head), np.float32)
        for layer in range(n_layers):  # written to, else all pages are the same one
            kv.append(layer, heads, heads)
        kv.commit(self._context)
        clock = CostClock(self._store.stats, waits, self._lane.stats)
        readings: list[Reading] = []
        token, began_s = np.ones(1, np.int64), perf_counter()
        while len(readings) < MAX_STEPS and (
            len(readings) < _WARM_STEPS + _LEAST_STEPS or perf_counter() - began_s < limit_s
        ):
            readings.append(clock.read())
            await decoder.forward([Span(token, kv)])
        readings.append(clock.read())
        return counted(readings[_WARM_STEPS:])

    async def dense(self, layers: int, limit_s: float) -> Steps:
        """Layers without a mask that are in RAM."""
        geometry = replace(self._store.geometry, n_layers=layers)
        rows = filled(layers * geometry.layer_bytes, geometry.dtype)
        shape = (layers, geometry.n_neurons, geometry.stride_bytes)
        store, waits = InMemoryStore(geometry, rows.reshape(shape)), StreamStats()
        part = ResidentFFN(store, self._lane, self._activation, self._none, self._none, stats=waits)
        predictor = AllPredictor(layers, geometry.n_neurons)
        source = HybridFFN(predictor, None, dict.fromkeys(range(layers), part), None, waits)
        return await self.run(source, waits, layers, limit_s)

    async def streamed(self, layers: int, limit_s: float) -> Steps:
        """Layers without a mask that are streamed out of the bundle."""
        waits = StreamStats()
        stream = StreamingFFN(
            self._store,
            self._lane,
            self._activation,
            self._none,
            self._none,
            layers=range(layers),
            stats=waits,
        )
        predictor = AllPredictor(layers, self._store.geometry.n_neurons)
        source = HybridFFN(predictor, None, {}, stream, waits)
        try:
            return await self.run(source, waits, layers, limit_s)
        finally:
            await source.close()

    @property
    def _activation(self) -> Activation:
        return self._spec.activation


class MaskedLayers:
    """Layers with a mask, and the rows that they request.

    Args:
        spec: of the miniature.
        store: the bundle's.
        lane: where everything is computed.
        shape: of the masks.
    """

    def __init__(self, spec: ModelSpec, store: MeteredStore, lane: ComputeLane, shape: MaskShape) -> None:
        geometry, self.n_layers = store.geometry, spec.n_layers
        self._spec, self._store, self._lane, self._shape = spec, store, lane, shape
        self._level: float | None = None  # of activations that count as zero
        n_rows = self.n_layers * shape.requested
        self._memory = SlabBuffer(n_rows * geometry.stride_bytes, store)
        self._memory.resize(n_rows * geometry.stride_bytes)
        fill(self._memory.memory, geometry.dtype)
        self._matrix = self._memory.memory.reshape(-1, geometry.stride_bytes)
        self._predictor = FixedPredictor(
            self.n_layers, geometry.n_neurons, geometry.d_model, geometry.dtype, shape
        )

    async def run(self, miniature: Miniature, limit_s: float) -> Steps:
        """Decode for some seconds; as many activations are zero as in the model."""
        if self._level is None:
            source, waits = self._source(0.0)
            await miniature.run(source, waits, self.n_layers, 0.0)
            self._level = self._threshold()
        source, waits = self._source(self._level)
        return await miniature.run(source, waits, self.n_layers, limit_s)

    def close(self) -> None:
        """Give the rows back."""
        self._memory.close()

    def _source(self, threshold: float) -> tuple[HybridFFN, StreamStats]:
        geometry, waits = self._store.geometry, StreamStats()
        pool = RowPool(self._matrix, len(self._matrix))
        policy = make_policy("frequency", self.n_layers, geometry.n_neurons, 1, None)
        capacity = [self._shape.requested] * self.n_layers
        window = Window(pool, self.n_layers, geometry.n_neurons, capacity, policy)
        for layer in range(self.n_layers):
            window.insert(layer, self._predictor.ids)
            window.settle(layer, self._predictor.ids)
        sparse = SparseFFN(
            self._store, self._lane, self._predictor, window, self._spec.activation, _NoPrompt(),
            thresholds=[threshold] * geometry.n_layers, prefetch="on", waits=waits,
        )  # fmt: skip
        return HybridFFN(self._predictor, sparse, {}, None, waits), waits

    def _threshold(self) -> float:
        """Activations up to it count as zero, so that the model's share of them does."""
        geometry, x = self._store.geometry, self._predictor.seen
        assert x is not None, "a step has been computed"
        hidden = np.empty((1, self._shape.requested), np.float32)
        kernels.ffn_dots(
            self._matrix, geometry.dtype, geometry.d_model, geometry.gated, self._spec.activation, x[:1],
            hidden, index=np.arange(self._shape.requested),
        )  # fmt: skip
        return max(0.0, float(np.quantile(np.abs(hidden), 1 - self._shape.fired_share)))


class _NoPrompt:
    """Nothing here has more tokens than a step."""

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``PromptSource.apply``."""
        raise AssertionError("a miniature decodes only")


def counted(readings: list[Reading]) -> Steps:
    """Means of the steps between the readings, but for the slowest."""
    steps = sorted(pairwise(readings), key=lambda pair: pair[1].wall - pair[0].wall)
    steps = steps[: max(1, round(len(steps) * _KEPT_SHARE))]

    def mean_s(name: str) -> float:
        spent_ns: int = sum(getattr(end, name) - getattr(start, name) for start, end in steps)
        return spent_ns / len(steps) / 1e9

    wait, memory, compute = mean_s("flash_wait"), mean_s("memory"), mean_s("compute")
    times = Times(wait, memory, compute, max(0.0, mean_s("wall") - wait - memory - compute))
    return Steps(times, mean_s("flash_busy"), len(steps))
