"""Small bundles for tests: seeded random weights, written with NumPy alone (zarr for zarr)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashd import kernels
from flashd.layout.geometry import bundle_bytes, ffn_geometry, layer_offsets
from flashd.layout.manifest import (
    BUNDLE,
    MANIFEST,
    RESIDENT,
    SUMS,
    ZARR,
    FileEntry,
    Manifest,
    to_json,
)
from flashd.layout.safetensors_header import build_header
from flashd.types import (
    NUMPY_DTYPE,
    SAFETENSORS_DTYPE,
    DType,
    F32Array,
    FFNGeometry,
    ModelSpec,
    StoreKind,
    TokenizerSpec,
    U8Array,
    WeightArray,
)

_INNER_CHUNK_BYTES = 256 << 10
_SHARD_CHUNKS = 4  # small, so that tests cross the borders of shards


@dataclass(frozen=True)
class MadeBundle:
    """A bundle on disk and what was written into it.

    Attributes:
        directory: the bundle.
        manifest: its manifest.
        rows: ``[n_layers, n_neurons, stride_bytes]`` uint8, padding zero.
        resident: tensors by canonical name, in the dtype they are stored in.
    """

    directory: Path
    manifest: Manifest
    rows: U8Array
    resident: dict[str, WeightArray]


_OPT = ModelSpec(
    family="opt",
    vocab_size=96,
    d_model=32,
    d_embed=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    d_head=8,
    d_ffn=80,
    max_context=64,
    activation="relu",
    gated=False,
    norm="layernorm",
    norm_eps=1e-5,
    norm_first=True,
    final_norm=True,
    rope=False,
    tied_head=True,
)
_LLAMA = replace(_OPT, family="llama", n_kv_heads=2, activation="silu", gated=True, norm="rmsnorm", rope=True)


def tiny_spec(family: str = "opt", **overrides: Any) -> ModelSpec:
    """A model of a few thousand weights.

    Args:
        family: ``opt`` (ungated, ReLU, learned positions) or ``llama`` (gated, SiLU, RoPE, GQA).
        **overrides: fields of ``ModelSpec``.
    """
    return replace({"opt": _OPT, "llama": _LLAMA}[family], **overrides)


def make_bundle(
    directory: Path,
    spec: ModelSpec | None = None,
    *,
    seed: int = 0,
    dtype: DType = "f16",
    store: StoreKind = "file",
    align_bytes: int = 512,
    tokenizer: TokenizerSpec | None = None,
) -> MadeBundle:
    """Write a bundle of format 1 with random weights.

    Args:
        directory: where; made if missing.
        spec: the model, ``tiny_spec()`` by default.
        seed: of the weights.
        dtype: of the weights.
        store: ``file`` or ``zarr``.
        align_bytes: the row stride is a multiple of it.
        tokenizer: goes into the manifest; the caller writes ``tokenizer.json`` if one is needed.
    """
    spec = spec or tiny_spec()
    rng = np.random.default_rng(seed)
    geometry = ffn_geometry(spec, dtype, align_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    resident = {
        name: _weights(rng, shape, dtype if len(shape) > 1 else "f32", name)
        for name, shape in _resident_shapes(spec).items()
    }
    _write_safetensors(directory / RESIDENT, resident)
    rows = random_rows(geometry, seed)
    if store == "file":
        write_bundle_file(directory / BUNDLE, rows, geometry)
    else:
        write_zarr(directory / ZARR, rows)
    sums = np.empty(rows.shape[:2], np.uint32)
    for layer, out in zip(rows, sums, strict=True):
        kernels.crc32c(layer, out)
    (directory / SUMS).write_bytes(sums.astype("<u4").tobytes())
    manifest = Manifest(
        format="flashd-bundle",
        format_version=1,
        model=spec,
        dtype=dtype,
        store=store,
        ffn=geometry,
        layer_offset_bytes=tuple(layer_offsets(geometry)),
        files=list_files(directory),
        tokenizer=tokenizer,
        provenance={"source": "random weights", "seed": str(seed)},
    )
    (directory / MANIFEST).write_text(to_json(manifest))
    return MadeBundle(directory, manifest, rows, resident)


def list_files(directory: Path) -> tuple[FileEntry, ...]:
    """Every file below ``directory`` but the manifest, as the manifest lists them."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    return tuple(
        FileEntry(
            str(path.relative_to(directory)),
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in paths
    )


