"""Every store through the shipped conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashd.disk.native_engine import open_native
from flashd.layout.manifest import BUNDLE
from flashd.store.bundle_file import BundleFileStore
from flashd.store.checked import CheckedStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.metered import MeteredStore
from flashd.store.open import open_store
from flashd.testing.bundles import MadeBundle, make_bundle
from flashd.testing.store_suite import MadeStore, WeightStoreTests
from flashd.types import StoreKind


class _Opened(WeightStoreTests):
    """Stores that ``open_store`` makes."""

    backend: str
    kind: StoreKind = "file"
    expected_name: str

    @pytest.fixture
    async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
        bundle = make_bundle(tmp_path / "bundle", self.spec, store=self.kind)
        store = await open_store(bundle.directory, bundle.manifest, self.backend)
        assert store.name == self.expected_name
        yield MadeStore(store, bundle.rows, self.files(bundle))
        await store.close()

    def files(self, bundle: MadeBundle) -> list[Path]:
        return [bundle.directory / BUNDLE]


class TestFileUring(_Opened):
    backend = "uring"
    expected_name = "file/uring"

    async def test_unmetered(self, made: MadeStore) -> None:
        assert isinstance(made.store, MeteredStore)
        assert isinstance(made.store.inner, BundleFileStore)
        assert made.store.inner.engine.direct


class TestFileThreads(_Opened):
    backend = "threads"
    expected_name = "file/threads"


class TestFileBuffered(_Opened):
    backend = "buffered"
    expected_name = "file/buffered"


class TestInMemory(_Opened):
    backend = "memory"
    expected_name = "memory"

    def files(self, bundle: MadeBundle) -> list[Path]:
        return []


class TestChecked(WeightStoreTests):
    """Rows compared with their checksums when they are first read."""

    @pytest.fixture
    async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
        bundle = make_bundle(tmp_path / "bundle", self.spec)
        store = await open_store(bundle.directory, bundle.manifest, verify="auto")
        assert isinstance(store.inner, CheckedStore)
        yield MadeStore(store, bundle.rows, [bundle.directory / BUNDLE])
        await store.close()


class TestBareInMemory(WeightStoreTests):
    """Without the meter around it."""

    @pytest.fixture
    async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
        bundle = make_bundle(tmp_path / "bundle", self.spec)
        store = InMemoryStore(bundle.manifest.ffn, bundle.rows.copy())
        yield MadeStore(store, bundle.rows)
        await store.close()


class TestFileOnCoarserDevice(WeightStoreTests):
    """A bundle whose stride (512) is no multiple of what the device wants (4096): rows come as
    the aligned superset through scratch."""

    @pytest.fixture
    async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
        bundle = make_bundle(tmp_path / "bundle", replace(self.spec, d_model=60))
        assert bundle.manifest.ffn.stride_bytes % 4096
        path = bundle.directory / BUNDLE
        engine = open_native("uring", [str(path)], 4096, "asked for")
        store = BundleFileStore(engine, bundle.manifest.ffn, bundle.manifest.layer_offset_bytes)
        yield MadeStore(store, bundle.rows, [path])
        await store.close()

    async def test_scratch_is_counted(self, made: MadeStore) -> None:
        await self.test_every_layer_whole(made)
        assert isinstance(made.store, BundleFileStore)
        assert made.store.engine.stats.scratch_reads > 0
