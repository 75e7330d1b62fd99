"""The two ways to compute a slice agree with float64, for every dtype and activation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashd.layout.geometry import ffn_geometry
from flashd.prefetch.dense import DenseFFN, SliceWeights, activate
from flashd.testing.bundles import random_rows, tiny_spec
from flashd.types import Activation, DType, F32Array, FFNGeometry, U8Array

TORCH_ACTIVATIONS = {
    "relu": torch.relu,
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
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
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


def test_a_prompt_larger_than_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of float32 rows, the last one short, give the same as one block."""
    geometry = ffn_geometry(tiny_spec("llama", d_ffn=100), "bf16")
    rows = random_rows(geometry)[0]
    x = np.random.default_rng(0).standard_normal((20, 32), np.float32)
    results = []
    for block_bytes in (1 << 20, 4 * geometry.row_elements * 7):
        monkeypatch.setattr("flashd.prefetch.dense.BLOCK_BYTES", block_bytes)
        dense = DenseFFN(geometry, "silu")
        acc = np.zeros((20, 32), np.float32)
        dense.add(SliceWeights(rows, None, None), x, acc)
        results.append(acc)
    assert dense.block_rows == 7
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(TORCH_ACTIVATIONS))
def test_activations(name: Activation) -> None:
    x = np.concatenate([np.linspace(-14, 14, 20_001), [-1e30, 1e30, 0.0]]).astype(np.float32)
    expected = TORCH_ACTIVATIONS[name](torch.from_numpy(x).double())
    got = activate(name, x.copy())
    assert got.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(got).double(), expected, rtol=1e-4, atol=1e-7)
    assert np.isnan(activate(name, np.array([np.nan], np.float32)))
