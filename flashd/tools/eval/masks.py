"""FFN math that uses the true mask, and math that compares a predictor's mask with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from flashd.config import MAX_BATCH
from flashd.predictor.base import Predictor
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.stream import StreamingFFN
from flashd.tools.eval.report import LayerQuality
from flashd.types import Activation, BoolArray, F32Array, FFNGeometry, I64Array


class OracleFFN(DenseFFN):
    """Finds each token's true mask by the kernels that decoding uses, as predictor ``oracle`` does, and
    computes with it by those of a prompt. It reads every row, so it works for any size of model."""

    def add(self, weights: SliceWeights, x: F32Array, acc: F32Array, mask: BoolArray | None = None) -> None:
        """See ``DenseFFN.add``; the mask is found here."""
        true = [
            self.dots(weights, np.ascontiguousarray(x[start : start + MAX_BATCH])) != 0
            for start in range(0, len(x), MAX_BATCH)
        ]
        super().add(weights, x, acc, np.concatenate(true))


class ComparedSource:
    """An ``FFNSource``: a stream whose math is a ``ComparingFFN``, which is told where it is."""

    def __init__(self, stream: StreamingFFN, comparing: ComparingFFN) -> None:
        self._stream = stream
        self._comparing = comparing

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``."""
        return await self._stream.apply(layer, x, partial(self._comparing.look, layer))


class ComparingFFN(DenseFFN):
    """Computes every neuron, and counts which fired and which a predictor would have requested.

    Args:
        geometry: of the rows.
        activation: of the hidden units.
        predictor: to compare; None counts nothing.
    """

    def __init__(self, geometry: FFNGeometry, activation: Activation, predictor: Predictor | None) -> None:
        super().__init__(geometry, activation)
        self._predictor = predictor
        self._n_neurons = geometry.n_neurons
        # Per layer: fired, requested, both; and neurons times tokens.
        self._counts: I64Array = np.zeros((geometry.n_layers, 4), np.int64)
        self._layer = 0
        self._start = 0
        self._requested: BoolArray | None = None

    def look(self, layer: int, x: F32Array) -> None:
        """Begin a layer, on the lane: what comes are its slices in ascending order."""
        self._layer, self._start, self._requested = layer, 0, None
        if self._predictor is not None and self._predictor.masked(layer):
            self._requested = self._predictor.predict_prompt(layer, x)

    def add(self, weights: SliceWeights, x: F32Array, acc: F32Array, mask: BoolArray | None = None) -> None:
        """See ``DenseFFN.add``."""
        hidden = self.dots(weights, x, mask)
        self.down(weights, hidden, acc)
        if self._predictor is None:
            return
        fired = hidden != 0
        stop = self._start + fired.shape[1]
        if self._requested is None:
            requested = np.ones(fired.shape, np.bool_)
        else:
            requested = self._requested[:, self._start : stop]
        self._start = stop
        both = np.count_nonzero(fired & requested)
        self._counts[self._layer] += (
            np.count_nonzero(fired), np.count_nonzero(requested), both, fired.size
        )  # fmt: skip

    def quality(self) -> tuple[LayerQuality, ...]:
        """Of every layer, on all tokens so far; nothing without a predictor."""
        if self._predictor is None:
            return ()
        return tuple(
            _quality(layer, self._predictor.masked(layer), *map(int, counts))
            for layer, counts in enumerate(self._counts)
        )


def _quality(layer: int, masked: bool, fired: int, requested: int, both: int, of: int) -> LayerQuality:
    """Shares of nothing are what an ideal predictor has."""
    return LayerQuality(
        layer=layer,
        masked=masked,
        fired=fired / max(1, of),
        requested=requested / max(1, of),
        precision=both / requested if requested else 1.0,
        recall=both / fired if fired else 1.0,
        false_negative=(fired - both) / fired if fired else 0.0,
        false_positive=(requested - both) / (of - fired) if of > fired else 0.0,
    )
