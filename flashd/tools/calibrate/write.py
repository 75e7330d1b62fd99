"""Writing ``predictors.safetensors`` and ``calibration.json`` into a bundle, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flashd.layout.calibration import (
    CALIBRATION,
    PREDICTORS,
    Calibration,
    from_json,
    sums_sha256,
    tensor_shapes,
    to_json,
)
from flashd.layout.manifest import MANIFEST, Manifest
from flashd.layout.manifest import to_json as manifest_json
from flashd.layout.safetensors_header import build_header
from flashd.tools.convert.files import sync_path, write_durably
from flashd.types import NUMPY_DTYPE, SAFETENSORS_DTYPE, WeightArray

REPORT = "calibration.md"
PLOT = "calibration.png"
SCRATCH = ".calibrate.partial"


def write_calibration(
    directory: Path, manifest: Manifest, calibration: Calibration, tensors: Mapping[str, WeightArray]
) -> Calibration:
    """Make a bundle a calibrated one.

    ``calibration.json`` goes first and comes back last: killed in between, this leaves a bundle that runs
    without predictors.

    Args:
        directory: the bundle.
        manifest: what its ``manifest.json`` is to be; written anew where it differs.
        calibration: its hashes, sizes and thresholds are filled in here.
        tensors: by name, as ``layout.calibration.tensor_shapes`` asks for them.

    Returns:
        The calibration as written.

    Raises:
        OSError: it can't be written.
    """
    path = directory / CALIBRATION
    calibration = replace(calibration, bundle_sha256=sums_sha256(manifest), thresholds=manifest.thresholds)
    # What could not be read back must not be written, nor cost the bundle what it has.
    from_json(to_json(calibration).encode(), str(path), manifest)
    remove_calibration(directory)
    write_manifest(directory, manifest)
    nbytes, sha256 = _write_tensors(directory / PREDICTORS, manifest, calibration, tensors)
    calibration = replace(calibration, predictors_sha256=sha256, predictors_bytes=nbytes)
    write_durably(path, to_json(calibration).encode())
    return calibration


def remove_calibration(directory: Path) -> None:
    """From now on the bundle runs without predictors."""
    (directory / CALIBRATION).unlink(missing_ok=True)
    sync_path(directory)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace ``manifest.json``, if it would change."""
    text = manifest_json(manifest).encode()
    if (directory / MANIFEST).read_bytes() != text:
        write_durably(directory / MANIFEST, text)


def _write_tensors(
    path: Path, manifest: Manifest, calibration: Calibration, tensors: Mapping[str, WeightArray]
) -> tuple[int, str]:
    """Size and SHA-256 of the file."""
    wanted = tensor_shapes(calibration, manifest)
    shapes = {name: (SAFETENSORS_DTYPE[dtype], shape) for name, (dtype, shape) in wanted.items()}
    header, _ = build_header(shapes)
    digest = hashlib.sha256()
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        for block in (header, *(_bytes(name, tensors[name], *facts) for name, facts in wanted.items())):
            file.write(block)
            digest.update(block)
        nbytes = file.tell()
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_path(path.parent)
    return nbytes, digest.hexdigest()


def _bytes(name: str, tensor: WeightArray, dtype: str, shape: tuple[int, ...]) -> bytes:
    if tensor.dtype != NUMPY_DTYPE[dtype] or tensor.shape != shape:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")
    return tensor.tobytes()
