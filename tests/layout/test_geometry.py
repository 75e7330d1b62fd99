from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashd.layout.geometry import bundle_bytes, ffn_geometry, layer_offsets, round_up
from flashd.testing.bundles import tiny_spec
from flashd.types import DType


@pytest.mark.parametrize(
    ("family", "dtype", "row", "stride"),
    [
        ("opt", "f16", 128, 512),
        ("opt", "f32", 256, 512),
        ("llama", "bf16", 192, 512),
        ("llama", "f32", 384, 512),
    ],
)
def test_rows(family: str, dtype: DType, row: int, stride: int) -> None:
    geometry = ffn_geometry(tiny_spec(family), dtype)
    assert (geometry.row_bytes, geometry.stride_bytes) == (row, stride)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 9), st.sampled_from([512, 4096, 65536]))
def test_layers_start_on_4096_and_end_inside_the_file(d: int, n: int, layers: int, align: int) -> None:
    geometry = ffn_geometry(tiny_spec(d_model=d, d_ffn=n, n_layers=layers), "f16", align)
    offsets = layer_offsets(geometry)
    assert geometry.stride_bytes % align == 0
    assert 0 <= geometry.stride_bytes - geometry.row_bytes < align
    assert all(offset % 4096 == 0 for offset in offsets)
    ends = [offset + geometry.layer_bytes for offset in offsets]
    assert all(
        end <= start < end + 4096
        for end, start in zip(ends, [*offsets[1:], bundle_bytes(geometry)], strict=True)
    )


def test_round_up() -> None:
    assert [round_up(v, 512) for v in (0, 1, 511, 512, 513)] == [0, 512, 512, 512, 1024]
