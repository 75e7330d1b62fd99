"""``flashd inspect``: what a bundle holds, and how much RAM each way of using it needs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from flashd.kv.contiguous import kv_bytes_per_token
from flashd.layout.manifest import TOKENIZER, Manifest
from flashd.prefetch.stream import RING_BUFFERS, ring_slice_rows
from flashd.store.open import open_manifest, resident_entries
from flashd.tools.calibrated import CalibrationFacts, calibration_facts

WINDOW_SHARES_PERCENT = (10, 25, 50)


@dataclass(frozen=True)
class InspectReport:
    """Facts about a bundle; sizes in bytes. ``dataclasses.asdict`` makes JSON of it.

    The ``ram_*`` figures are weights and buffers; the KV cache (``kv_bytes_per_token`` times the
    tokens held) and the process itself come on top.

    Attributes:
        directory: the bundle.
        family, dtype, store: as in the manifest.
        parameters: weights in all.
        n_layers, d_model, d_ffn, max_context, vocab_size: the model's shape.
        total_bytes: all listed files.
        resident_bytes: weights that always stay in RAM.
        ffn_bytes: neuron rows, padding included.
        layer_bytes: rows of one layer.
        row_bytes, stride_bytes: one neuron without and with padding.
        kv_bytes_per_token: keys and values of one token, float16.
        kv_bytes_full_context: those of a sequence of ``max_context`` tokens.
        ram_dense_resident_bytes: everything in RAM.
        ram_dense_streamed_bytes: resident weights and the stream's buffers.
        ram_sparse_bytes: by share of the FFN rows that the window holds, in percent; with the predictors
            that are there.
        calibrated: whether there is a calibration that can be used.
        calibration: facts about it.
        calibration_problem: why one can't be used; empty without one.
        tokenizer, chat_template: whether the bundle has them.
        provenance: where the model came from.
    """

    directory: str
    family: str
    dtype: str
    store: str
    parameters: int
    n_layers: int
    d_model: int
    d_ffn: int
    max_context: int
    vocab_size: int
    total_bytes: int
    resident_bytes: int
    ffn_bytes: int
    layer_bytes: int
    row_bytes: int
    stride_bytes: int
    kv_bytes_per_token: int
    kv_bytes_full_context: int
    ram_dense_resident_bytes: int
    ram_dense_streamed_bytes: int
    ram_sparse_bytes: dict[str, int]
    calibrated: bool
    calibration: CalibrationFacts | None
    calibration_problem: str
    tokenizer: bool
    chat_template: bool
    provenance: dict[str, str]


def inspect(directory: Path) -> InspectReport:
    """Read a bundle's manifest and headers; no weights.

    Raises:
        BundleError: the directory is no bundle, or incomplete.
    """
    manifest = open_manifest(directory)
    spec, ffn = manifest.model, manifest.ffn
    resident = resident_entries(directory).values()
    resident_bytes = sum(entry.nbytes for entry in resident)
    ffn_bytes = ffn.n_layers * ffn.layer_bytes
    kv_bytes = kv_bytes_per_token(spec, "f16")
    streamed_bytes = resident_bytes + RING_BUFFERS * ring_slice_rows(ffn) * ffn.stride_bytes
    calibration, problem = calibration_facts(directory, manifest)
    sparse_bytes = streamed_bytes + (calibration.predictors_bytes if calibration else 0)
    return InspectReport(
        directory=str(directory),
        family=spec.family,
        dtype=manifest.dtype,
        store=manifest.store,
        parameters=_parameters(manifest, sum(prod(entry.shape) for entry in resident)),
        n_layers=spec.n_layers,
        d_model=spec.d_model,
        d_ffn=spec.d_ffn,
        max_context=spec.max_context,
        vocab_size=spec.vocab_size,
        total_bytes=sum(entry.size_bytes for entry in manifest.files),
        resident_bytes=resident_bytes,
        ffn_bytes=ffn_bytes,
        layer_bytes=ffn.layer_bytes,
        row_bytes=ffn.row_bytes,
        stride_bytes=ffn.stride_bytes,
        kv_bytes_per_token=kv_bytes,
        kv_bytes_full_context=kv_bytes * spec.max_context,
        ram_dense_resident_bytes=resident_bytes + ffn_bytes,
        ram_dense_streamed_bytes=streamed_bytes,
        ram_sparse_bytes={
            str(share): sparse_bytes + ffn_bytes * share // 100 for share in WINDOW_SHARES_PERCENT
        },
        calibrated=calibration is not None,
        calibration=calibration,
        calibration_problem=problem,
        tokenizer=any(entry.name == TOKENIZER for entry in manifest.files),
        chat_template=manifest.tokenizer is not None and bool(manifest.tokenizer.chat_template),
        provenance=dict(manifest.provenance),
    )


def _parameters(manifest: Manifest, resident_elements: int) -> int:
    """Weights of the model; rotation frequencies are counted as such, a rounding error."""
    ffn = manifest.ffn
    return resident_elements + ffn.n_layers * ffn.n_neurons * ffn.row_elements
