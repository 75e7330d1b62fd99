"""Streaming through a ring of buffers, on real files: right, ahead of time, and hard to break."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support import ffn

from flashd.errors import BundleCorruptError, DiskReadError
from flashd.kernels.lane import ComputeLane
from flashd.layout.manifest import BUNDLE
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.stream import RING_BYTES, StreamingFFN
from flashd.store.base import WeightStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import open_store
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.types import BoolArray, F32Array, I64Array, U8Array

SPEC = tiny_spec("llama", d_model=96, d_ffn=1003)
# Buffers of 128 rows: eight slices a layer, the last one short.
RING = {"ring_bytes": 4 * 128 * 4096, "n_buffers": 4}
LAYERS = SPEC.n_layers


class _Watched(WeightStore):
    """Passes reads on; counts them, delays them, lets some fail, holds them back."""

    def __init__(self, inner: WeightStore) -> None:
        self.inner = inner
        self.name, self.geometry, self.alignment_bytes = inner.name, inner.geometry, inner.alignment_bytes
        self.started: list[tuple[int, int]] = []
        self.outstanding = 0
        self.fail: set[tuple[int, int]] = set()
        self.delay_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        self.started.append((layer, start))
        self.outstanding += 1
        try:
            await self.gate.wait()
            await asyncio.sleep(self.delay_s)
            if (layer, start) in self.fail:
                self.fail.remove((layer, start))
                raise DiskReadError(f"layer {layer} from {start}")
            await self.inner.read_range(layer, start, stop, out)
        finally:
            self.outstanding -= 1

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        raise AssertionError("streaming reads ranges")

    async def close(self) -> None:
        await self.inner.close()


@dataclass
class Setup:
    made: MadeBundle
    store: _Watched
    lane: ComputeLane
    source: StreamingFFN
    expected: list[F32Array]  # per layer, for x
    x: F32Array


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    made = make_bundle(tmp_path / "bundle", SPEC)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, SPEC.d_model), np.float32)
    biases = [rng.standard_normal(SPEC.d_ffn, np.float32) for _ in range(LAYERS)]
    lane = ComputeLane()
    # Large slices, from RAM: no read to go wrong.
    whole = InMemoryStore(made.manifest.ffn, made.rows)
    simple = StreamingFFN(whole, lane, "silu", biases, biases)
    expected = [await ffn(simple, layer, x) for layer in range(LAYERS)]
    await simple.close()
    store = _Watched(await open_store(made.directory, made.manifest, "uring"))
    source = StreamingFFN(store, lane, "silu", biases, biases, **RING)
    assert source.slice_rows == 128
    yield Setup(made, store, lane, source, expected, x)
    store.gate.set()
    await source.close()
    await store.close()
    lane.close()


async def assert_right(setup: Setup, layer: int) -> None:
    """Bit for bit: slices do not show in the sum."""
    np.testing.assert_array_equal(await ffn(setup.source, layer, setup.x), setup.expected[layer])


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


async def test_steps_in_order(setup: Setup) -> None:
    for _ in range(3):
        for layer in range(LAYERS):
            await assert_right(setup, layer)
    await asyncio.sleep(0)  # lets the last read start
    assert setup.source.stats.slices == 3 * LAYERS * 8
    # Every slice was read once, in order, and the ring is full of the next step's first ones.
    cycle = [(layer, start) for layer in range(LAYERS) for start in range(0, 1003, 128)]
    assert setup.store.started == [*cycle * 3, *cycle[:4]]


@pytest.mark.parametrize("order", [[1], [2, 0], [0, 0, 0], [2, 1, 0], [0, 2, 1, 1, 2, 0]])
async def test_any_order(setup: Setup, order: list[int]) -> None:
    for layer in order:
        await assert_right(setup, layer)


async def test_many_tokens(setup: Setup) -> None:
    x = np.tile(setup.x, (9, 1))
    for layer in range(LAYERS):
        got = await ffn(setup.source, layer, x)
        np.testing.assert_allclose(got, np.tile(setup.expected[layer], (9, 1)), rtol=1e-3, atol=1e-4)


async def test_reads_go_ahead_while_nobody_asks(setup: Setup) -> None:
    """After layer 0, the next layer's slices arrive during attention."""
    await assert_right(setup, 0)
    await asyncio.sleep(0)
    assert setup.store.started[-1] == (1, 3 * 128)
    await until(lambda: setup.store.outstanding == 0)
    setup.store.gate.clear()  # nothing more arrives: four slices must be there already
    task = asyncio.create_task(ffn(setup.source, 1, setup.x))
    before = setup.source.stats.slices
    await until(lambda: setup.source.stats.slices == before + 4)
    await asyncio.sleep(0.02)
    assert setup.source.stats.slices == before + 4
    assert not task.done()
    setup.store.gate.set()
    np.testing.assert_array_equal(await task, setup.expected[1])


