"""Scattered rows of a real bundle: merged reads, gaps read over, and what the store says when it fails."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from flashd.config import cache_dir
from flashd.disk import native_engine
from flashd.disk.buffered import BufferedEngine
from flashd.disk.buffers import aligned_empty
from flashd.disk.curve import MIN_FILE_BYTES, CurvePoint, DeviceCurve
from flashd.disk.device import device_identity
from flashd.disk.engine import MAX_DESTINATIONS, SKIP, ReadBatch, ReadEngine
from flashd.disk.probe import ENGINES, open_engine
from flashd.errors import BundleCorruptError, ConfigError, DiskReadError
from flashd.layout.manifest import BUNDLE
from flashd.store.bundle_file import MAX_READ_BYTES, BundleFileStore
from flashd.store.metered import MeteredStore
from flashd.store.open import open_store
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.types import U8Array

GUARD = 0xA5


@pytest.fixture
def bundle(tmp_path: Path) -> MadeBundle:
    return make_bundle(tmp_path / "bundle", tiny_spec("llama", d_ffn=200), align_bytes=4096)


@pytest.fixture(params=ENGINES)
async def engine(bundle: MadeBundle, request: pytest.FixtureRequest) -> AsyncIterator[ReadEngine]:
    try:
        opened = await open_engine(bundle.directory / BUNDLE, request.param)
    except ConfigError as exc:
        pytest.skip(str(exc))
    yield opened
    await opened.close()


def store_of(bundle: MadeBundle, engine: ReadEngine, gap_rows: int = 0) -> BundleFileStore:
    rows = bundle.manifest.ffn
    return BundleFileStore(engine, rows, bundle.manifest.layer_offset_bytes, gap_rows * rows.stride_bytes)


def guarded(count: int, stride: int) -> tuple[U8Array, U8Array]:
    """Memory full of a pattern, and ``count`` rows in its middle."""
    memory = aligned_empty((count + 16) * stride).reshape(count + 16, stride)
    memory[:] = GUARD
    return memory, memory[8:-8]


class Recording(BufferedEngine):
    """A real engine that remembers what it was asked for."""

    batch: ReadBatch

    async def read(self, batch: ReadBatch, *, prefetch: bool = False) -> None:
        self.batch = batch
        await super().read(batch, prefetch=prefetch)


@pytest.mark.parametrize("gap_rows", [0, 1, 2, 7, 500])
async def test_rows_with_gaps_read_over(bundle: MadeBundle, engine: ReadEngine, gap_rows: int) -> None:
    store = store_of(bundle, engine, gap_rows)
    assert store.max_gap_neurons == gap_rows
    rng = np.random.default_rng(gap_rows)
    n, stride = bundle.manifest.ffn.n_neurons, bundle.manifest.ffn.stride_bytes
    for trial in range(30):
        ids = rng.integers(0, n, rng.integers(1, 150))
        if trial % 3:
            ids = np.unique(ids) if trial % 3 == 1 else rng.permutation(np.unique(ids))
        layer = trial % 3
        memory, out = guarded(len(ids), stride)
        await store.read_rows(layer, ids, out)
        np.testing.assert_array_equal(out, bundle.rows[layer][ids])
        assert (memory[:8] == GUARD).all()
        assert (memory[-8:] == GUARD).all()


async def test_what_is_read_over_counts_as_read_not_as_delivered(
    bundle: MadeBundle, engine: ReadEngine
) -> None:
    stride = bundle.manifest.ffn.stride_bytes
    ids = np.array([12, 10, 90, 15, 11, 93])
    for gap_rows, spans in ((0, (3, 1, 1, 1)), (2, (6, 4))):
        store = MeteredStore(store_of(bundle, engine, gap_rows))
        before = engine.stats
        await store.read_rows(1, ids, guarded(len(ids), stride)[1])
        assert store.stats.bytes_delivered == 6 * stride
        if engine.direct:  # a page cache reads each place by itself, and none that nobody wants
            assert engine.stats.reads - before.reads == len(spans)
            assert engine.stats.bytes_read - before.bytes_read == sum(spans) * stride


async def test_the_batch_of_a_plan(bundle: MadeBundle) -> None:
    rows = bundle.manifest.ffn
    recording = Recording([str(bundle.directory / BUNDLE)])
    store = store_of(bundle, recording, 2)
    await store.read_rows(2, np.array([12, 10, 90, 15, 11]), guarded(5, rows.stride_bytes)[1])
    batch, stride = recording.batch, rows.stride_bytes
    start = bundle.manifest.layer_offset_bytes[2]
    assert batch.offset_bytes.tolist() == [start + 10 * stride, start + 90 * stride]
    assert batch.first is not None
    assert batch.first.tolist() == [0, 5]
    assert (batch.length_bytes // stride).tolist() == [1, 1, 1, 2, 1, 1]
    assert batch.dest_offset_bytes.tolist() == [stride, 4 * stride, 0, SKIP, 3 * stride, 2 * stride]
    await store.read_rows(2, np.array([10, 11, 90]), guarded(3, stride)[1])
    assert recording.batch.first is None
    await store.close()


async def test_no_read_gets_too_long(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_spec("llama", d_ffn=1500))
    rows = bundle.manifest.ffn
    recording = Recording([str(bundle.directory / BUNDLE)])
    store = store_of(bundle, recording, 3)
    ids = np.arange(rows.n_neurons)[::-1].copy()
    out = guarded(len(ids), rows.stride_bytes)[1]
    await store.read_rows(1, ids, out)
    np.testing.assert_array_equal(out, bundle.rows[1][ids])
    batch = recording.batch
    assert batch.first is not None
    length = np.add.reduceat(batch.length_bytes, batch.first)
    assert len(length) == -(-rows.layer_bytes // MAX_READ_BYTES)
    assert int(length.max()) <= MAX_READ_BYTES
    assert int(np.diff(batch.first, append=len(batch.length_bytes)).max()) <= MAX_DESTINATIONS
    await store.close()


async def test_a_row_longer_than_a_read_should_be(tmp_path: Path) -> None:
    bundle = make_bundle(
        tmp_path / "bundle", tiny_spec("llama", d_ffn=9, n_layers=2), align_bytes=2 * MAX_READ_BYTES
    )
    store = store_of(bundle, await open_engine(bundle.directory / BUNDLE))
    ids = np.array([3, 4, 8])
    out = guarded(3, bundle.manifest.ffn.stride_bytes)[1]
    await store.read_rows(1, ids, out)
    np.testing.assert_array_equal(out, bundle.rows[1][ids])
    await store.close()


@pytest.mark.skipif(not native_engine.AVAILABLE, reason="needs O_DIRECT reads through scratch memory")
async def test_rows_that_go_through_scratch_are_not_read_over(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", tiny_spec("llama"), align_bytes=512)
    path = str(bundle.directory / BUNDLE)
    store = store_of(bundle, native_engine.open_native("threads", [path], 4096, "asked for"), 8)
    assert store.max_gap_neurons == 0
    ids = np.array([1, 3, 4, 70])
    memory, out = guarded(4, bundle.manifest.ffn.stride_bytes)
    await store.read_rows(2, ids, out)
    np.testing.assert_array_equal(out, bundle.rows[2][ids])
    assert (memory[:8] == GUARD).all()
    assert (memory[-8:] == GUARD).all()
    await store.close()


def saved_curve(bundle: MadeBundle, engine: str, gap_bytes: int) -> None:
    """A device on which a read costs as much as ``gap_bytes`` bytes."""
    points = tuple(CurvePoint(size, 64, size / (gap_bytes + size), 1.0) for size in (4096, 32768, 1 << 20))
    device = device_identity(bundle.directory)
    curve = DeviceCurve(points, engine, True, "6.1", device, int(time.time()), MIN_FILE_BYTES)
    assert curve.save() == ""


async def gap_of(bundle: MadeBundle) -> tuple[str, int]:
    store = await open_store(bundle.directory, bundle.manifest)
    assert isinstance(store.inner, BundleFileStore)
    await store.close()
    return store.inner.engine.name, store.inner.max_gap_neurons


async def test_gaps_go_by_the_curve_of_this_device_and_engine(
    bundle: MadeBundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, gap = await gap_of(bundle)
    assert gap == 0
    saved_curve(bundle, next(other for other in ENGINES if other != name), 40_000)
    assert await gap_of(bundle) == (name, 0)
    saved_curve(bundle, name, 3 * bundle.manifest.ffn.stride_bytes + 100)
    assert await gap_of(bundle) == (name, 3)
    for path in cache_dir().iterdir():
        path.write_text("{")
    assert await gap_of(bundle) == (name, 0)


async def test_a_truncated_file_names_its_layer(bundle: MadeBundle, engine: ReadEngine) -> None:
    store = store_of(bundle, engine, 1)
    with (bundle.directory / BUNDLE).open("r+b") as file:
        file.truncate(bundle.manifest.layer_offset_bytes[2] + 4096)
    out = guarded(2, bundle.manifest.ffn.stride_bytes)[1]
    reads: list[Callable[[], object]] = [
        lambda: store.read_rows(2, np.array([0, 150]), out),
        lambda: store.read_range(2, 150, 152, out),
    ]
    for read in reads:
        with pytest.raises(BundleCorruptError, match=r"ffn\.bundle: .*\(layer 2\)$"):
            await read()  # type: ignore[misc]  # a coroutine, whatever the list says
    await store.read_rows(1, np.array([0, 150]), out)


async def test_a_device_that_fails_names_its_layer(bundle: MadeBundle) -> None:
    """A directory in place of the file: opening works, reading does not."""
    store = store_of(bundle, BufferedEngine([str(bundle.directory)]))
    out = guarded(1, bundle.manifest.ffn.stride_bytes)[1]
    with pytest.raises(DiskReadError, match=r"at offset \d+ failed: .*\(layer 1\)$") as caught:
        await store.read_rows(1, np.array([5]), out)
    assert isinstance(caught.value.__cause__, DiskReadError)
    await store.close()
