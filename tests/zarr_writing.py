"""zarr groups of random rows, written by zarr-python."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from flashd.layout.geometry import ffn_geometry
from flashd.store.zarr_store import ZarrStore
from flashd.testing.bundles import make_bundle, random_rows, tiny_spec
from flashd.types import FFNGeometry, U8Array

GEOMETRY = ffn_geometry(tiny_spec(), "f16")
ROWS = random_rows(GEOMETRY)
SHAPE: tuple[int, int] = ROWS.shape[1:]


def wide(n_neurons: int, d_model: int = 32) -> tuple[FFNGeometry, U8Array]:
    """A geometry of three layers and its rows."""
    geometry = ffn_geometry(tiny_spec(d_ffn=n_neurons, d_model=d_model, d_embed=d_model), "f16")
    return geometry, random_rows(geometry)


def write(
    root: Path,
    rows: Any = ROWS,
    zarr_format: Any = 3,
    each: Sequence[dict[str, Any]] | None = None,
    **options: Any,
) -> None:
    """One array per layer with ``options``, or those in ``each``."""
    group = zarr.open_group(root, mode="w", zarr_format=zarr_format)
    for i, layer in enumerate(rows):
        how = each[i] if each else options
        array = group.create_array(f"layers/{i}", shape=layer.shape, dtype=layer.dtype, **how)
        array[:] = layer


def write_zarr_bundle(directory: Path) -> None:
    """A zarr bundle, and a bundle file beside it."""
    make_bundle(directory, store="zarr")
    make_bundle(directory.with_name(directory.name + "-file"))


@asynccontextmanager
async def open_zarr(
    root: Path, backend: str = "auto", *, geometry: FFNGeometry = GEOMETRY, **options: Any
) -> AsyncIterator[ZarrStore]:
    """An open store, closed in the end."""
    store = await ZarrStore.open(root, geometry, backend, **options)
    try:
        yield store
    finally:
        await store.close()


async def check(store: ZarrStore, rows: U8Array, ids: Sequence[int] = (79, 0, 0, 33, 34, 78, 5)) -> None:
    """Whole layers, ranges that start anywhere, single rows in any order."""
    n, stride = rows.shape[1:]
    some = np.array(ids, np.int64)
    for layer, expected in enumerate(rows):
        for start, stop in ((0, n), (3, 51), (n - 1, n), (n // 2, n // 2)):
            out = np.empty((stop - start, stride), np.uint8)
            await store.read_range(layer, start, stop, out)
            np.testing.assert_array_equal(out, expected[start:stop])
        for wanted in (some, np.arange(n), np.arange(n)[::-3].copy(), some[:0]):
            out = np.empty((len(wanted), stride), np.uint8)
            await store.read_rows(layer, wanted, out)
            np.testing.assert_array_equal(out, expected[wanted])