async def test_waiting_for_flash_is_counted(setup: Setup) -> None:
    setup.store.delay_s = 0.02
    began_ns = time.perf_counter_ns()
    await assert_right(setup, 0)
    took_ns = time.perf_counter_ns() - began_ns
    # Eight slices in two rounds of four reads.
    assert 0.9 * 2 * 0.02e9 < setup.source.stats.wait_ns <= took_ns


@pytest.mark.parametrize("start", [0, 128, 896])
async def test_a_failed_read_surfaces_and_the_next_call_works(setup: Setup, start: int) -> None:
    setup.store.fail.add((1, start))
    await assert_right(setup, 0)
    with pytest.raises(DiskReadError, match=f"layer 1 from {start}"):
        await ffn(setup.source, 1, setup.x)
    await assert_right(setup, 1)
    await assert_right(setup, 2)


async def test_a_failure_of_a_slice_that_nobody_wants_is_forgotten(setup: Setup) -> None:
    setup.store.fail.add((1, 0))
    await assert_right(setup, 0)
    await assert_right(setup, 2)
    await assert_right(setup, 1)


async def test_truncated_file(setup: Setup) -> None:
    os.truncate(setup.made.directory / BUNDLE, setup.made.manifest.layer_offset_bytes[2] + 5000)
    await assert_right(setup, 1)
    for _ in range(2):
        with pytest.raises(BundleCorruptError, match="truncated"):
            await ffn(setup.source, 2, setup.x)
    await assert_right(setup, 0)


async def test_cancelled_at_any_moment(setup: Setup) -> None:
    """Whatever the call was waiting for, the next one is right and no buffer is lost."""
    rng = np.random.default_rng(5)
    for round_ in range(60):
        setup.store.delay_s = float(rng.choice([0, 0.0005]))
        task = asyncio.create_task(ffn(setup.source, int(rng.integers(LAYERS)), setup.x))
        for _ in range(int(rng.integers(0, 40))):
            await asyncio.sleep(0)
        if round_ % 3 == 0:
            await asyncio.sleep(float(rng.uniform(0, 0.003)))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_right(setup, int(rng.integers(LAYERS)))
    assert len(setup.source._ring) + len(setup.source._free) == 4
    assert len({piece.buffer.ctypes.data for piece in setup.source._ring}) == len(setup.source._ring)


