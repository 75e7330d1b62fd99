"""A bundle with its neurons in another order: the same model, up to the order in which sums are formed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.layout.calibration import Calibration, frequency_name, tensor_name
from flashd.layout.geometry import bundle_bytes
from flashd.layout.manifest import MANIFEST, RESIDENT, SUMS, TOKENIZER, FileEntry, Manifest, to_json
from flashd.layout.safetensors_header import build_header
from flashd.store.base import WeightStore
from flashd.store.open import load_resident, open_store, resident_entries
from flashd.store.predictors import open_predictors
from flashd.tools.calibrate.write import write_calibration
from flashd.tools.convert.destination import FINGERPRINT, Destination
from flashd.tools.convert.ffn import FFNWriter
from flashd.tools.convert.ffn_file import BundleFileWriter
from flashd.tools.convert.files import HashedFile, hash_file, sync_path, write_durably, write_errors
from flashd.types import I64Array, WeightArray

ORDER = "neuron_order"  # provenance key
_SLACK_BYTES = 1 << 20


def rewritten_bytes(manifest: Manifest, calibration: Calibration | None) -> int:
    """What a reordered bundle takes on the disk, as near as it is known beforehand."""
    others = sum(entry.size_bytes for entry in manifest.files if entry.name in (RESIDENT, SUMS, TOKENIZER))
    predictors = 0 if calibration is None else calibration.predictors_bytes
    return bundle_bytes(manifest.ffn) + others + predictors + _SLACK_BYTES


async def rewrite(
    directory: Path,
    manifest: Manifest,
    out: Destination,
    orders: Sequence[I64Array],
    name: str,
    progress: Callable[[int], None],
) -> Manifest:
    """Write the bundle into ``out`` and publish it; its calibration goes along.

    Args:
        directory: the bundle to read. Every row is compared with its checksum.
        manifest: of it.
        out: entered; nothing of it is written yet.
        orders: per layer, ``[n_neurons]``: which neuron comes first, second, ...
        name: of the order, for people.
        progress: told the layers done so far.

    Returns:
        The manifest of the new bundle.

    Raises:
        BundleCorruptError, DiskReadError: the bundle cannot be read.
        ConversionError, OutOfSpaceError: the new one cannot be written.
    """
    found = open_predictors(directory, manifest)
    store = await open_store(directory, manifest, verify="reads")
    try:
        with write_errors(out.root):
            entries = [_write_resident(directory, manifest, out.root, orders)]
            entries += await _write_rows(manifest, store, out.root, orders, progress)
            if any(entry.name == TOKENIZER for entry in manifest.files):
                path = out.root / TOKENIZER
                shutil.copyfile(directory / TOKENIZER, path)
                sync_path(path)
                entries.append(hash_file(path, out.root))
            notes = manifest.provenance | {ORDER: name, FINGERPRINT: out.durable.fingerprint}
            made = replace(manifest, files=tuple(entries), provenance=notes)
            if found is not None:
                write_durably(out.root / MANIFEST, to_json(made).encode())
                write_calibration(out.root, made, found[0], _tensors(*found, orders))
    finally:
        await store.close()
    out.publish(made)
    return made


def _write_resident(directory: Path, manifest: Manifest, root: Path, orders: Sequence[I64Array]) -> FileEntry:
    """Everything as it is, but the biases of the neurons."""
    tensors = load_resident(directory, manifest)
    for layer, order in enumerate(orders):
        for part in ("up", "gate"):
            name = f"layers.{layer}.ffn.{part}.bias"
            if name in tensors:
                tensors[name] = tensors[name][order]
    entries = resident_entries(directory)
    header, _ = build_header({name: (entry.dtype, entry.shape) for name, entry in entries.items()})
    file = HashedFile(root / RESIDENT)
    try:
        file.write(header)
        for name in entries:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8))
        file.sync()
        return file.entry(root)
    finally:
        file.close()


async def _write_rows(
    manifest: Manifest,
    store: WeightStore,
    root: Path,
    orders: Sequence[I64Array],
    progress: Callable[[int], None],
) -> list[FileEntry]:
    geometry = manifest.ffn
    writer: FFNWriter
    if manifest.store == "file":
        writer = BundleFileWriter(root, geometry, 0, lambda done: None)
    else:
        from flashd.tools.convert.ffn_zarr import ZarrWriter

        writer = ZarrWriter(root, geometry, 0, [])
    try:
        rows = aligned_empty(min(writer.block_rows, geometry.n_neurons) * geometry.stride_bytes)
        rows = rows.reshape(-1, geometry.stride_bytes)
        for layer, order in enumerate(orders):
            progress(layer)
            for start in range(0, geometry.n_neurons, len(rows)):
                ids = order[start : start + len(rows)]
                await store.read_rows(layer, ids, rows[: len(ids)])
                writer.write(layer, start, rows[: len(ids)])
            writer.end_layer(layer)
            writer.sync()
        progress(len(orders))
        return writer.entries()
    finally:
        writer.close()


def _tensors(
    calibration: Calibration, tensors: dict[str, WeightArray], orders: Sequence[I64Array]
) -> dict[str, WeightArray]:
    """The predictors' last layers in the new order; a lookahead's is that of the layer it guesses."""
    moved = dict(tensors)
    for layer, order in enumerate(orders):
        names = [frequency_name(layer)]
        names += [tensor_name(layer, "predictor", part) for part in ("w2", "b2")]
        if layer:
            names += [tensor_name(layer - 1, "lookahead", part) for part in ("w2", "b2")]
        for name in names:
            if name in tensors:
                moved[name] = np.ascontiguousarray(tensors[name][order])
    return moved
