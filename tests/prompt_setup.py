"""A window, a stream and a prompt source over a small bundle, with a store that misbehaves on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from support import ffn

from flashd.disk.buffers import aligned_empty
from flashd.errors import DiskReadError
from flashd.kernels.lane import ComputeLane
from flashd.layout.manifest import BUNDLE
from flashd.memory.eviction import make_policy
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.predictor.base import Predictor
from flashd.prefetch.dense import DenseFFN
from flashd.prefetch.prompt import PromptFFN, ReadCosts
from flashd.prefetch.sparse import SparseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.store.base import WeightStore, WrappedStore
from flashd.store.bundle_file import BundleFileStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import open_store
from flashd.testing.bundles import MadeBundle, tiny_spec
from flashd.testing.fake_engine import FakeDevice, FakeEngine
from flashd.types import BoolArray, F32Array, I64Array, U8Array

SPEC = tiny_spec("llama", d_model=96, d_ffn=1003, n_layers=3)
LAYERS, NEURONS = SPEC.n_layers, SPEC.d_ffn
# Buffers of 128 rows: eight slices a layer, the last one short.
RING = {"ring_bytes": 4 * 128 * 4096, "n_buffers": 4}
SLICE_ROWS = 128
THRESHOLDS = (0.02,) * LAYERS
BIASES = [np.random.default_rng(7).standard_normal(NEURONS, np.float32) for _ in range(LAYERS)]


class RandomPredictor(Predictor):
    """Requests neurons by a random projection: a mask of the input alone."""

    def __init__(self, share: float, dense: tuple[int, ...] = ()) -> None:
        self.dense = dense
        self.name, self.n_layers, self.n_neurons, self.nbytes = "random", LAYERS, NEURONS, 0
        rng = np.random.default_rng(3)
        self._codes = rng.standard_normal((LAYERS, NEURONS, SPEC.d_model), np.float32)
        self._codes /= np.linalg.norm(self._codes, axis=2, keepdims=True)
        self._level = np.float32(np.quantile(rng.standard_normal(10000), 1 - share))

    def masked(self, layer: int) -> bool:
        return layer not in self.dense

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        # One product a token: the mask of a token must not depend on the batch.
        wanted = np.stack([self._codes[layer] @ row > self._level for row in x])
        ids = np.flatnonzero(wanted.any(axis=0))
        return ids, np.ascontiguousarray(wanted[:, ids])


class Flaky(WrappedStore):
    """Counts reads, delays them, and lets some fail."""

    def __init__(self, inner: WeightStore) -> None:
        super().__init__(inner)
        self.rng = np.random.default_rng(0)
        self.fails = 0.0
        self.delay_s = 0.0
        self.ranges: list[int] = []
        self.rows: list[tuple[int, I64Array]] = []

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        self.ranges.append(layer)
        await self._trouble()
        await self.inner.read_range(layer, start, stop, out)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        self.rows.append((layer, ids))
        await self._trouble()
        await self.inner.read_rows(layer, ids, out, rows, prefetch=prefetch)

    async def _trouble(self) -> None:
        await asyncio.sleep(self.delay_s * self.rng.random())
        if self.rng.random() < self.fails:
            raise DiskReadError("asked for")

    async def close(self) -> None:
        await self.inner.close()


def costs(whole: float, part: float) -> ReadCosts:
    """A device on which reads up to 64 rows take ``part`` and a slice takes ``whole`` seconds."""
    sizes = np.array([1, 64 * 1024, SLICE_ROWS * 1024], np.float64)
    return ReadCosts(sizes, np.array([part, part, whole]))


# By share requested, input and layer.
Expected = dict[float, list[list[F32Array]]]
WHOLE, IN_PART, MIXED = costs(1, 9), costs(1, 1e-9), costs(1, 0.06)


@dataclass
class Setup:
    store: Flaky
    lane: ComputeLane
    predictor: RandomPredictor
    window: Window
    stream: StreamingFFN
    prompt: PromptFFN
    decode: SparseFFN

    async def run(self, layer: int, x: F32Array) -> F32Array:
        """Through the decoder's way to a layer with a mask; a prompt's chunk if ``x`` is one."""
        return await ffn(self.decode if self.predictor.masked(layer) else self.stream, layer, x)

    def check(self) -> None:
        self.window.check_integrity()
        assert not any(self.window.n_in_flight)
        for layer in range(LAYERS):
            assert self.window.used[layer] <= self.window.capacity[layer]


@asynccontextmanager
async def opened(
    made: MadeBundle,
    capacity: int,
    price: ReadCosts,
    *,
    policy: str = "lru",
    share: float = 0.02,
    from_disk: bool = False,
    device: FakeDevice | None = None,
    dense: tuple[int, ...] = (),
) -> AsyncIterator[Setup]:
    geometry = made.manifest.ffn
    rows: WeightStore = InMemoryStore(geometry, made.rows)
    if from_disk:
        rows = await open_store(made.directory, made.manifest)
    if device is not None:
        file = np.fromfile(made.directory / BUNDLE, np.uint8)
        engine = FakeEngine(file, depth=64, device=device)
        rows = BundleFileStore(engine, geometry, made.manifest.layer_offset_bytes)
    store = Flaky(rows)
    lane = ComputeLane()
    predictor = RandomPredictor(share, dense)
    matrix = aligned_empty((LAYERS * capacity + 64) * geometry.stride_bytes).reshape(
        -1, geometry.stride_bytes
    )
    pool = RowPool(matrix, len(matrix), up_bias=True, gate_bias=True)
    rule = make_policy(policy, LAYERS, NEURONS, 3, None)
    window = Window(pool, LAYERS, NEURONS, [capacity] * LAYERS, rule, BIASES, BIASES)
    stream = StreamingFFN(store, lane, "silu", BIASES, BIASES, thresholds=THRESHOLDS, layers=dense, **RING)
    prompt = PromptFFN(stream, lane, predictor, window, DenseFFN(geometry, "silu"), geometry, price)
    decode = SparseFFN(store, lane, predictor, window, "silu", prompt, thresholds=THRESHOLDS, prefetch="off")
    yield Setup(store, lane, predictor, window, stream, prompt, decode)
    await decode.close()
    await stream.close()
    await store.close()
    lane.close()
