"""``manifest.json`` of bundle format 1: the one file that makes a directory a bundle.

It is written last, so a directory without it never opens. Everything read from it is checked
here, once; the rooms above trust a ``Manifest``.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from flashd.errors import BundleError
from flashd.layout.geometry import MAX_STRIDE_ALIGN_BYTES, MIN_STRIDE_ALIGN_BYTES, ffn_geometry, layer_offsets
from flashd.types import DType, FFNGeometry, ModelSpec, StoreKind, TokenizerSpec

FORMAT = "flashd-bundle"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
RESIDENT = "resident.safetensors"
BUNDLE = "ffn.bundle"
ZARR = "ffn.zarr"
SUMS = "ffn.sums"
TOKENIZER = "tokenizer.json"

_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_MAX_DIM = 1 << 31
_MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle: path relative to the directory, size and SHA-256 (hex)."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    format: Literal["flashd-bundle"]
    format_version: Literal[1]
    model: ModelSpec
    dtype: DType
    store: StoreKind
    ffn: FFNGeometry
    layer_offset_bytes: tuple[int, ...]
    files: tuple[FileEntry, ...]
    tokenizer: TokenizerSpec | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    # Per layer, activations up to it count as zero (FATReLU, CATS); empty: 0 everywhere.
    thresholds: tuple[float, ...] = ()

    def file(self, name: str) -> FileEntry:
        """Entry of one file; ``BundleError`` if the manifest does not list it."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise BundleError(f"the bundle's {MANIFEST} lists no file {name!r}; convert the model again")


def to_json(manifest: Manifest) -> str:
    """Text of ``manifest.json``."""
    return json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n"


def from_json(text: bytes, where: str) -> Manifest:
    """Parse and check ``manifest.json``.

    Args:
        text: the file's content.
        where: path of the file, for messages.

    Raises:
        BundleError: not JSON, not a bundle, a newer format, or values that contradict each other.
    """
    if len(text) > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{where}: {len(text)} bytes, more than any real manifest has")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise BundleError(f"{where}: not valid JSON ({exc}); convert the model again") from exc
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise BundleError(f"{where}: not a flashd bundle (no format {FORMAT!r})")
    if head.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"{where}: bundle format {head.get('format_version')!r}, this flashd reads format "
            f"{FORMAT_VERSION}; upgrade flashd or convert the model again"
        )
    try:
        manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
        _check(manifest)
    except ValidationError as exc:
        first = exc.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"{where}: {field_name}: {first['msg']}; convert the model again") from exc
    except ValueError as exc:
        raise BundleError(f"{where}: {exc}; convert the model again") from exc
    return manifest


def _check(manifest: Manifest) -> None:
    """Values that only make sense together. Raises ``ValueError``."""
    spec, ffn = manifest.model, manifest.ffn
    _check_spec(spec)
    if ffn != ffn_geometry(spec, manifest.dtype, align_bytes=1, stride_bytes=ffn.stride_bytes):
        raise ValueError("the ffn section contradicts the model section")
    padding = ffn.stride_bytes - ffn.row_bytes
    if not 0 <= padding < MAX_STRIDE_ALIGN_BYTES or ffn.stride_bytes % MIN_STRIDE_ALIGN_BYTES:
        raise ValueError(f"row stride {ffn.stride_bytes} for rows of {ffn.row_bytes} bytes")
    # The length first: a hostile n_layers must not be turned into a list.
    if len(manifest.layer_offset_bytes) != ffn.n_layers or (
        list(manifest.layer_offset_bytes) != layer_offsets(ffn)
    ):
        raise ValueError("layer_offset_bytes are not where rows of this size lie")
    if len({entry.name for entry in manifest.files}) != len(manifest.files):
        raise ValueError("a file is listed twice")
    if manifest.thresholds and len(manifest.thresholds) != ffn.n_layers:
        raise ValueError(f"{len(manifest.thresholds)} thresholds for {ffn.n_layers} layers")
    if not all(0 <= value < math.inf for value in manifest.thresholds):
        raise ValueError("a threshold is not a number of at least 0")
    for entry in manifest.files:
        if not _NAME.fullmatch(entry.name) or ".." in entry.name.split("/"):
            raise ValueError(f"file name {entry.name!r} leaves the bundle")


def _check_spec(spec: ModelSpec) -> None:
    for name in (
        "vocab_size", "d_model", "d_embed", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ffn",
        "max_context",
    ):  # fmt: skip
        if not 0 < getattr(spec, name) < _MAX_DIM:
            raise ValueError(f"model.{name} is {getattr(spec, name)}")
    if spec.n_heads % spec.n_kv_heads:
        raise ValueError(f"{spec.n_heads} heads are no multiple of {spec.n_kv_heads} KV heads")
    if spec.rope and spec.d_head % 2:
        raise ValueError(f"rotary positions need an even head size, model.d_head is {spec.d_head}")
    if not 0 < spec.norm_eps < 1:
        raise ValueError(f"model.norm_eps is {spec.norm_eps}")
