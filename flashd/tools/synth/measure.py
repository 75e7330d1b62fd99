"""Usage of neurons over k tokens, measured on the code itself: no model runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashd.layout.calibration import MAX_WINDOW, LayerCalibration
from flashd.tools.synth.code import Code, LayerCode
from flashd.types import BoolArray, F32Array

_TOKENS = 512
_CAPACITY_PERCENTILE = 99


@dataclass(frozen=True)
class LayerUsage:
    """One layer, as ``calibration.json`` has it, and the share of tokens that request each neuron."""

    calibration: LayerCalibration
    frequency: F32Array


def measured_positions(code: Code) -> slice:
    """The tokens that usage is measured over: behind a window of others, as in a running sequence."""
    return slice(0, min(MAX_WINDOW + _TOKENS, len(code.positions)))


def layer_usage(code: Code, layer: int, predict_next: bool) -> LayerUsage:
    """Measure one layer.

    Args:
        code: of the model.
        layer: layer index.
        predict_next: whether there is a lookahead from this layer.
    """
    neurons = code.layer(layer)
    requested, fired = _masks(code, neurons)
    counts, counts_fired = _used(requested), _used(fired)
    n = requested.shape[1]
    share, share_fired = float(requested.mean()), float(fired.mean())
    return LayerUsage(
        LayerCalibration(
            masked=True,
            threshold=0.0,
            rank=code.rank,
            lookahead_threshold=0.0 if predict_next else None,
            lookahead_rank=code.rank if predict_next else 0,
            false_negative=float((fired & ~requested).sum() / max(1, fired.sum())),
            false_positive=float((requested & ~fired).sum() / max(1, (~fired).sum())),
            missed_norm=0.0,
            requested=share,
            fired=share_fired,
            s_agg_requested=_shares(counts, n),
            s_agg_fired=_shares(counts_fired, n),
            capacity_rows=tuple(
                int(rows) for rows in np.ceil(np.percentile(counts, _CAPACITY_PERCENTILE, axis=0))
            ),
        ),
        requested.mean(axis=0, dtype=np.float32),
    )


def _masks(code: Code, neurons: LayerCode) -> tuple[BoolArray, BoolArray]:
    """Requested and fired, each ``[tokens, n_neurons]``."""
    values = code.positions[measured_positions(code)] @ neurons.directions.astype(np.float32).T
    return values > neurons.request, values > neurons.fire


def _used(mask: BoolArray) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Neurons in any of the last k rows of ``mask [tokens, n]``, ``[tokens - 64, k = 1..64]``."""
    tokens, n = mask.shape
    age = np.full(n, MAX_WINDOW)
    counts = np.empty((max(1, tokens - MAX_WINDOW), MAX_WINDOW), np.int64)
    for token in range(tokens):
        age += 1
        age[mask[token]] = 0
        row = token - MAX_WINDOW
        if row >= 0:
            ages = np.bincount(np.minimum(age, MAX_WINDOW), minlength=MAX_WINDOW + 1)
            counts[row] = np.cumsum(ages)[:MAX_WINDOW]
    return counts


def _shares(counts: np.ndarray[tuple[int, int], np.dtype[np.int64]], n: int) -> tuple[float, ...]:
    return tuple(round(float(count) / n, 6) for count in counts.mean(axis=0))
