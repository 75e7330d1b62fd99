"""A slice's FFN agrees with float64 for few and for many tokens, and slices add up to the layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.layout.geometry import ffn_geometry
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.testing.bundles import random_rows, tiny_spec
from flashd.types import Activation, DType, F32Array, FFNGeometry, U8Array

TORCH_ACTIVATIONS = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def reference(
    geometry: FFNGeometry,
    rows: U8Array,
    activation: str,
    x: F32Array,
    up_bias: F32Array | None = None,
    gate_bias: F32Array | None = None,
) -> torch.Tensor:
    """The FFN in float64."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[geometry.dtype]
    packed = np.ascontiguousarray(rows[:, : geometry.row_bytes])
    parts = torch.from_numpy(packed).view(dtype).double().split(geometry.d_model, dim=1)
    inputs = torch.from_numpy(x).double()
    up = inputs @ parts[0].T + (0 if up_bias is None else torch.from_numpy(up_bias))
    act = TORCH_ACTIVATIONS[activation]
    if not geometry.gated:
        return act(up) @ parts[1]
    gate = inputs @ parts[1].T + (0 if gate_bias is None else torch.from_numpy(gate_bias))
    return (act(gate) * up) @ parts[2]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("family", ["opt", "llama"])
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_few_and_many_tokens(family: str, dtype: DType, activation: Activation, biased: bool) -> None:
    geometry = ffn_geometry(tiny_spec(family, d_model=52, d_ffn=333), dtype)
    rows = random_rows(geometry)[1]
    rng = np.random.default_rng(3)
    up_bias = rng.standard_normal(333, np.float32) if biased else None
    gate_bias = rng.standard_normal(333, np.float32) if biased and geometry.gated else None
    dense = DenseFFN(geometry, activation)
    for tokens in (1, 16, 17, 60):
        x = rng.standard_normal((tokens, 52), np.float32)
        acc = np.ones((tokens, 52), np.float32)
        dense.add(SliceWeights(rows, up_bias, gate_bias), x, acc)
        expected = 1 + reference(geometry, rows, activation, x, up_bias, gate_bias)
        torch.testing.assert_close(torch.from_numpy(acc).double(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.sampled_from([1, 5, 16, 17, 40]),
    cuts=st.lists(st.integers(0, 333), max_size=4),
    gated=st.booleans(),
)
def test_how_a_layer_is_cut_does_not_show(tokens: int, cuts: list[int], gated: bool) -> None:
    geometry = ffn_geometry(tiny_spec("llama" if gated else "opt", d_model=52, d_ffn=333), "bf16")
    rows = random_rows(geometry)[0]
    bias = np.linspace(-1, 1, 333, dtype=np.float32)
    x = np.random.default_rng(tokens).standard_normal((tokens, 52), np.float32)
    dense = DenseFFN(geometry, "silu")
    whole, sliced = np.zeros((2, tokens, 52), np.float32)
    dense.add(SliceWeights(rows, bias, None), x, whole)
    for start, stop in pairwise([0, *sorted(cuts), 333]):
        dense.add(SliceWeights(rows[start:stop], bias[start:stop], None), x, sliced)
    np.testing.assert_array_equal(sliced.view(np.uint32), whole.view(np.uint32))
