"""Prompts through masked layers: how rows come must not show in a bit of the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from support import ffn

from flashd.disk.buffers import aligned_empty
from flashd.disk.curve import CurvePoint, DeviceCurve
from flashd.errors import DiskReadError
from flashd.kernels.lane import ComputeLane
from flashd.memory.eviction import make_policy
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.predictor.base import Predictor
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.prompt import WARM_TOKENS, PromptFFN, ReadCosts, cheaper_in_part
from flashd.prefetch.sparse import SparseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.store.base import WrappedStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import open_store
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.types import BoolArray, F32Array, FFNGeometry, I64Array, U8Array

SPEC = tiny_spec("llama", d_model=96, d_ffn=1003, n_layers=3)
LAYERS, NEURONS = SPEC.n_layers, SPEC.d_ffn
# Buffers of 128 rows: eight slices a layer, the last one short.
RING = {"ring_bytes": 4 * 128 * 4096, "n_buffers": 4}
SLICE_ROWS = 128
THRESHOLDS = (0.02,) * LAYERS
BIASES = [np.random.default_rng(7).standard_normal(NEURONS, np.float32) for _ in range(LAYERS)]


class _Random(Predictor):
    """Requests neurons by a random projection: a mask of the input alone."""

    def __init__(self, share: float) -> None:
        self.name, self.n_layers, self.n_neurons, self.nbytes = "random", LAYERS, NEURONS, 0
        rng = np.random.default_rng(3)
        self._codes = rng.standard_normal((LAYERS, NEURONS, SPEC.d_model), np.float32)
        self._codes /= np.linalg.norm(self._codes, axis=2, keepdims=True)
        self._level = np.float32(np.quantile(rng.standard_normal(10000), 1 - share))

    def masked(self, layer: int) -> bool:
        return True

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        # One product a token: the mask of a token must not depend on the batch.
        wanted = np.stack([self._codes[layer] @ row > self._level for row in x])
        ids = np.flatnonzero(wanted.any(axis=0))
        return ids, np.ascontiguousarray(wanted[:, ids])


class _Flaky(WrappedStore):
    """Counts reads, delays them, and lets some fail."""

    def __init__(self, inner: InMemoryStore | WrappedStore) -> None:
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
    store: _Flaky
    lane: ComputeLane
    predictor: _Random
    window: Window
    stream: StreamingFFN
    prompt: PromptFFN
    decode: SparseFFN

    async def run(self, layer: int, x: F32Array) -> F32Array:
        """Through the decoder's way to a layer with a mask; a prompt's chunk if ``x`` is one."""
        return await ffn(self.decode, layer, x)

    def check(self) -> None:
        self.window.check_integrity()
        assert not any(self.window.n_in_flight)
        for layer in range(LAYERS):
            assert self.window.used[layer] <= self.window.capacity[layer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("prompt"), SPEC)


@asynccontextmanager
async def opened(
    made: MadeBundle,
    capacity: int,
    price: ReadCosts,
    *,
    policy: str = "lru",
    share: float = 0.02,
    from_disk: bool = False,
) -> AsyncIterator[Setup]:
    geometry = made.manifest.ffn
    rows = (
        await open_store(made.directory, made.manifest) if from_disk else InMemoryStore(geometry, made.rows)
    )
    store = _Flaky(rows)
    lane = ComputeLane()
    predictor = _Random(share)
    matrix = aligned_empty((LAYERS * capacity + 64) * geometry.stride_bytes).reshape(
        -1, geometry.stride_bytes
    )
    pool = RowPool(matrix, len(matrix), up_bias=True, gate_bias=True)
    rule = make_policy(policy, LAYERS, NEURONS, 3, None)
    window = Window(pool, LAYERS, NEURONS, [capacity] * LAYERS, rule, BIASES, BIASES)
    stream = StreamingFFN(store, lane, "silu", BIASES, BIASES, thresholds=THRESHOLDS, layers=(), **RING)
    prompt = PromptFFN(stream, lane, predictor, window, DenseFFN(geometry, "silu"), geometry, price)
    decode = SparseFFN(store, lane, predictor, window, "silu", prompt, thresholds=THRESHOLDS, prefetch="off")
    yield Setup(store, lane, predictor, window, stream, prompt, decode)
    await decode.close()
    await stream.close()
    await store.close()
    lane.close()


def some_tokens(rng: np.random.Generator, count: int) -> F32Array:
    return rng.standard_normal((count, SPEC.d_model), np.float32)


@pytest.fixture(scope="module")
def inputs() -> list[F32Array]:
    rng = np.random.default_rng(11)
    return [some_tokens(rng, count) for count in (17, 40, 90, 1, 5, 33, 1)]


@pytest.fixture(scope="module")
def expected(made: MadeBundle, inputs: list[F32Array]) -> Expected:
    """All rows in RAM in one piece, all neurons computed, then masked."""
    dense = DenseFFN(made.manifest.ffn, "silu")
    results: Expected = {}
    for share in (0.0, 0.02, 0.3):
        predictor = _Random(share)
        results[share] = [[np.zeros_like(x) for _ in range(LAYERS)] for x in inputs]
        for x, sums in zip(inputs, results[share], strict=True):
            for layer, acc in enumerate(sums):
                weights = SliceWeights(made.rows[layer], BIASES[layer], BIASES[layer], THRESHOLDS[layer])
                dense.add(weights, x, acc, predictor.predict_prompt(layer, x))
    return results


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
@pytest.mark.parametrize(
    ("capacity", "policy"), [(0, "lru"), (30, "lru"), (30, "window"), (30, "frequency"), (NEURONS, "lru")]
)
async def test_the_same_bits_however_rows_come(
    made: MadeBundle,
    inputs: list[F32Array],
    expected: Expected,
    capacity: int,
    share: float,
    policy: str,
) -> None:
    """Chunks and decoded tokens in turn, over any window: streamed, in part, and both."""
    for price in (WHOLE, IN_PART, MIXED):
        async with opened(made, capacity, price, policy=policy, share=share) as setup:
            for _ in range(2):
                for x, wanted in zip(inputs, expected[share], strict=True):
                    for layer in range(LAYERS):
                        np.testing.assert_array_equal(await setup.run(layer, x), wanted[layer])
                    if len(x) > 16:
                        setup.check()


async def test_rows_in_ram_are_not_read_again(made: MadeBundle, inputs: list[F32Array]) -> None:
    async with opened(made, NEURONS, IN_PART) as setup:
        x = inputs[1]
        assert len(x) <= WARM_TOKENS
        await setup.run(0, x)
        wanted = np.flatnonzero(setup.predictor.predict_prompt(0, x).any(axis=0))
        read = np.concatenate([ids for _, ids in setup.store.rows])
        np.testing.assert_array_equal(read, wanted)
        assert not setup.store.ranges
        assert setup.stream.stats.partial_slices == setup.stream.stats.slices == 8
        setup.store.rows.clear()
        again = await setup.run(0, x)
        assert not setup.store.rows
        np.testing.assert_array_equal(again, await setup.run(0, x))
        # The first decoded token that asks for what the prompt asked for reads nothing.
        await setup.run(0, x[-1:])
        assert not setup.store.rows
        assert setup.decode.stats.demand == 0


@pytest.mark.parametrize("price", [WHOLE, IN_PART])
async def test_the_window_keeps_what_was_requested_last(
    made: MadeBundle, inputs: list[F32Array], price: ReadCosts
) -> None:
    """Most recent first, up to the capacity; its rows hold the neurons' weights."""
    async with opened(made, 100, price) as setup:
        for x in (inputs[2], inputs[1]):
            for layer in range(LAYERS):
                await setup.run(layer, x)
        setup.check()
        for layer in range(LAYERS):
            mask = setup.predictor.predict_prompt(layer, inputs[1])
            kept = np.flatnonzero(setup.window.row_of[layer] >= 0)
            assert len(kept) == 100
            newest = np.flatnonzero(mask[-3:].any(axis=0))
            assert 0 < len(newest) < 100
            assert set(newest) <= set(kept)
            age = np.where(mask.any(axis=0), mask[::-1].argmax(axis=0), 1 << 20)
            assert age[kept].max() <= np.delete(age, kept).min()
            rows = setup.window.pool.matrix[setup.window.row_of[layer][kept]]
            np.testing.assert_array_equal(rows, made.rows[layer][kept])


