"""Row and layer geometry of ``ffn.bundle``. Pure arithmetic: opens no file.

A neuron's bundle is its up-projection row, its gate row (gated FFNs) and its down-projection
column, side by side (LLM in a flash, section 3.2 "Bundling columns and rows").
"""

from __future__ import annotations

from flashd.types import NUMPY_DTYPE, DType, FFNGeometry, ModelSpec

LAYER_ALIGN_BYTES = 4096
MIN_STRIDE_ALIGN_BYTES = 512
MAX_STRIDE_ALIGN_BYTES = 65536


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


def ffn_geometry(
    spec: ModelSpec,
    dtype: DType,
    align_bytes: int = MIN_STRIDE_ALIGN_BYTES,
    stride_bytes: int | None = None,
) -> FFNGeometry:
    """Geometry of a model's FFN rows.

    Args:
        spec: the model.
        dtype: weight type of the rows.
        align_bytes: what O_DIRECT needs of an offset; the stride is a multiple of it.
        stride_bytes: the stride itself, when a manifest says it.
    """
    elements = (3 if spec.gated else 2) * spec.d_model
    row_bytes = elements * NUMPY_DTYPE[dtype].itemsize
    return FFNGeometry(
        n_layers=spec.n_layers,
        n_neurons=spec.d_ffn,
        d_model=spec.d_model,
        gated=spec.gated,
        dtype=dtype,
        stride_bytes=stride_bytes or round_up(row_bytes, align_bytes),
    )


def layer_offsets(geometry: FFNGeometry) -> list[int]:
    """File offset in bytes of every layer's first row."""
    step = round_up(geometry.layer_bytes, LAYER_ALIGN_BYTES)
    return [layer * step for layer in range(geometry.n_layers)]


def bundle_bytes(geometry: FFNGeometry) -> int:
    """Size of ``ffn.bundle``: the tail of the last layer is padded, so that aligned reads of
    its last rows end inside the file."""
    return geometry.n_layers * round_up(geometry.layer_bytes, LAYER_ALIGN_BYTES)
