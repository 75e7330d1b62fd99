"""Opening a bundle directory: manifest, rows, checksums, resident weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flashd.config import VERIFY
from flashd.disk.curve import load_curve
from flashd.disk.probe import BACKENDS as READ_BACKENDS
from flashd.disk.probe import open_engine
from flashd.disk.read_once import ReadOnce
from flashd.errors import BundleCorruptError, BundleError, ConfigError
from flashd.layout.geometry import bundle_bytes
from flashd.layout.manifest import BUNDLE, MANIFEST, RESIDENT, SUMS, ZARR, FileEntry, Manifest, from_json
from flashd.layout.safetensors_header import TensorEntry
from flashd.store.base import WeightStore
from flashd.store.bundle_file import BundleFileStore
from flashd.store.checked import CheckedStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.metered import MeteredStore
from flashd.store.predictors import load_gates as load_gates
from flashd.store.predictors import open_predictors as open_predictors
from flashd.store.predictors import read_calibration as read_calibration
from flashd.store.tensors import load_tensors, tensor_entries
from flashd.store.zarr_store import ZarrStore
from flashd.types import U32Array, WeightArray

STORE_BACKENDS = (*READ_BACKENDS, "memory")
_PARTIAL = ".partial"
_MAX_MANIFEST_BYTES = 16 << 20
_REMEDY = "convert the model again"


def read_manifest(directory: Path) -> Manifest:
    """Parse and check ``manifest.json`` alone, whatever state the other files are in.

    Raises:
        BundleError: no bundle directory, an unfinished one, or a manifest that is unusable.
    """
    if directory.name.endswith(_PARTIAL):
        raise BundleError(f"{directory}: conversion not finished: run `flashd convert` again")
    path = directory / MANIFEST
    if not path.is_file():
        if directory.with_name(directory.name + _PARTIAL).is_dir():
            raise BundleError(f"{directory}: conversion not finished: run `flashd convert` again")
        if directory.is_file():
            raise BundleError(
                f"{directory}: a file, not a bundle directory; make one with: flashd convert {directory} DST"
            )
        what = f"has no {MANIFEST}" if directory.is_dir() else "no such directory"
        raise BundleError(f"{directory}: {what}; give a directory made by `flashd convert`")
    with ReadOnce(path) as file:
        if file.size_bytes > _MAX_MANIFEST_BYTES:
            raise BundleError(f"{path}: {file.size_bytes} bytes, more than any real manifest has")
        text = np.empty(file.size_bytes, np.uint8)
        file.read_into(0, text)
    return from_json(text.tobytes(), str(path))


def open_manifest(directory: Path) -> Manifest:
    """Read the manifest and check that every file it lists is there, with the size it says.

    Raises:
        BundleError: as ``read_manifest``, or the manifest lists too little.
        BundleCorruptError: a file is missing or has another size.
    """
    manifest = read_manifest(directory)
    for entry in manifest.files:
        problem = size_problem(directory, entry)
        if problem:
            raise BundleCorruptError(f"{problem}; copy the bundle again or convert the model again")
    rows = manifest.ffn
    if manifest.store == "file":
        _expect_size(directory, manifest.file(BUNDLE), bundle_bytes(rows))
    elif not any(entry.name.startswith(ZARR + "/") for entry in manifest.files):
        raise BundleError(f"{directory}: {MANIFEST} lists no file of {ZARR}; convert the model again")
    _expect_size(directory, manifest.file(SUMS), 4 * rows.n_layers * rows.n_neurons)
    manifest.file(RESIDENT)
    return manifest


def size_problem(directory: Path, entry: FileEntry) -> str | None:
    """What is wrong with a listed file's presence or size; None if nothing."""
    path = directory / entry.name
    if not path.is_file():
        return f"{path}: missing, expected {entry.size_bytes} bytes"
    size = path.stat().st_size
    if size != entry.size_bytes:
        return f"{path}: {size} bytes, expected {entry.size_bytes}"
    return None


def _expect_size(directory: Path, entry: FileEntry, expected_bytes: int) -> None:
    if entry.size_bytes != expected_bytes:
        raise BundleError(
            f"{directory / entry.name}: {entry.size_bytes} bytes, a model of this shape has "
            f"{expected_bytes}; convert the model again"
        )


