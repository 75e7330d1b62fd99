"""A sparse FFN on a fake device beside a dense one in RAM: what the tests of the sparse engine share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashd.config import MAX_BATCH
from flashd.disk.buffers import aligned_empty
from flashd.kernels.lane import ComputeLane
from flashd.memory.eviction import make_policy
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.predictor.oracle import OraclePredictor
from flashd.prefetch.hybrid import HybridFFN, MaskedPrompt
from flashd.prefetch.resident import ResidentFFN
from flashd.prefetch.sparse import SparseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.stats import StreamStats
from flashd.store.bundle_file import BundleFileStore
from flashd.store.in_memory import InMemoryStore
from flashd.testing.bundles import MadeBundle
from flashd.testing.fake_engine import FakeEngine
from flashd.types import F32Array, I64Array


class GuessingOracle(OraclePredictor):
    """True masks; guesses at what the next layer's input ``upcoming`` will ask for, where that is told, else
    at what it asked for the last time (``good``), else at a ``share`` of its neurons at random."""

    share = 0.0
    good = False
    dense_layers: frozenset[int] = frozenset()
    rng = np.random.default_rng(0)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.upcoming: dict[int, F32Array] = {}
        self._asked: dict[int, I64Array] = {}

    def masked(self, layer: int) -> bool:
        return layer not in self.dense_layers

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, Any]:
        ids, mask = super().predict(layer, x)
        self._asked[layer] = ids
        return ids, mask

    def first_guess(self, x: F32Array) -> I64Array | None:
        return self.lookahead(-1, x)

    def lookahead(self, layer: int, x: F32Array) -> I64Array | None:
        if layer + 1 in self.upcoming:
            return super().predict(layer + 1, self.upcoming[layer + 1])[0]
        if self.good:
            return self._asked.get(layer + 1, np.empty(0, np.int64))
        n = int(self.n_neurons * self.share)
        return np.sort(self.rng.choice(self.n_neurons, n, replace=False)).astype(np.int64) if n else None


@dataclass(frozen=True)
class Options:
    """How memory and device are.

    Attributes:
        n_rows: of the pool.
        capacity: of each layer; by default a share of the pool.
        eviction, k: policy.
        prefetch: mode.
        guesses: share of neurons that a wrong guess names; negative: good guesses.
        dense: layers without a mask; the first of them is in RAM, the others are streamed.
        faults: of the fake engine.
    """

    n_rows: int = 300
    capacity: tuple[int, ...] = ()
    eviction: str = "lru"
    k: int = 2
    prefetch: str = "off"
    guesses: float = 0.0
    dense: tuple[int, ...] = ()
    seed: int = 0
    faults: dict[str, Any] = field(default_factory=dict)


@dataclass
class Setup:
    """Two sources of the same FFN."""

    ffn: HybridFFN
    sparse: SparseFFN
    dense: ResidentFFN
    lane: ComputeLane
    window: Window
    predictor: GuessingOracle
    engine: FakeEngine
    store: BundleFileStore

    async def apply(self, layer: int, x: F32Array) -> F32Array:
        """The sparse FFN of ``x``, in a step that has begun as the decoder begins it."""
        if layer == 0 and len(x) <= MAX_BATCH:
            await self.lane.run(self.ffn.begin_step, lambda: x, asyncio.get_running_loop())
        return await self.lane.run(await self.ffn.apply(layer, lambda: x))

    async def expected(self, layer: int, x: F32Array) -> F32Array:
        """The dense FFN of ``x``."""
        return await self.lane.run(await self.dense.apply(layer, lambda: x))

    async def check(self) -> None:
        """Tables agree; on the lane, which owns them."""
        await self.lane.run(self.window.check_integrity)


def biases(made: MadeBundle, part: str = "up") -> list[Any]:
    """Of a bundle, in float32, per layer."""
    names = [f"layers.{layer}.ffn.{part}.bias" for layer in range(made.manifest.ffn.n_layers)]
    return [made.resident[name].astype(np.float32) if name in made.resident else None for name in names]


@asynccontextmanager
async def sparse_setup(
    made: MadeBundle, options: Options, thresholds: tuple[float, ...] = ()
) -> AsyncIterator[Setup]:
    """Both sources over one bundle."""
    geometry, activation = made.manifest.ffn, made.manifest.model.activation
    content = np.fromfile(made.directory / "ffn.bundle", np.uint8)
    up, gate = biases(made), biases(made, "gate")
    n_layers, n_neurons = geometry.n_layers, geometry.n_neurons
    lane, memory = ComputeLane(), InMemoryStore(geometry, made.rows)
    dense = ResidentFFN(memory, lane, activation, up, gate, thresholds)
    engine = FakeEngine(content, seed=options.seed, **options.faults)
    store = BundleFileStore(engine, geometry, made.manifest.layer_offset_bytes)
    predictor = GuessingOracle(geometry, activation, list(made.rows), up, gate, thresholds)
    predictor.rng = np.random.default_rng(options.seed)
    predictor.share, predictor.good = max(0.0, options.guesses), options.guesses < 0
    predictor.dense_layers = frozenset(options.dense)
    stride = geometry.stride_bytes
    matrix = aligned_empty(options.n_rows * stride).reshape(options.n_rows, stride)
    pool = RowPool(matrix, options.n_rows, up_bias=up[0] is not None, gate_bias=gate[0] is not None)
    policy = make_policy(options.eviction, n_layers, n_neurons, options.k, None)
    capacity = options.capacity or (options.n_rows * 3 // 4 // n_layers,) * n_layers
    window = Window(pool, n_layers, n_neurons, capacity, policy, up, gate)
    waits = StreamStats()
    stream = StreamingFFN(
        store, lane, activation, up, gate, thresholds=thresholds, layers=options.dense[1:], stats=waits
    )
    sparse = SparseFFN(
        store,
        lane,
        predictor,
        window,
        activation,
        MaskedPrompt(stream, predictor),
        thresholds=thresholds,
        prefetch=options.prefetch,
        waits=waits,
    )
    ffn = HybridFFN(predictor, sparse, dict.fromkeys(options.dense[:1], dense), stream, waits)
    try:
        yield Setup(ffn, sparse, dense, lane, window, predictor, engine, store)
    finally:
        await ffn.close()
        await store.close()
        lane.close()


def inputs(rng: np.random.Generator, batch: int, d_model: int) -> F32Array:
    """An FFN's input: mostly what fires few neurons."""
    return rng.standard_normal((batch, d_model), np.float32)


async def settle_down(setup: Setup) -> None:
    """Let reads that nobody waits for end."""
    await setup.sparse.reads.drain()
    await asyncio.sleep(0)
