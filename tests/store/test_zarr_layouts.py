"""zarr stores of other layouts than our own, and damaged ones."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from flashd.errors import BundleCorruptError
from flashd.layout.geometry import ffn_geometry
from flashd.store.zarr_store import ZarrStore
from flashd.testing.bundles import make_bundle, random_rows, tiny_spec, write_zarr

GEOMETRY = ffn_geometry(tiny_spec(), "f16")
ROWS = random_rows(GEOMETRY)
SHAPE = ROWS.shape[1:]


def write(root: Path, rows: Any = ROWS, zarr_format: Any = 3, **options: Any) -> None:
    group = zarr.open_group(root, mode="w", zarr_format=zarr_format)
    for i, layer in enumerate(rows):
        array = group.create_array(f"layers/{i}", shape=layer.shape, dtype=layer.dtype, **options)
        array[:] = layer


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": SHAPE, "compressors": None},
        {"chunks": (7, 100), "compressors": None},
        {"chunks": (8, SHAPE[1]), "shards": (24, SHAPE[1])},
        {"chunks": (16, SHAPE[1]), "compressors": zarr.codecs.ZstdCodec()},
        {"chunks": (16, SHAPE[1]), "compressors": zarr.codecs.BloscCodec(), "shards": SHAPE},
        {"chunks": (16, SHAPE[1]), "zarr_format": 2},
    ],
    ids=["whole", "uneven", "sharded", "zstd", "sharded-blosc", "format-2"],
)
async def test_any_layout(tmp_path: Path, options: dict[str, Any]) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    store = await ZarrStore.open(tmp_path / "z", GEOMETRY)
    for layer, expected in enumerate(ROWS):
        out = np.empty(SHAPE, np.uint8)
        await store.read_range(layer, 0, SHAPE[0], out)
        np.testing.assert_array_equal(out, expected)
        ids = np.array([79, 0, 0, 33, 34, 78, 5])
        await store.read_rows(layer, ids, out[: len(ids)])
        np.testing.assert_array_equal(out[: len(ids)], expected[ids])
    await store.close()


async def test_chunks_that_were_left_out_are_zeros(tmp_path: Path) -> None:
    """zarr's own writers leave out chunks of zeros; that is content, not damage."""
    rows = ROWS.copy()
    rows[:, 16:48] = 0
    await asyncio.to_thread(write, tmp_path / "z", rows, chunks=(16, SHAPE[1]), compressors=None)
    store = await ZarrStore.open(tmp_path / "z", GEOMETRY)
    out = np.empty(SHAPE, np.uint8)
    await store.read_range(0, 0, SHAPE[0], out)
    np.testing.assert_array_equal(out, rows[0])


async def test_a_chunk_that_disappears_is_an_error(tmp_path: Path) -> None:
    await asyncio.to_thread(write_zarr, tmp_path / "z", ROWS)
    store = await ZarrStore.open(tmp_path / "z", GEOMETRY)
    await asyncio.to_thread(shutil.rmtree, tmp_path / "z/layers/1/c/1")
    out = np.empty(SHAPE, np.uint8)
    with pytest.raises(BundleCorruptError, match=r"layers/1/c/1/0: disappeared while in use"):
        await store.read_range(1, 0, SHAPE[0], out)
    with pytest.raises(BundleCorruptError, match="disappeared"):
        await store.read_rows(1, np.arange(0, 80, 3), out[:27])
    await store.read_range(0, 0, SHAPE[0], out)
    np.testing.assert_array_equal(out, ROWS[0])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:2], "layers/2"),
        (ROWS[:, :-1], r"layers/0 is uint8\(79, 512\), expected uint8\(80, 512\)"),
        (ROWS[:, :, :-1], "expected"),
        (ROWS.astype(np.uint16), "uint16"),
    ],
)
async def test_arrays_of_another_shape(tmp_path: Path, rows: Any, said: str) -> None:
    await asyncio.to_thread(write, tmp_path / "z", rows)
    with pytest.raises(BundleCorruptError, match=said):
        await ZarrStore.open(tmp_path / "z", GEOMETRY)


async def test_no_zarr_at_all(tmp_path: Path) -> None:
    for root in (tmp_path / "nothing", tmp_path):
        with pytest.raises(BundleCorruptError, match=str(root)):
            await ZarrStore.open(root, GEOMETRY)


def test_a_file_bundle_never_imports_zarr(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    code = (
        "import asyncio, sys; from pathlib import Path; from flashd.store.open import *\n"
        "directory = Path(sys.argv[1]); manifest = open_manifest(directory)\n"
        "async def use():\n"
        "    for backend in ('direct', 'buffered', 'memory'):\n"
        "        await (await open_store(directory, manifest, backend)).close()\n"
        "asyncio.run(use()); load_resident(directory, manifest)\n"
        "assert not {'zarr', 'gguf', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True)
