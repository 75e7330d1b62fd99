"""The FFN over predicted neurons: with the true mask it has the bits of the dense one, whatever memory there
is, however reads end, and whoever gives up on them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_setup import Options, Setup, inputs, settle_down, sparse_setup

from flashd.errors import BundleCorruptError, DiskReadError
from flashd.memory.eviction import POLICIES
from flashd.store.base import WeightStore, WrappedStore
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.types import F32Array, I64Array, U8Array

NEURONS = 203
LAYERS = 3

MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, ...]]] = {
    "relu": ("opt", {}, ()),
    "relu2": ("opt", {"activation": "relu2"}, ()),
    "fatrelu": ("llama", {"activation": "relu"}, (0.4, 0.0, 1.0)),
    "cats": ("llama", {}, (0.15, 0.2, 0.1)),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeBundle]:
    root = tmp_path_factory.mktemp("sparse")
    return {
        name: make_bundle(root / name, tiny_spec(family, d_ffn=NEURONS, **fields), dtype="f16")
        for name, (family, fields, _) in MODELS.items()
    }


options = st.builds(
    Options,
    n_rows=st.sampled_from([3, 40, 100, 200, 450, 700]),
    capacity=st.one_of(
        st.just(()), st.lists(st.integers(0, NEURONS), min_size=LAYERS, max_size=LAYERS).map(tuple)
    ),
    eviction=st.sampled_from(sorted(POLICIES)),
    k=st.integers(1, 4),
    prefetch=st.sampled_from(["on", "auto", "off"]),
    guesses=st.sampled_from([-1.0, 0.0, 0.05, 0.5, 1.0]),
    dense=st.sampled_from([(), (), (0,), (0, 2), (1,)]),
    seed=st.integers(0, 1000),
    faults=st.fixed_dictionaries({"latency_us": st.sampled_from([0, 100]), "short_share": st.just(0.1)}),
)


async def steps(setup: Setup, made: MadeBundle, batches: list[int], seed: int) -> None:
    """Passes of so many tokens each, compared bit by bit."""
    rng = np.random.default_rng(seed)
    for batch in batches:
        for layer in range(LAYERS):
            x = inputs(rng, batch, made.manifest.ffn.d_model)
            got = await setup.apply(layer, x)
            np.testing.assert_array_equal(got, await setup.expected(layer, x))
    await settle_down(setup)
    await setup.check()


@pytest.mark.parametrize("model", MODELS)
def test_the_bits_of_the_dense_ffn(bundles: dict[str, MadeBundle], model: str) -> None:
    """Random windows, evictions, guesses, batches and prompts between them."""
    made = bundles[model]

    @settings(max_examples=15, deadline=None, database=None)
    @given(
        options,
        st.lists(st.sampled_from([1, 1, 1, 2, 5, 16, 17]), min_size=1, max_size=8),
        st.integers(0, 99),
    )
    def check(chosen: Options, batches: list[int], seed: int) -> None:
        async def run() -> None:
            # More rows than the capacities add up to are never needed, but fewer may be there.
            capacity = chosen.capacity
            if sum(capacity) > chosen.n_rows:
                capacity = ()
            async with sparse_setup(made, replace(chosen, capacity=capacity), MODELS[model][2]) as setup:
                await steps(setup, made, batches, seed)

        asyncio.run(run())

    check()


async def test_what_is_in_ram_is_not_read_again(bundles: dict[str, MadeBundle]) -> None:
    made = bundles["relu"]
    async with sparse_setup(made, Options(n_rows=700, capacity=(NEURONS,) * LAYERS)) as setup:
        x = inputs(np.random.default_rng(1), 1, made.manifest.ffn.d_model)
        for _ in range(3):
            for layer in range(LAYERS):
                await setup.apply(layer, x)
        stats = setup.sparse.stats
        assert stats.demand * 3 == stats.requested == stats.fired
        assert stats.resident == stats.requested - stats.demand
        assert (stats.passes, stats.evicted, stats.extra_rounds) == (3, 0, 0)
        assert setup.engine.stats.bytes_read == stats.demand * made.manifest.ffn.stride_bytes


async def test_a_layer_that_does_not_fit_takes_several_rounds(bundles: dict[str, MadeBundle]) -> None:
    made = bundles["relu"]
    async with sparse_setup(made, Options(n_rows=40)) as setup:
        await steps(setup, made, [16, 1, 1], 3)
        assert setup.sparse.stats.extra_rounds >= NEURONS // 40
        assert setup.window.pool.n_rows - setup.window.pool.n_free <= 40


async def test_good_guesses_are_read_ahead_and_used(bundles: dict[str, MadeBundle]) -> None:
    made = bundles["relu"]
    one = Options(n_rows=600, k=1, capacity=(100,) * LAYERS, eviction="window", prefetch="on")
    async with sparse_setup(made, one) as setup:
        rng = np.random.default_rng(5)
        for _ in range(12):
            xs = [inputs(rng, 1, made.manifest.ffn.d_model) for _ in range(LAYERS)]
            setup.predictor.upcoming = dict(enumerate(xs))
            for layer, x in enumerate(xs):
                np.testing.assert_array_equal(await setup.apply(layer, x), await setup.expected(layer, x))
        stats = setup.sparse.stats
        assert stats.prefetched_used == stats.prefetched > 500
        # All that was missing was on its way when it was asked for, but for what lay beyond the free rows.
        assert stats.demand < 0.1 * stats.prefetched
        await settle_down(setup)
        await setup.check()


async def test_bad_guesses_are_given_up(bundles: dict[str, MadeBundle]) -> None:
    """Wrong three times out of four: the layers are left out as soon as that is known."""
    made = bundles["relu"]
    wild = Options(n_rows=450, prefetch="auto", guesses=0.9, capacity=(80, 80, 80))
    async with sparse_setup(made, wild) as setup:
        rng = np.random.default_rng(5)
        x = inputs(rng, 1, made.manifest.ffn.d_model)
        for _ in range(10):
            for layer in range(LAYERS):
                await setup.apply(layer, x * np.float32(rng.uniform(0.9, 1.1)))
        benefit = setup.sparse.benefit
        bad = [benefit.precision(layer) < 0.3 for layer in range(LAYERS)]
        assert sum(bad) >= 2  # of the first, more neurons fire
        assert benefit.layers == LAYERS - sum(bad)


async def test_guesses_in_flight_are_bounded(bundles: dict[str, MadeBundle]) -> None:
    made = bundles["relu"]
    wild = Options(n_rows=450, prefetch="on", guesses=1.0, faults={"latency_us": 20_000})
    async with sparse_setup(made, wild) as setup:
        setup.sparse._prefetch_rows = 20
        x = inputs(np.random.default_rng(5), 1, made.manifest.ffn.d_model)
        for layer in range(LAYERS):
            await setup.apply(layer, x)
            in_flight = sum(len(read.ids) for read in setup.sparse.reads.open if read.prefetch)
            assert in_flight <= 20
        assert 0 < setup.sparse.stats.prefetched <= 20 * LAYERS


@pytest.mark.parametrize("prefetch", ["on", "off"])
async def test_failed_reads_surface_and_the_next_step_works(
    bundles: dict[str, MadeBundle], prefetch: str
) -> None:
    made = bundles["relu"]
    faults = {"eio_share": 0.12, "latency_us": 50}
    sick = Options(n_rows=300, prefetch=prefetch, guesses=0.3, faults=faults)
    failed = right = 0
    async with sparse_setup(made, sick) as setup:
        rng = np.random.default_rng(7)
        for _ in range(60):
            for layer in range(LAYERS):
                x = inputs(rng, int(rng.integers(1, 4)), made.manifest.ffn.d_model)
                try:
                    got = await setup.apply(layer, x)
                except DiskReadError:
                    failed += 1
                    break
                np.testing.assert_array_equal(got, await setup.expected(layer, x))
                right += 1
        await settle_down(setup)
        await setup.lane.run(setup.sparse._settle)
        assert not setup.window.in_flight.any()
        await setup.check()
        assert failed > 5
        assert right > 20
        assert setup.sparse.stats.failed_reads >= failed


class _Fragile(WrappedStore):
    """Lets chosen reads of a store fail; they are done on the event loop."""

    def __init__(self, inner: WeightStore, fails: str) -> None:
        super().__init__(inner)
        self.fails = fails
        self.failed = 0

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        await self.inner.read_range(layer, start, stop, out)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        await self.inner.read_rows(layer, ids, out, rows, prefetch=prefetch)
        if prefetch == (self.fails == "guess"):
            self.failed += 1
            raise BundleCorruptError(f"layer {layer}: checksum mismatch")

    async def close(self) -> None:
        await self.inner.close()


async def test_a_guess_that_fails_harms_nobody(
    bundles: dict[str, MadeBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it should have brought is read again because it is needed."""
    made = bundles["relu"]
    async with sparse_setup(made, Options(n_rows=450, prefetch="on", guesses=1.0)) as setup:
        fragile = _Fragile(setup.store, "guess")
        monkeypatch.setattr(setup.sparse.reads, "_store", fragile)
        await steps(setup, made, [1] * 6, 11)
        assert fragile.failed >= 6
        assert setup.sparse.stats.failed_reads > 0


