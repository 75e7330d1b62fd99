"""Prompts through masked layers: how rows come must not show in a bit of the result."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from prompt_setup import (
    BIASES,
    IN_PART,
    LAYERS,
    MIXED,
    NEURONS,
    SPEC,
    THRESHOLDS,
    WHOLE,
    Expected,
    RandomPredictor,
    opened,
)

from flashd.errors import DiskReadError
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.prompt import WARM_TOKENS, ReadCosts
from flashd.testing.bundles import MadeBundle, make_bundle
from flashd.types import F32Array


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("prompt"), SPEC)


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
        predictor = RandomPredictor(share)
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


@pytest.mark.parametrize("dense", [0, 1, 2])
@pytest.mark.parametrize("price", [WHOLE, IN_PART])
async def test_nothing_is_read_ahead_in_vain(
    made: MadeBundle, inputs: list[F32Array], price: ReadCosts, dense: int
) -> None:
    """A layer without a mask is read once in each pass, wherever it stands among those that have one."""
    async with opened(made, 30, price, dense=(dense,)) as setup:
        for _ in range(3):
            for layer in range(LAYERS):
                await setup.run(layer, inputs[1])
                await asyncio.sleep(0)
        ahead = sum(piece.layer == dense for piece in setup.stream._ring)
        assert ahead == (4 if dense == 0 else 0)
        assert setup.store.ranges.count(dense) == 3 * 8 + ahead
        masked = 3 * 8 if price is WHOLE else 0
        assert [setup.store.ranges.count(i) for i in range(LAYERS) if i != dense] == [masked] * 2


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
                with suppress(DiskReadError):  # of a read that was ahead
                    await setup.run(layer, inputs[2])
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