async def open_store(
    directory: Path, manifest: Manifest, backend: str = "auto", *, verify: str | None = None
) -> MeteredStore:
    """Open the FFN rows of a bundle.

    Args:
        directory: the bundle.
        manifest: from ``open_manifest``.
        backend: how the files are read: ``auto``, ``uring``, ``threads`` or ``buffered``; or ``memory``: all
            rows in RAM.
        verify: compare rows with their checksums: ``auto``, each at its first read and of later ones
            as many as take 2 % of the time; ``reads``, each at every read; None, never.

    Raises:
        ConfigError: an unknown backend, or one that does not work here.
        BundleError, DiskReadError: the rows cannot be opened.
    """
    if backend not in STORE_BACKENDS:
        raise ConfigError(f"unknown store backend {backend!r}; known: {', '.join(STORE_BACKENDS)}")
    if verify not in (None, *VERIFY):
        raise ConfigError(f"verify is {verify!r}, expected one of: {', '.join(VERIFY)}")
    sums = None if verify is None else load_sums(directory, manifest)
    store = await _open_rows(directory, manifest, "auto" if backend == "memory" else backend)
    if sums is not None:
        store = CheckedStore(store, sums, directory, every_read=verify == "reads")
    if backend == "memory":
        try:
            return MeteredStore(await InMemoryStore.load(store))
        finally:
            await store.close()
    return MeteredStore(store)


async def _open_rows(directory: Path, manifest: Manifest, backend: str) -> WeightStore:
    if manifest.store == "file":
        engine = await open_engine(directory / BUNDLE, backend)
        curve = load_curve(directory / BUNDLE, engine.name)
        max_gap_bytes = curve.break_even_bytes() if curve else 0
        return BundleFileStore(engine, manifest.ffn, manifest.layer_offset_bytes, max_gap_bytes)
    return await ZarrStore.open(directory / ZARR, manifest.ffn, backend)


def load_sums(directory: Path, manifest: Manifest, *, check: bool = True) -> U32Array:
    """CRC32C of every neuron row, ``[n_layers, n_neurons]``.

    Args:
        directory: the bundle.
        manifest: its manifest.
        check: whether to compare the file with its SHA-256 first, so that damage to it is not taken for
            damage to the rows. ``flashd verify`` reports both and does so itself.

    Raises:
        BundleCorruptError: with ``check``, the file is not what was written; or it is too short.
        DiskReadError: the device failed.
    """
    shape = (manifest.ffn.n_layers, manifest.ffn.n_neurons)
    raw = np.empty(4 * shape[0] * shape[1], np.uint8)
    path = directory / SUMS
    with ReadOnce(path) as file:
        file.read_into(0, raw)
    if check and hashlib.sha256(raw.data).hexdigest() != manifest.file(SUMS).sha256:
        raise _exchanged(path)
    return raw.view("<u4").reshape(shape)


def resident_entries(directory: Path) -> Mapping[str, TensorEntry]:
    """Name, dtype, shape and place of every resident tensor; reads the header alone.

    Raises:
        BundleCorruptError: as ``load_resident``.
    """
    return tensor_entries(directory / RESIDENT, _REMEDY)


def load_resident(directory: Path, manifest: Manifest) -> dict[str, WeightArray]:
    """Read the resident tensors into anonymous memory; nothing of them stays in the page cache.

    Args:
        directory: the bundle.
        manifest: from ``open_manifest``.

    Returns:
        Arrays by name: float32, float16, or uint16 holding bfloat16 bits. Their memory is freed
        when the last of them is.

    Raises:
        BundleCorruptError: the file is no safetensors file, truncated, or not what was written.
        DiskReadError: the device failed.
    """
    path = directory / RESIDENT
    loaded, sha256 = load_tensors(path, _REMEDY)
    # The converter leaves no gaps: header and tensors are the whole file.
    if sha256 != manifest.file(RESIDENT).sha256:
        raise _exchanged(path)
    return loaded


def _exchanged(path: Path) -> BundleCorruptError:
    return BundleCorruptError(
        f"{path}: its SHA-256 is not the manifest's: damaged or exchanged; copy the bundle again "
        "or convert the model again"
    )
