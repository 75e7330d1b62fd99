"""Every way of reading a zarr store through the shipped conformance suite."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import zarr
from zarr_writing import write

from flashd.errors import BundleCorruptError
from flashd.layout.geometry import ffn_geometry
from flashd.layout.manifest import ZARR
from flashd.store.open import open_store
from flashd.store.zarr_store import ZarrStore
from flashd.testing.bundles import make_bundle, random_rows
from flashd.testing.store_suite import MadeStore, WeightStoreTests, destination


class _Zarr(WeightStoreTests):
    async def test_file_truncated_while_in_use(self, made: MadeStore) -> None:
        """Stricter than the suite's: chunks are padded and lie in many files, so half of the bytes may hold
        more than half of the rows; each one is right or a named error."""
        store, n = made.store, made.store.geometry.n_neurons
        for path in made.data_files:
            os.truncate(path, path.stat().st_size // 2 + 1)
        with pytest.raises(BundleCorruptError) as caught:
            await store.read_range(2, 0, n, destination(store, n))
        assert os.path.commonpath(made.data_files) in str(caught.value)
        assert "layer 2" in str(caught.value)
        lost = 0
        for neuron in range(n):
            out = destination(store, 1)
            try:
                await store.read_rows(2, np.array([neuron]), out)
            except BundleCorruptError:
                lost += 1
            else:
                np.testing.assert_array_equal(out[0], made.rows[2, neuron])
        assert n // 3 < lost <= n


class _Converted(_Zarr):
    """As `flashd convert` writes it, and as the daemon opens it."""

    backend: str

    @pytest.fixture
    async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
        bundle = make_bundle(tmp_path / "bundle", self.spec, store="zarr")
        store = await open_store(bundle.directory, bundle.manifest, self.backend)
        assert isinstance(store.inner, ZarrStore)
        assert store.inner.engine is not None
        assert store.name == f"zarr/{store.inner.engine.name}"
        shards = sorted((bundle.directory / ZARR / "layers").glob("*/c/*/*"))
        yield MadeStore(store, bundle.rows, shards)
        await store.close()


class TestBestEngine(_Converted):
    backend = "auto"


class TestBuffered(_Converted):
    backend = "buffered"


class _Written(_Zarr):
    """As zarr-python writes it."""

    options: ClassVar[dict[str, Any]]
    way: str

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Written once a class, copied for each test: zarr's writing takes longer than the tests."""
        root = tmp_path_factory.mktemp("written") / "z"
        options = dict(cls.options)
        write(root, random_rows(ffn_geometry(cls.spec, "f16")), options.pop("zarr_format", 3), **options)
        return root

    @pytest.fixture
    async def made(self, tmp_path: Path, written: Path) -> AsyncIterator[MadeStore]:
        geometry = ffn_geometry(self.spec, "f16")
        rows = random_rows(geometry)
        root = tmp_path / "z"
        await asyncio.to_thread(shutil.copytree, written, root)
        store = await ZarrStore.open(root, geometry)
        assert set(store.ways) == {self.way}
        chunks = [
            path
            for path in sorted((root / "layers").rglob("*"))
            if path.is_file() and path.name != "zarr.json" and not path.name.startswith(".")
        ]
        yield MadeStore(store, rows, chunks)
        await store.close()


class TestRawUnsharded(_Written):
    options: ClassVar = {"chunks": (7, 512), "compressors": None}
    way = "raw"


class TestFormat2Raw(_Written):
    options: ClassVar = {"chunks": (16, 512), "compressors": None, "zarr_format": 2}
    way = "raw"


class TestZstd(_Written):
    options: ClassVar = {
        "chunks": (8, 512), "shards": (40, 512), "compressors": zarr.codecs.ZstdCodec(),
    }  # fmt: skip
    way = "decoded"


class TestBlosc(_Written):
    options: ClassVar = {"chunks": (16, 512), "compressors": zarr.codecs.BloscCodec()}
    way = "decoded"


class TestRowsCut(_Written):
    """Chunks that hold a part of each row: only zarr reads that."""

    options: ClassVar = {"chunks": (16, 200)}
    way = "generic"