def random_rows(geometry: FFNGeometry, seed: int = 0) -> U8Array:
    """Neuron rows, ``[n_layers, n_neurons, stride_bytes]``, with zero padding."""
    rng = np.random.default_rng([seed, 1])
    rows = np.zeros((geometry.n_layers, geometry.n_neurons, geometry.stride_bytes), np.uint8)
    shape = (geometry.n_layers, geometry.n_neurons, geometry.row_elements)
    weights = _store_as(rng.standard_normal(shape, np.float32) * np.float32(0.1), geometry.dtype)
    rows[:, :, : geometry.row_bytes] = weights.view(np.uint8).reshape(*shape[:2], geometry.row_bytes)
    return rows


def write_bundle_file(path: Path, rows: U8Array, geometry: FFNGeometry) -> None:
    """``ffn.bundle``: layer after layer, each on 4096, the tail padded."""
    with path.open("wb") as file:
        for offset, layer in zip(layer_offsets(geometry), rows, strict=True):
            file.seek(offset)
            file.write(layer.tobytes())
        file.truncate(bundle_bytes(geometry))


def write_zarr(path: Path, rows: U8Array) -> None:
    """``ffn.zarr``: one sharded, uncompressed array per layer."""
    import zarr

    _, n_neurons, stride = rows.shape
    chunk = max(1, min(_INNER_CHUNK_BYTES // stride, n_neurons // (2 * _SHARD_CHUNKS)))
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for i, layer in enumerate(rows):
        array = group.create_array(
            f"layers/{i}",
            shape=layer.shape,
            dtype=np.uint8,
            chunks=(chunk, stride),
            shards=(chunk * _SHARD_CHUNKS, stride),
            compressors=None,
            filters=None,
            config={"write_empty_chunks": True},
        )
        array[:] = layer


def _resident_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of everything that stays in RAM."""
    d, q_out, kv_out = spec.d_model, spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head
    biased = spec.family == "opt"
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, spec.d_embed)}
    if spec.rope:
        shapes["rope.inv_freq"] = (spec.d_head // 2,)
    else:
        shapes["position.weight"] = (spec.max_context, d)
    if spec.d_embed != d:
        shapes |= {"project_in.weight": (d, spec.d_embed), "project_out.weight": (spec.d_embed, d)}
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, spec.d_embed)
    norms = ["final_norm"] if spec.final_norm else []
    for layer in (f"layers.{i}" for i in range(spec.n_layers)):
        norms += [f"{layer}.attn_norm", f"{layer}.ffn_norm"]
        for part, n_out, n_in in (("q", q_out, d), ("k", kv_out, d), ("v", kv_out, d), ("o", d, q_out)):
            shapes[f"{layer}.attn.{part}.weight"] = (n_out, n_in)
            if biased:
                shapes[f"{layer}.attn.{part}.bias"] = (n_out,)
        if biased:
            shapes |= {f"{layer}.ffn.up.bias": (spec.d_ffn,), f"{layer}.ffn.down.bias": (d,)}
    for norm in norms:
        shapes[f"{norm}.weight"] = (d,)
        if spec.norm == "layernorm":
            shapes[f"{norm}.bias"] = (d,)
    return shapes


def _weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, name: str) -> WeightArray:
    if name == "rope.inv_freq":
        half = shape[0]
        return (1.0 / 10000.0 ** (np.arange(half) / half)).astype(np.float32)
    values = rng.standard_normal(shape, np.float32) * np.float32(0.2)
    if name.endswith("norm.weight"):
        values += 1
    return _store_as(values, dtype)


def _store_as(values: F32Array, dtype: DType) -> WeightArray:
    if dtype != "bf16":
        return values.astype(NUMPY_DTYPE[dtype])
    bits = values.view(np.uint32)
    nearest_even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (nearest_even >> np.uint32(16)).astype(np.uint16)


def _write_safetensors(path: Path, tensors: Mapping[str, WeightArray]) -> None:
    names = {dtype: SAFETENSORS_DTYPE[name] for name, dtype in NUMPY_DTYPE.items()}
    header, _ = build_header({name: (names[array.dtype], array.shape) for name, array in tensors.items()})
    path.write_bytes(header + b"".join(array.tobytes() for array in tensors.values()))