async def test_who_decodes_meanwhile_keeps_rows(made: MadeBundle, inputs: list[F32Array]) -> None:
    """A chunk between two steps of another sequence is one step; two chunks in a row are many."""
    async with opened(made, 60, IN_PART) as setup:
        token = inputs[3]
        for layer in range(LAYERS):
            await setup.run(layer, token)
        ids, _ = setup.predictor.predict(0, token)
        for layer in range(LAYERS):
            await setup.run(layer, inputs[2])
        assert (setup.window.row_of[0][ids] >= 0).all()
        for layer in range(LAYERS):
            await setup.run(layer, inputs[2][::-1].copy())
        assert not (setup.window.row_of[0][ids] >= 0).all()


async def test_layers_that_stream_are_read_ahead(made: MadeBundle, inputs: list[F32Array]) -> None:
    async with opened(made, 30, WHOLE) as setup:
        for _ in range(2):
            for layer in range(LAYERS):
                await setup.run(layer, inputs[1])
                await asyncio.sleep(0)
                if layer < LAYERS - 1:
                    ahead = setup.stream._ring
                    assert {piece.layer for piece in ahead} == ({layer + 1} if _ else set())
        assert not setup.stream._ring  # after the last layer nobody knows whether a chunk follows
        assert len(setup.store.ranges) == 2 * LAYERS * 8
        await setup.run(0, inputs[1])
        await asyncio.sleep(0)
        assert setup.stream._ring
        setup.prompt._costs = IN_PART  # what has been read ahead is used; the rest is read in part
        before = len(setup.store.ranges)
        await setup.run(1, inputs[1])
        assert set(setup.store.ranges[before:]) <= {2}
        assert {layer for layer, _ in setup.store.rows} == {1}


