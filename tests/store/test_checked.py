from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashd.errors import BundleCorruptError
from flashd.layout.manifest import BUNDLE, RESIDENT
from flashd.store.checked import CheckedStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import load_resident, load_sums, open_store
from flashd.testing.bundles import MadeBundle, make_bundle
from flashd.testing.store_suite import destination
from flashd.types import StoreKind, U8Array


def flip(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 0x10]))


async def read_layer(bundle: MadeBundle, layer: int, backend: str = "auto") -> U8Array:
    store = await open_store(bundle.directory, bundle.manifest, backend, check_rows=True)
    out = destination(store, bundle.manifest.ffn.n_neurons)
    try:
        await store.read_range(layer, 0, len(out), out)
    finally:
        await store.close()
    return out


@pytest.mark.parametrize("backend", ["direct", "buffered", "memory"])
async def test_a_damaged_row_is_named_and_never_handed_out(tmp_path: Path, backend: str) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    ffn = bundle.manifest.ffn
    flip(bundle.directory / BUNDLE, bundle.manifest.layer_offset_bytes[1] + 7 * ffn.stride_bytes + 3)
    if backend != "memory":
        assert np.array_equal(await read_layer(bundle, 0, backend), bundle.rows[0])
    with pytest.raises(BundleCorruptError, match=r"ffn\.bundle: layer 1, neuron 7: checksum mismatch"):
        await read_layer(bundle, 1, backend)


@pytest.mark.parametrize("kind", ["file", "zarr"])
async def test_a_damaged_row_among_others_by_id(tmp_path: Path, kind: StoreKind) -> None:
    bundle = make_bundle(tmp_path / "bundle", store=kind)
    largest = max((p for p in (bundle.directory).rglob("c/*/*") if p.is_file()), default=None, key=str)
    victim = bundle.directory / BUNDLE if kind == "file" else largest
    assert victim is not None
    flip(victim, 100)
    store = await open_store(bundle.directory, bundle.manifest, check_rows=True)
    failed = 0
    for layer in range(bundle.manifest.ffn.n_layers):
        for ids in np.array_split(np.random.default_rng(0).permutation(bundle.manifest.ffn.n_neurons), 5):
            out = destination(store, len(ids))
            try:
                await store.read_rows(layer, ids, out)
                assert np.array_equal(out, bundle.rows[layer][ids])
            except BundleCorruptError:
                failed += 1
    await store.close()
    assert failed == 1


async def test_each_row_is_checked_once_and_a_passing_fault_is_read_again(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")

    class Flaky(InMemoryStore):
        """Delivers one wrong byte the first time."""

        reads = 0

        async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
            await super().read_range(layer, start, stop, out)
            self.reads += 1
            if self.reads == 1:
                out[0, 0] ^= 1

    inner = Flaky(bundle.manifest.ffn, bundle.rows.copy())
    store = CheckedStore(inner, load_sums(bundle.directory, bundle.manifest), bundle.directory)
    out = destination(store, 10)
    await store.read_range(0, 0, 10, out)
    assert np.array_equal(out, bundle.rows[0, :10])
    assert inner.reads == 2
    await store.read_range(0, 0, 10, out)
    assert inner.reads == 3


def test_damaged_resident_weights_are_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    load_resident(bundle.directory, bundle.manifest)
    path = bundle.directory / RESIDENT
    for offset_bytes in (path.stat().st_size - 1, path.stat().st_size // 2):
        flip(path, offset_bytes)
        with pytest.raises(BundleCorruptError, match=r"resident\.safetensors: its SHA-256"):
            load_resident(bundle.directory, bundle.manifest)
        flip(path, offset_bytes)
