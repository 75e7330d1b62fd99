"""Opening what ``flashd calibrate`` has put into a bundle, and the gate projections out of its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.read_once import ReadOnce
from flashd.errors import BundleCorruptError, BundleError
from flashd.layout.calibration import (
    AGAIN,
    CALIBRATION,
    FREQUENCY,
    MAX_JSON_BYTES,
    PREDICTORS,
    Calibration,
    from_json,
    tensor_shapes,
)
from flashd.layout.geometry import LAYER_ALIGN_BYTES
from flashd.layout.manifest import Manifest
from flashd.store.base import WeightStore
from flashd.store.tensors import load_tensors
from flashd.types import NUMPY_DTYPE, WeightArray

_READ_BYTES = 8 << 20


def read_calibration(directory: Path, manifest: Manifest) -> Calibration | None:
    """Parse and check ``calibration.json`` alone; None if the bundle has none.

    Raises:
        BundleError: it is not valid, or of another bundle.
        DiskReadError: the device failed.
    """
    path = directory / CALIBRATION
    if not path.is_file():
        if not os.path.lexists(path):
            return None
        raise BundleError(f"{path}: no file, or a link to nowhere; {AGAIN}")
    with ReadOnce(path) as file:
        if file.size_bytes > MAX_JSON_BYTES:
            raise BundleError(f"{path}: {file.size_bytes} bytes, more than any real calibration has; {AGAIN}")
        text = np.empty(file.size_bytes, np.uint8)
        file.read_into(0, text)
    return from_json(text.tobytes(), str(path), manifest)


def open_predictors(directory: Path, manifest: Manifest) -> tuple[Calibration, dict[str, WeightArray]] | None:
    """Read what a bundle was calibrated with, checked against its SHA-256 and the bundle.

    Args:
        directory: the bundle.
        manifest: from ``open_manifest``.

    Returns:
        The calibration, and the tensors of ``predictors.safetensors`` by name, each of the dtype and shape
        that the calibration says; None if the bundle has no ``calibration.json``.

    Raises:
        BundleError: something is missing, damaged, or of another bundle.
        DiskReadError: the device failed.
    """
    calibration = read_calibration(directory, manifest)
    if calibration is None:
        return None
    path = directory / PREDICTORS
    if not path.is_file():
        raise BundleError(f"{path}: missing, {CALIBRATION} was written with it; {AGAIN}")
    size_bytes = path.stat().st_size
    if size_bytes != calibration.predictors_bytes:
        raise BundleCorruptError(
            f"{path}: {size_bytes} bytes, expected {calibration.predictors_bytes}; {AGAIN}"
        )
    tensors, sha256 = load_tensors(path, AGAIN)
    if sha256 != calibration.predictors_sha256:
        raise BundleCorruptError(
            f"{path}: its SHA-256 is not the one in {CALIBRATION}: damaged or exchanged; {AGAIN}"
        )
    for name, (dtype, shape) in tensor_shapes(calibration, manifest).items():
        tensor = tensors.get(name)
        if tensor is None:
            raise BundleError(f"{path}: no tensor {name!r}; {AGAIN}")
        if tensor.dtype != NUMPY_DTYPE[dtype] or tensor.shape != shape:
            raise BundleError(
                f"{path}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                f"{list(shape)}; {AGAIN}"
            )
        if not np.isfinite(tensor).all():
            raise BundleError(f"{path}: tensor {name!r} holds values that are no numbers; {AGAIN}")
        if name.endswith(FREQUENCY) and not ((tensor >= 0) & (tensor <= 1)).all():
            raise BundleError(f"{path}: tensor {name!r} holds shares that are not between 0 and 1; {AGAIN}")
    return calibration, tensors


async def load_gates(store: WeightStore, layers: Sequence[bool]) -> list[WeightArray | None]:
    """Gate projections out of a bundle's rows, for predictor ``gate``.

    Args:
        store: where the rows are.
        layers: for each layer, whether its gate is wanted.

    Returns:
        Per layer ``[n_neurons, d_model]`` in the bundle's dtype, or None.

    Raises:
        BundleError: the rows hold no gate.
        BundleCorruptError, DiskReadError: they could not be read.
    """
    geometry = store.geometry
    if not geometry.gated:
        raise BundleError(
            "predictor gate needs an FFN with a gate, and this model has none; calibrate it again"
        )
    dtype = NUMPY_DTYPE[geometry.dtype]
    n, d = geometry.n_neurons, geometry.d_model
    step = min(n, max(1, _READ_BYTES // geometry.stride_bytes))
    buffer = aligned_empty(step * geometry.stride_bytes, max(LAYER_ALIGN_BYTES, store.alignment_bytes))
    gates: list[WeightArray | None] = []
    for layer, wanted in enumerate(layers):
        if not wanted:
            gates.append(None)
            continue
        gate = aligned_empty(n * d * dtype.itemsize, huge_pages=True).view(dtype).reshape(n, d)
        for start in range(0, n, step):
            stop = min(start + step, n)
            nbytes = (stop - start) * geometry.stride_bytes
            rows = buffer[:nbytes].reshape(-1, geometry.stride_bytes)
            await store.read_range(layer, start, stop, rows)
            gate[start:stop] = rows.view(dtype)[:, d : 2 * d]  # [up | gate | down]
        gates.append(gate)
    return gates
