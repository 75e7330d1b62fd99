from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from flashd import kernels
from flashd.errors import BundleCorruptError, ConfigError
from flashd.layout.manifest import BUNDLE, RESIDENT
from flashd.store.base import WeightStore
from flashd.store.check_budget import MAX_PAUSE_NS, CheckBudget
from flashd.store.checked import CheckedStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import load_resident, load_sums, open_store
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.testing.store_suite import MadeStore, WeightStoreTests, destination
from flashd.types import FFNGeometry, I64Array, StoreKind, U8Array, U32Array


def flip(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


def row_offset(bundle: MadeBundle, layer: int, neuron: int) -> int:
    return bundle.manifest.layer_offset_bytes[layer] + neuron * bundle.manifest.ffn.stride_bytes


async def read_layer(store: WeightStore, layer: int) -> U8Array:
    out = destination(store, store.geometry.n_neurons)
    await store.read_range(layer, 0, len(out), out)
    return out


class Faulty(InMemoryStore):
    """Delivers one wrong byte the first time that a row is read."""

    def __init__(self, geometry: FFNGeometry, rows: U8Array) -> None:
        super().__init__(geometry, rows)
        self.seen = np.zeros(rows.shape[:2], np.bool_)
        self.reads = 0

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        await super().read_range(layer, start, stop, out)
        self._spoil(layer, np.arange(start, stop), out, np.arange(stop - start))

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        await super().read_rows(layer, ids, out, rows)
        self._spoil(layer, ids, out, np.arange(len(ids)) if rows is None else rows)

    def _spoil(self, layer: int, ids: I64Array, out: U8Array, rows: I64Array) -> None:
        self.reads += 1
        out[rows[~self.seen[layer, ids]], 0] ^= 1
        self.seen[layer, ids] = True


def checked(bundle: MadeBundle, inner: WeightStore, budget: CheckBudget | None = None) -> CheckedStore:
    sums = load_sums(bundle.directory, bundle.manifest)
    return CheckedStore(inner, sums, bundle.directory, budget=budget)


class _Checked(WeightStoreTests):
    verify: str

    @pytest.fixture
    async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
        bundle = make_bundle(tmp_path / "bundle", self.spec)
        store = await open_store(bundle.directory, bundle.manifest, verify=self.verify)
        assert isinstance(store.inner, CheckedStore)
        yield MadeStore(store, bundle.rows, [bundle.directory / BUNDLE])
        await store.close()


class TestAuto(_Checked):
    """The shipped suite over a store that checks first reads and samples."""

    verify = "auto"


class TestEveryRead(_Checked):
    """The shipped suite over a store that checks every read."""

    verify = "reads"


@pytest.mark.parametrize("backend", ["auto", "buffered", "memory"])
async def test_a_damaged_row_is_named_and_never_handed_out(tmp_path: Path, backend: str) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    flip(bundle.directory / BUNDLE, row_offset(bundle, 1, 7) + 3)
    match = r"ffn\.bundle: layer 1, neuron 7: checksum mismatch \(1 of"
    if backend == "memory":
        with pytest.raises(BundleCorruptError, match=match):
            await open_store(bundle.directory, bundle.manifest, backend, verify="auto")
        return
    store = await open_store(bundle.directory, bundle.manifest, backend, verify="auto")
    assert np.array_equal(await read_layer(store, 0), bundle.rows[0])
    for _ in range(3):
        with pytest.raises(BundleCorruptError, match=match):
            await read_layer(store, 1)
    assert np.array_equal(await read_layer(store, 2), bundle.rows[2])
    stats = store.stats.checks
    assert (stats.mismatched_rows, stats.rereads) == (6, 3)
    assert store.stats.errors == 3
    await store.close()


@pytest.mark.parametrize("kind", ["file", "zarr"])
async def test_a_damaged_row_among_others_by_id(tmp_path: Path, kind: StoreKind) -> None:
    bundle = make_bundle(tmp_path / "bundle", store=kind)
    largest = max((p for p in (bundle.directory).rglob("c/*/*") if p.is_file()), default=None, key=str)
    victim = bundle.directory / BUNDLE if kind == "file" else largest
    assert victim is not None
    flip(victim, 100)
    store = await open_store(bundle.directory, bundle.manifest, verify="auto")
    failed = 0
    for layer in range(bundle.manifest.ffn.n_layers):
        for ids in np.array_split(np.random.default_rng(0).permutation(bundle.manifest.ffn.n_neurons), 5):
            out, rows = destination(store, 2 * len(ids)), np.arange(len(ids))[::-1] * 2
            try:
                await store.read_rows(layer, ids, out, rows)
                assert np.array_equal(out[rows], bundle.rows[layer][ids])
            except BundleCorruptError:
                failed += 1
    await store.close()
    assert failed == 1


async def test_an_unknown_way_of_checking_is_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    with pytest.raises(ConfigError, match="'sometimes', expected one of: auto, reads"):
        await open_store(bundle.directory, bundle.manifest, verify="sometimes")


async def test_damage_done_while_serving_is_found_at_the_next_read(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    path, at = bundle.directory / BUNDLE, row_offset(bundle, 2, 11)
    store = await open_store(bundle.directory, bundle.manifest, verify="reads")
    assert np.array_equal(await read_layer(store, 2), bundle.rows[2])
    flip(path, at)
    with pytest.raises(BundleCorruptError, match="layer 2, neuron 11"):
        await read_layer(store, 2)
    flip(path, at)
    assert np.array_equal(await read_layer(store, 2), bundle.rows[2])
    await store.close()
    # A failed read is done twice, and each row of each time counts.
    n = bundle.manifest.ffn.n_neurons
    assert (store.stats.checks.rows, store.stats.checks.checked_rows) == (4 * n, 4 * n)


async def test_damage_done_while_serving_is_found_when_there_is_time(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    path, at = bundle.directory / BUNDLE, row_offset(bundle, 2, 11)
    now_ns = 0
    inner = (await open_store(bundle.directory, bundle.manifest)).inner
    store = checked(bundle, inner, CheckBudget(lambda: now_ns))
    await read_layer(store, 2)
    flip(path, at)
    n_checked = store.stats.checked_rows
    assert not np.array_equal(await read_layer(store, 2), bundle.rows[2])  # time stands still: no checks
    assert store.stats.checked_rows == n_checked

    async def read_now_and_then() -> None:
        nonlocal now_ns
        for _ in range(20):
            now_ns += MAX_PAUSE_NS
            await read_layer(store, 2)

    with pytest.raises(BundleCorruptError, match="layer 2, neuron 11"):
        await read_now_and_then()
    # From now on that row is a suspect and no question of time.
    for _ in range(3):
        with pytest.raises(BundleCorruptError, match="layer 2, neuron 11"):
            await read_layer(store, 2)
    flip(path, at)
    for _ in range(20):  # wherever a sample of all rows begins
        now_ns += MAX_PAUSE_NS
        assert np.array_equal(await read_layer(store, 2), bundle.rows[2])
    n_checked = store.stats.checked_rows
    for _ in range(5):
        await read_layer(store, 2)
    assert store.stats.checked_rows == n_checked + 5 * store.geometry.n_neurons
    await store.close()


async def test_what_is_read_again_is_checked_whole(tmp_path: Path) -> None:
    """A read that shows one fault may have others where nobody looked the first time."""
    bundle = make_bundle(tmp_path / "bundle")

    class Script(InMemoryStore):
        wrong = iter([5, 5, 5, 9])

        async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
            await super().read_range(layer, start, stop, out)
            out[next(self.wrong), 0] ^= 1

    now_ns = 0
    inner = Script(bundle.manifest.ffn, bundle.rows.copy())
    store = checked(bundle, inner, CheckBudget(lambda: now_ns))
    for neuron in (5, 9):
        with pytest.raises(BundleCorruptError, match=f"layer 0, neuron {neuron}"):
            await read_layer(store, 0)
    await store.close()


async def test_a_passing_fault_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    now_ns = 0
    inner = Faulty(bundle.manifest.ffn, bundle.rows.copy())
    store = checked(bundle, inner, CheckBudget(lambda: now_ns))
    out = destination(store, 10)
    await store.read_range(0, 0, 10, out)
    assert np.array_equal(out, bundle.rows[0, :10])
    assert inner.reads == 2
    assert (store.stats.mismatched_rows, store.stats.rereads) == (10, 1)
    assert "layer 0, neuron 0: checksum mismatch (10 of 10 rows), right when read again" in caplog.text
    await store.read_range(0, 0, 10, out)
    assert inner.reads == 3
    assert store.stats.checked_rows == 20
    assert store.stats.rows == 30  # the first ten were delivered twice
    await store.close()


@pytest.mark.parametrize("d_model", [32, 8000])
async def test_whatever_is_read_together_each_row_is_checked_at_its_first_read(
    tmp_path: Path, d_model: int
) -> None:
    """Every row is wrong the first time; small rows, whose neighbours are checked with them, and
    large ones."""
    bundle = make_bundle(tmp_path / "bundle", tiny_spec(d_model=d_model, vocab_size=8, n_layers=1))
    inner = Faulty(bundle.manifest.ffn, bundle.rows.copy())
    now_ns = 0
    store = checked(bundle, inner, CheckBudget(lambda: now_ns))
    rng = np.random.default_rng(3)
    n = bundle.manifest.ffn.n_neurons
    for i in range(40):
        ids = rng.integers(0, n, int(rng.integers(0, 12)))
        if i % 3 == 0:
            out = destination(store, len(ids))
            await store.read_rows(0, ids, out)
        elif i % 2:
            around, rows = destination(store, 40), rng.permutation(40)[: len(ids)]
            await store.read_rows(0, ids, around, rows)
            out = around[rows]
        else:
            start = int(rng.integers(n - len(ids)))
            ids = np.arange(start, start + len(ids))
            out = destination(store, len(ids))
            await store.read_range(0, start, start + len(ids), out)
        assert np.array_equal(out, bundle.rows[0][ids])
    assert inner.seen.sum() > n // 2
    await store.close()


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Watches the real kernel, and can make it wait."""
    watched = Sums()
    monkeypatch.setattr("flashd.store.checked.kernels.crc32c", watched)
    return watched


class Sums:
    def __init__(self) -> None:
        self.real: Callable[..., None] = kernels.crc32c
        self.threads: list[str] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, rows: U8Array, got: U32Array, index: I64Array | None = None) -> None:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.go_on.wait(30)
        self.real(rows, got, index)


@pytest.fixture
def big(tmp_path: Path) -> MadeBundle:
    """A layer of 10 MB: too much for the event loop."""
    return make_bundle(tmp_path / "big", tiny_spec(d_model=1024, d_ffn=2500, n_layers=1, vocab_size=8))


async def begin(store: WeightStore, out: U8Array, sums: Sums) -> asyncio.Task[None]:
    """A read that is being checked, as long as the test wants."""
    sums.go_on.clear()
    task = asyncio.create_task(store.read_range(0, 0, len(out), out))
    await asyncio.to_thread(sums.begun.wait, 30)
    return task


async def test_large_checks_leave_the_event_loop_alone_and_small_ones_cost_no_thread(
    big: MadeBundle, sums: Sums
) -> None:
    store = await open_store(big.directory, big.manifest, verify="reads")
    await read_layer(store, 0)
    assert [name.startswith("flashd-check") for name in sums.threads] == [True]
    await store.read_range(0, 0, 3, destination(store, 3))
    assert sums.threads[1] == threading.main_thread().name
    await store.close()


async def test_a_cancelled_read_ends_when_its_check_lets_go_of_the_memory(
    big: MadeBundle, sums: Sums
) -> None:
    inner = Faulty(big.manifest.ffn, big.rows)
    store = checked(big, inner)
    task = await begin(store, destination(store, big.manifest.ffn.n_neurons), sums)
    for _ in range(3):  # whoever cancels more often does not get it sooner
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    sums.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner.reads == 1  # wrong, but nobody wants it any more
    assert np.array_equal(await read_layer(store, 0), big.rows[0])
    await store.close()


async def test_closing_waits_for_checks_and_for_what_they_read_again(big: MadeBundle, sums: Sums) -> None:
    inner = Faulty(big.manifest.ffn, big.rows.copy())
    store = checked(big, inner)
    out = destination(store, big.manifest.ffn.n_neurons)
    task = await begin(store, out, sums)
    closing = asyncio.create_task(store.close())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    sums.go_on.set()
    await task
    await closing
    assert inner.reads == 2
    assert np.array_equal(out, big.rows[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flashd-check")]
    with pytest.raises(ValueError, match="closed"):
        await store.read_range(0, 0, len(out), out)


def test_damaged_resident_weights_are_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    load_resident(bundle.directory, bundle.manifest)
    path = bundle.directory / RESIDENT
    for offset_bytes in (path.stat().st_size - 1, path.stat().st_size // 2):
        flip(path, offset_bytes)
        with pytest.raises(BundleCorruptError, match=r"resident\.safetensors: its SHA-256"):
            load_resident(bundle.directory, bundle.manifest)
        flip(path, offset_bytes)