async def test_failed_reads_and_cancelling_leave_all_usable(
    made: MadeBundle, inputs: list[F32Array], expected: Expected
) -> None:
    rng = np.random.default_rng(5)
    failed = cancelled = 0
    async with opened(made, 60, MIXED) as setup:
        for round_ in range(80):
            number, layer = int(rng.integers(len(inputs))), int(rng.integers(LAYERS))
            setup.prompt._costs = (WHOLE, IN_PART, MIXED)[round_ % 3]
            setup.store.delay_s = float(rng.choice([0, 0.0005]))
            setup.store.fails = 0.1 if round_ % 2 else 0.0
            task = asyncio.create_task(setup.run(layer, inputs[number]))
            if round_ % 2 == 0:
                for _ in range(int(rng.integers(0, 60))):
                    await asyncio.sleep(0)
                if round_ % 4 == 0:
                    await asyncio.sleep(float(rng.uniform(0, 0.004)))
                task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            failed += isinstance(result, DiskReadError)
            cancelled += isinstance(result, asyncio.CancelledError)
            setup.store.fails = 0.0
            if round_ % 5 == 0:
                await setup.decode.reads.drain()
                layer = int(rng.integers(LAYERS))
                for x, wanted in zip(inputs[2:6], expected[0.02][2:6], strict=True):
                    np.testing.assert_array_equal(await setup.run(layer, x), wanted[layer])
                setup.check()
        assert len(setup.stream._ring) + len(setup.stream._free) == 4
    assert failed > 5
    assert cancelled > 5


async def test_from_flash(made: MadeBundle, inputs: list[F32Array], expected: Expected) -> None:
    async with opened(made, 100, MIXED, from_disk=True) as setup:
        for x, wanted in zip(inputs, expected[0.02], strict=True):
            for layer in range(LAYERS):
                np.testing.assert_array_equal(await setup.run(layer, x), wanted[layer])


def test_what_is_cheaper() -> None:
    geometry = make_geometry(stride_bytes=8192, n_neurons=1000)
    price = ReadCosts.of(None)
    few, most = np.arange(0, 256, 32), np.flatnonzero(np.arange(256) % 3)
    chosen = cheaper_in_part(np.concatenate([few, 256 + most]), geometry, 256, price)
    assert chosen.tolist() == [True, False, True, True]  # nothing to read at all is cheapest
    run = np.arange(700, 760)  # neighbours are one read
    assert cheaper_in_part(run, geometry, 256, price).all()
    gaps = np.arange(0, 256, 2)
    assert not cheaper_in_part(gaps, geometry, 256, price)[0]
    over = ReadCosts(price.size_bytes, price.read_s, max_gap_bytes=8192)
    spread = np.arange(0, 128, 2)  # read over its gaps it is half a slice
    assert not cheaper_in_part(spread, geometry, 256, price)[0]
    assert cheaper_in_part(spread, geometry, 256, over)[0]
    assert cheaper_in_part(np.arange(0), geometry, 256, price).all()


def make_geometry(stride_bytes: int, n_neurons: int) -> FFNGeometry:
    return FFNGeometry(1, n_neurons, stride_bytes // 4, False, "f16", stride_bytes)


def test_costs_are_the_measured_ones() -> None:
    points = tuple(
        CurvePoint(size, depth, gb_per_s * (0.5 if depth == 1 else 1), 1.0)
        for size, gb_per_s in ((4096, 0.4), (65536, 1.6), (1 << 20, 2.0))
        for depth in (1, 64)
    )
    measured = ReadCosts.of(DeviceCurve(points, "uring", True, "6.1", "it", 1, 1 << 30))
    sizes = np.array([512, 4096, 65536, 1 << 20, 4 << 20])
    assert measured.seconds(sizes).tolist() == pytest.approx(
        [4096 / 0.4e9, 4096 / 0.4e9, 65536 / 1.6e9, (1 << 20) / 2e9, (4 << 20) / 2e9]
    )
    assert measured.max_gap_bytes > 0
    assert ReadCosts.of(None).max_gap_bytes == 0