async def test_damage_is_an_error_of_the_step(
    bundles: dict[str, MadeBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bundles["relu"]
    async with sparse_setup(made, Options()) as setup:
        with monkeypatch.context() as patch:
            patch.setattr(setup.sparse.reads, "_store", _Fragile(setup.store, "demand"))
            x = inputs(np.random.default_rng(5), 1, made.manifest.ffn.d_model)
            with pytest.raises(BundleCorruptError, match="layer 0: checksum"):
                await setup.apply(0, x)
        await steps(setup, made, [1, 2], 11)


@pytest.mark.parametrize("n_rows", [9, 60, 300])
async def test_cancelled_at_any_moment(bundles: dict[str, MadeBundle], n_rows: int) -> None:
    """Rows that a read still writes to are nobody else's until it has ended."""
    made = bundles["relu"]
    slow = Options(n_rows=n_rows, prefetch="on", guesses=0.3, faults={"latency_us": 300})
    rng = np.random.default_rng(9)
    async with sparse_setup(made, slow) as setup:
        for round_ in range(40):

            async def forward(xs: list[F32Array]) -> None:
                for layer in range(LAYERS):
                    await setup.apply(layer, xs[layer])

            xs = [inputs(rng, int(rng.choice([1, 3, 17])), made.manifest.ffn.d_model) for _ in range(LAYERS)]
            task = asyncio.create_task(forward(xs))
            for _ in range(int(rng.integers(0, 30))):
                await asyncio.sleep(0)
            if round_ % 3 == 0:
                await asyncio.sleep(float(rng.uniform(0, 0.004)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await setup.check()
            await steps(setup, made, [1], round_)


async def test_an_output_asked_for_too_late_is_refused(bundles: dict[str, MadeBundle]) -> None:
    made = bundles["relu"]
    async with sparse_setup(made, Options()) as setup:
        x = inputs(np.random.default_rng(5), 1, made.manifest.ffn.d_model)
        finish = await setup.ffn.apply(0, lambda: x)
        await setup.apply(1, x)
        with pytest.raises(RuntimeError, match="after the next layer's"):
            await setup.lane.run(finish)


async def test_the_window_shrinks_and_grows_between_steps(
    bundles: dict[str, MadeBundle], tmp_path: Path
) -> None:
    made = bundles["fatrelu"]
    rng = np.random.default_rng(3)
    async with sparse_setup(made, Options(n_rows=500), MODELS["fatrelu"][2]) as setup:
        for n_rows in (500, 200, 60, 350, 500):
            await settle_down(setup)
            await setup.lane.run(setup.sparse._settle)
            capacity = (n_rows * 3 // 4 // LAYERS,) * LAYERS
            await setup.lane.run(setup.window.resize, n_rows, capacity)
            setup.window.pool.matrix[n_rows:] = 0xFF  # NaN: nobody may look there
            await steps(setup, made, [1, 4, 1], int(rng.integers(99)))
