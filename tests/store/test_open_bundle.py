"""Opening bundles: what is checked before a byte of weights is used."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.errors import BundleCorruptError, BundleError, ConfigError
from flashd.layout.manifest import BUNDLE, MANIFEST, RESIDENT, SUMS, to_json
from flashd.layout.safetensors_header import build_header
from flashd.store.open import load_resident, load_sums, open_manifest, open_store, resident_entries
from flashd.testing.bundles import MadeBundle, list_files, make_bundle, tiny_spec
from flashd.types import DType


@pytest.fixture
def bundle(tmp_path: Path) -> MadeBundle:
    return make_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_resident_tensors_and_sums(tmp_path: Path, family: str, dtype: DType) -> None:
    made = make_bundle(tmp_path, tiny_spec(family), dtype=dtype)
    manifest = open_manifest(tmp_path)
    assert manifest == made.manifest
    loaded = load_resident(tmp_path, manifest)
    assert loaded.keys() == made.resident.keys()
    for name, expected in made.resident.items():
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].ctypes.data % 64 == 0
        np.testing.assert_array_equal(loaded[name], expected)
    assert {name: entry.shape for name, entry in resident_entries(tmp_path).items()} == {
        name: array.shape for name, array in made.resident.items()
    }
    sums = load_sums(tmp_path, manifest)
    assert sums.shape == made.rows.shape[:2]
    assert sums.tobytes() == (tmp_path / SUMS).read_bytes()


def test_no_bundle_at_all(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"no such directory; give a directory made by"):
        open_manifest(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"has no manifest\.json"):
        open_manifest(tmp_path)


def test_unfinished_conversion(bundle: MadeBundle) -> None:
    partial = bundle.directory.rename(bundle.directory.with_name("bundle.partial"))
    for directory in (partial, bundle.directory):
        with pytest.raises(BundleError, match="conversion not finished: run `flashd convert` again"):
            open_manifest(directory)


@pytest.mark.parametrize("name", [RESIDENT, BUNDLE, SUMS])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "missing, expected"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes, expected"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected"),
        (lambda path: (path.unlink(), path.mkdir()), "missing, expected"),
    ],
)
def test_a_file_that_is_gone_or_has_another_size(
    bundle: MadeBundle, name: str, damage: Callable[[Path], Any], said: str
) -> None:
    path = bundle.directory / name
    damage(path)
    with pytest.raises(BundleCorruptError, match=said) as caught:
        open_manifest(bundle.directory)
    assert str(path) in str(caught.value)
    assert "convert the model again" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [RESIDENT, BUNDLE, SUMS])
def test_a_manifest_that_lists_too_little(bundle: MadeBundle, name: str) -> None:
    files = tuple(entry for entry in bundle.manifest.files if entry.name != name)
    write_manifest(bundle, files=files)
    with pytest.raises(BundleError, match=f"lists no file '{name}'"):
        open_manifest(bundle.directory)


@pytest.mark.parametrize("name", [BUNDLE, SUMS])
def test_sizes_that_do_not_fit_the_model(bundle: MadeBundle, name: str) -> None:
    with (bundle.directory / name).open("ab") as file:
        file.write(bytes(4096))
    write_manifest(bundle, files=list_files(bundle.directory))
    with pytest.raises(BundleError, match="a model of this shape has"):
        open_manifest(bundle.directory)


def test_zarr_bundle_without_zarr_files(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "z", store="zarr")
    shutil.rmtree(made.directory / "ffn.zarr")
    write_manifest(made, files=list_files(made.directory))
    with pytest.raises(BundleError, match=r"lists no file of ffn\.zarr"):
        open_manifest(made.directory)


def write_manifest(bundle: MadeBundle, **changes: Any) -> None:
    (bundle.directory / MANIFEST).write_text(to_json(replace(bundle.manifest, **changes)))


def header(items: object) -> bytes:
    raw = json.dumps(items).encode()
    return struct.pack("<Q", len(raw)) + raw


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"1234", "too short"),
        (struct.pack("<Q", 1 << 40), "truncated"),
        (header([]), "convert"),
        (build_header({"t": ("I64", (2,))})[0] + bytes(16), "'t' is I64"),
        (build_header({"t": ("F32", (1, 1, 2))})[0] + bytes(8), r"'t' is F32 \[1, 1, 2\]"),
        (build_header({"t": ("F32", ())})[0] + bytes(4), "vector or matrix"),
        (build_header({"t": ("F32", (0,))})[0], "vector or matrix"),
        (build_header({"t": ("F32", (2,))})[0] + bytes(7), "truncated"),
        (
            header({f"t{i}": {"dtype": "F32", "shape": [500], "data_offsets": [0, 2000]} for i in range(9)})
            + bytes(2000),
            "18000 bytes of tensors",
        ),
    ],
)
def test_damaged_resident_file(bundle: MadeBundle, content: bytes, said: str) -> None:
    (bundle.directory / RESIDENT).write_bytes(content)
    with pytest.raises(BundleCorruptError, match=said) as caught:
        load_resident(bundle.directory, bundle.manifest)
    assert str(bundle.directory / RESIDENT) in str(caught.value)


async def test_unknown_backend_lists_the_known(bundle: MadeBundle) -> None:
    with pytest.raises(ConfigError, match="'tape'; known: auto, uring, threads, buffered, memory"):
        await open_store(bundle.directory, bundle.manifest, "tape")


async def test_auto_is_direct_here(bundle: MadeBundle) -> None:
    store = await open_store(bundle.directory, bundle.manifest)
    assert store.name == "file/uring"
    await store.close()


async def test_damaged_sums_are_not_taken_for_damaged_rows(bundle: MadeBundle) -> None:
    path = bundle.directory / SUMS
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleCorruptError, match="SHA-256") as caught:
        await open_store(bundle.directory, open_manifest(bundle.directory), verify="auto")
    assert str(caught.value).startswith(f"{path}: ")
    store = await open_store(bundle.directory, open_manifest(bundle.directory))  # nobody needs them
    await store.close()