async def test_cancelled_while_the_lane_computes(setup: Setup) -> None:
    """The lane still works on the buffer: nothing may be read into it."""
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def block() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    await assert_right(setup, 0)
    blockers: list[asyncio.Task[None]] = []

    def then_block() -> F32Array:
        loop.call_soon_threadsafe(lambda: blockers.append(asyncio.create_task(setup.lane.run(block))))
        return setup.x

    task = asyncio.create_task(setup.source.apply(1, then_block))
    await until(lambda: setup.source._computing is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reads = len(setup.store.started)
    again = asyncio.create_task(ffn(setup.source, 2, setup.x))
    await asyncio.sleep(0.05)
    assert len(setup.store.started) == reads
    release.set()
    np.testing.assert_array_equal(await again, setup.expected[2])
    await blockers[0]


async def test_calls_at_the_same_time_take_turns(setup: Setup) -> None:
    results = await asyncio.gather(*(ffn(setup.source, layer, setup.x) for layer in (0, 1, 2, 1)))
    for layer, result in zip((0, 1, 2, 1), results, strict=True):
        np.testing.assert_array_equal(result, setup.expected[layer])


async def test_close_waits_for_reads_and_is_final(setup: Setup) -> None:
    await assert_right(setup, 0)
    await setup.source.close()
    assert setup.store.outstanding == 0
    await setup.source.close()
    with pytest.raises(ValueError, match="closed"):
        await ffn(setup.source, 0, setup.x)


@pytest.mark.parametrize(("layer", "shape"), [(-1, (1, 96)), (3, (1, 96)), (0, (96,)), (0, (1, 95))])
async def test_wrong_arguments(setup: Setup, layer: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        await ffn(setup.source, layer, np.zeros(shape, np.float32))


async def test_memory_is_what_was_asked_for(setup: Setup) -> None:
    lane, rows = setup.lane, np.zeros((LAYERS, 1003, 1024), np.uint8)
    store = InMemoryStore(setup.made.manifest.ffn, rows)
    none: list[F32Array | None] = [None] * LAYERS
    source = StreamingFFN(store, lane, "silu", none, none)
    assert source.ring_bytes <= RING_BYTES
    with pytest.raises(ValueError, match="buffers"):
        StreamingFFN(store, lane, "silu", none, none, ring_bytes=1024)
    with pytest.raises(ValueError, match="biases"):
        StreamingFFN(store, lane, "silu", none[1:], none)


async def test_the_stride_of_the_mount_does_not_show(setup: Setup, tmp_path: Path) -> None:
    """A bundle padded to 4096 has the same slices, and the same bits, as one padded to 512."""
    made = make_bundle(tmp_path / "padded", SPEC, align_bytes=4096)
    assert made.manifest.ffn.stride_bytes == 4096
    store = await open_store(made.directory, made.manifest, "uring")
    up, gate = setup.source._up_bias, setup.source._gate_bias
    source = StreamingFFN(store, setup.lane, "silu", up, gate, **RING)
    assert source.slice_rows == setup.source.slice_rows
    x = np.tile(setup.x, (9, 1))
    for layer in range(LAYERS):
        for tokens in (setup.x, x):
            np.testing.assert_array_equal(
                await ffn(source, layer, tokens), await ffn(setup.source, layer, tokens)
            )
    await source.close()
    await store.close()


@pytest.mark.parametrize("tokens", [3, 40])
async def test_a_masked_token_does_not_use_a_neuron(setup: Setup, tokens: int) -> None:
    x = np.tile(setup.x, (14, 1))[:tokens]
    mask = np.random.default_rng(2).random((tokens, SPEC.d_ffn)) < 0.3
    whole = StreamingFFN(
        InMemoryStore(setup.made.manifest.ffn, setup.made.rows),
        setup.lane,
        "silu",
        setup.source._up_bias,
        setup.source._gate_bias,
        ring_bytes=2 * SPEC.d_ffn * 4096,
        n_buffers=2,
    )
    for layer in range(LAYERS):
        expected = (await whole.apply(layer, lambda: x, lambda made: mask))()
        got = (await setup.source.apply(layer, lambda: x, lambda made: mask))()
        np.testing.assert_array_equal(got, expected)
        for token in range(3):
            alone = mask[token : token + 1]
            kept = SliceWeights(*_rows_of(setup, layer, alone[0]))
            acc = np.zeros((1, SPEC.d_model), np.float32)
            DenseFFN(setup.store.geometry, "silu").add(kept, x[token : token + 1], acc)
            np.testing.assert_allclose(got[token], acc[0], rtol=1e-4, atol=1e-5)
    await whole.close()


def _rows_of(setup: Setup, layer: int, kept: BoolArray) -> tuple[U8Array, F32Array, F32Array]:
    up, gate = setup.source._up_bias[layer], setup.source._gate_bias[layer]
    assert up is not None
    assert gate is not None
    return setup.made.rows[layer][kept], up[kept], gate[kept]


async def test_only_chosen_layers_are_read_ahead(setup: Setup) -> None:
    source = StreamingFFN(
        setup.store, setup.lane, "silu", setup.source._up_bias, setup.source._gate_bias, layers=[1], **RING
    )
    await setup.source.close()
    setup.source = source
    for _ in range(2):
        await assert_right(setup, 1)
        await asyncio.sleep(0)
    assert {layer for layer, _ in setup.store.started} == {1}
    before = len(setup.store.started)
    await assert_right(setup, 2)  # another one is read when it is asked for
    await asyncio.sleep(0)
    assert [layer for layer, _ in setup.store.started[before:]] == [2] * 8 + [1] * 4
    source.layers = ()
    await assert_right(setup, 1)
    await asyncio.sleep(0)
    assert setup.store.outstanding == 0
    assert not source._ring
    await source.close()
