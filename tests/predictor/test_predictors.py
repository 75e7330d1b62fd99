"""Low-rank and gate predictors: what they request, whoever else is in the batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd import kernels
from flashd.errors import BundleError
from flashd.layout.calibration import PARTS
from flashd.predictor.gate import GatePredictor, firing_range
from flashd.predictor.open import make_predictor, predictor_bytes
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import load_gates, open_predictors, open_store
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.testing.predictors import make_predictors
from flashd.types import Activation, BoolArray, DType, F32Array

ACTIVATIONS: tuple[Activation, ...] = ("relu", "relu2", "silu", "gelu", "gelu_tanh")


def inputs(tokens: int, d: int, seed: int = 0) -> F32Array:
    return np.random.default_rng([seed, 7]).standard_normal((tokens, d), np.float32)


def test_low_rank_requests_scores_above_the_threshold(tmp_path: Path) -> None:
    made = make_bundle(tmp_path, tiny_spec())
    make_predictors(tmp_path, made.manifest, masked=[True, False, True], threshold=0.5)
    opened = open_predictors(tmp_path, made.manifest)
    assert opened is not None
    calibration, tensors = opened
    predictor = make_predictor(calibration, tensors, made.manifest.ffn, "relu")
    assert [predictor.masked(layer) for layer in range(3)] == [True, False, True]
    assert predictor.nbytes == predictor_bytes(calibration, made.manifest)
    x = inputs(5, 32)
    w1, b1, w2, b2 = (
        tensors[f"layers.2.predictor.{part}"].astype(np.float64) for part in ("w1", "b1", "w2", "b2")
    )
    scores = np.maximum(x @ w1.T + b1, 0) @ w2.T + b2
    ids, mask = predictor.predict(2, x)
    certain = np.abs(scores - 0.5) > 1e-3
    dense = np.zeros(scores.shape, np.bool_)
    dense[:, ids] = mask
    np.testing.assert_array_equal(dense[certain], (scores > 0.5)[certain])
    np.testing.assert_array_equal(
        predictor.predict_prompt(2, np.concatenate([inputs(30, 32, 1), x]))[30:], dense
    )
    with pytest.raises(ValueError, match="layer 1 has no mask"):
        predictor.predict(1, x)


def test_look_ahead_is_for_masked_next_layers(tmp_path: Path) -> None:
    made = make_bundle(tmp_path, tiny_spec())
    calibration, tensors = make_predictors(tmp_path, made.manifest, masked=[True, True, False])
    predictor = make_predictor(calibration, tensors, made.manifest.ffn, "relu")
    x = inputs(2, 32)
    w1, b1, w2, b2 = (tensors[f"layers.0.lookahead.{part}"] for part in PARTS)
    guess = predictor.lookahead(0, x)
    assert guess is not None
    np.testing.assert_array_equal(guess, kernels.predict(w1, w2, x, 0.0, b1, b2)[0])
    assert predictor.lookahead(1, x) is None
    assert predictor.lookahead(2, x) is None
    small = make_predictors(tmp_path, made.manifest, lookahead=False)
    assert predictor.nbytes > make_predictor(*small, made.manifest.ffn, "relu").nbytes / 2 > 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("threshold", [0.0, 1e-3, 0.16, 0.2784, 3.0])
def test_firing_range(activation: Activation, threshold: float) -> None:
    """Against the kernels' own activation, over every interesting z."""
    z = np.linspace(-30, 30, 120_001, dtype=np.float32)
    rows = np.zeros((len(z), 512), np.uint8)
    rows.view(np.float32)[:, 1] = z  # [up 0 | gate z | down 0], so that hidden = act(z) * up_bias
    hidden = np.empty((1, len(z)), np.float32)
    one = np.ones((1, 1), np.float32)
    ups = np.ones(len(z), np.float32)
    kernels.ffn_dots(rows, "f32", 1, True, activation, one, hidden, ups, threshold=threshold)
    fires = hidden[0] != 0
    found = firing_range(activation, threshold)
    inside = (z > found.high) | ((z > found.dip_low) & (z < found.dip_high))
    assert not np.any(fires & ~inside)
    # Far below zero smooth activations vanish in float32.
    assert np.count_nonzero((inside & ~fires)[z > -10]) <= 2 + np.count_nonzero(z == 0)


def opened_gate(
    made: MadeBundle, activation: Activation, thresholds: tuple[float, ...], **options: Any
) -> Any:
    manifest = replace(made.manifest, thresholds=thresholds)
    calibration, tensors = make_predictors(made.directory, manifest, predictor="gate", **options)

    async def gates() -> Any:
        store = await open_store(made.directory, manifest)
        try:
            return await load_gates(store, [layer.masked for layer in calibration.layers])
        finally:
            await store.close()

    loaded = asyncio.run(gates())
    ffn = manifest.ffn
    found = make_predictor(calibration, tensors, ffn, activation, gates=loaded, thresholds=thresholds)
    assert found.nbytes == predictor_bytes(calibration, manifest)
    return found


def fired(made: MadeBundle, layer: int, activation: Activation, x: F32Array, threshold: float) -> BoolArray:
    hidden = np.empty((len(x), made.manifest.ffn.n_neurons), np.float32)
    geometry = made.manifest.ffn
    kernels.ffn_dots(
        made.rows[layer], geometry.dtype, geometry.d_model, True, activation, x, hidden, threshold=threshold
    )
    return np.not_equal(hidden, 0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_gate_misses_nothing_that_fires(tmp_path: Path, activation: Activation, dtype: DType) -> None:
    """Thresholds that lie exactly on values of the activation are the hardest."""
    made = make_bundle(tmp_path, tiny_spec("llama", activation=activation), dtype=dtype)
    for tokens in (1, 16, 40):  # a prompt's FFN runs in kernels of its own
        x = inputs(tokens, 32, tokens)
        hidden = np.empty((tokens, 80), np.float32)
        kernels.ffn_dots(made.rows[1], dtype, 32, True, activation, x, hidden, np.full(80, 1, np.float32))
        level = float(np.sort(np.abs(hidden[np.abs(hidden) > 0]))[hidden.size // 3])
        predictor = opened_gate(made, activation, (0.0, level, 0.1), masked=[False, True, True])
        assert isinstance(predictor, GatePredictor)
        assert not predictor.masked(0)
        mask = predictor.predict_prompt(1, x)
        truth = fired(made, 1, activation, x, level)
        assert not np.any(truth & ~mask)
        assert np.count_nonzero(mask & ~truth) <= 0.01 * mask.size + 1


def test_a_gate_that_is_no_number_is_requested(tmp_path: Path) -> None:
    made = make_bundle(tmp_path, tiny_spec("llama"), dtype="f32")
    predictor = opened_gate(made, "silu", (0.1,) * 3)
    x = inputs(2, 32)
    x[1, 3] = np.nan
    ids, mask = predictor.predict(0, x)
    assert len(ids) == 80
    assert mask[1].all()
    assert not mask[0].all()


def test_gate_needs_a_gate(tmp_path: Path) -> None:
    made = make_bundle(tmp_path, tiny_spec())
    calibration, tensors = make_predictors(tmp_path, made.manifest, predictor="gate")
    with pytest.raises(BundleError, match="--predictor low-rank"):
        make_predictor(calibration, tensors, made.manifest.ffn, "relu", gates=[None] * 3)
    with pytest.raises(BundleError, match="an FFN with a gate"):
        asyncio.run(load_gates(InMemoryStore(made.manifest.ffn, made.rows), [True] * 3))
