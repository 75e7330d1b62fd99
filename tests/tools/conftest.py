"""What the converter's tests share: reading a bundle back without the code that wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.kernels import twin
from flashd.layout.manifest import Manifest, from_json

_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass
class ReadBack:
    """A bundle as its bytes say."""

    manifest: Manifest
    resident: dict[str, np.ndarray]
    rows: np.ndarray  # uint8 [layers, neurons, stride]

    def parts(self, layer: int) -> list[np.ndarray]:
        """Up, (gate,) down of a layer as float32 ``[neurons, d]``."""
        ffn = self.manifest.ffn
        kind = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[ffn.dtype]
        values = self.rows[layer].view(kind)[:, : ffn.row_elements]
        return [as_f32(part) for part in np.split(values, 3 if ffn.gated else 2, axis=1)]


def as_f32(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    out = {}
    for name, item in header.items():
        start, end = (8 + length + at for at in item["data_offsets"])
        out[name] = np.frombuffer(raw[start:end], _NUMPY[item["dtype"]]).reshape(item["shape"])
    return out


def _rows(folder: Path, manifest: Manifest) -> np.ndarray:
    ffn = manifest.ffn
    if manifest.store == "zarr":
        import zarr

        group = zarr.open_group(folder / "ffn.zarr", mode="r")
        return np.stack([group[f"layers/{layer}"][:] for layer in range(ffn.n_layers)])
    raw = np.fromfile(folder / "ffn.bundle", np.uint8)
    shape = (ffn.n_neurons, ffn.stride_bytes)
    return np.stack([raw[at : at + ffn.layer_bytes].reshape(shape) for at in manifest.layer_offset_bytes])


def read_back(folder: Path) -> ReadBack:
    """Check every hash, size and row checksum, and that nothing unlisted lies there."""
    manifest = from_json((folder / "manifest.json").read_bytes(), str(folder))
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert on_disk == {entry.name for entry in manifest.files} | {"manifest.json"}
    assert len(on_disk) == len(manifest.files) + 1
    for entry in manifest.files:
        data = (folder / entry.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.size_bytes, entry.sha256), entry.name
    rows = _rows(folder, manifest)
    sums = np.fromfile(folder / "ffn.sums", "<u4").reshape(rows.shape[:2])
    for layer in range(len(rows)):
        found = np.empty(rows.shape[1], np.uint32)
        twin.crc32c(np.ascontiguousarray(rows[layer]), found)
        assert np.array_equal(found, sums[layer]), f"layer {layer}"
    assert not rows[:, :, manifest.ffn.row_bytes :].any()
    assert manifest.ffn.stride_bytes % 512 == 0
    return ReadBack(manifest, _read_safetensors(folder / "resident.safetensors"), rows)


@pytest.fixture
def bundle() -> Callable[[Path], ReadBack]:
    """``bundle(folder)``: the bundle, checked."""
    return read_back


@pytest.fixture
def start_convert() -> Callable[..., subprocess.Popen[str]]:
    """``start_convert(src, dst, body=..., **options)``: a conversion in a process of its own.

    ``body`` is code before the call; it may define ``progress(p)``.
    """

    def start(src: Path, dst: Path, body: str = "", **options: Any) -> subprocess.Popen[str]:
        code = f"""
import sys
from pathlib import Path
from flashd.errors import FlashdError
from flashd.tools.convert import ConvertOptions, convert
progress = None
{textwrap.dedent(body)}
try:
    convert(Path({str(src)!r}), Path({str(dst)!r}), ConvertOptions(**{options!r}), progress)
except FlashdError as exc:
    print(type(exc).__name__ + ": " + str(exc))
    sys.exit(1)
"""
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.fixture
def in_a_small_process() -> Callable[[str], str]:
    """``in_a_small_process(code)``: what it prints, run with 1 GB of address space and 40 s."""

    def run(body: str) -> str:
        start = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1 << 30},) * 2)\n"
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", start + textwrap.dedent(body)],
            capture_output=True, text=True, timeout=40, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run
