"""The contract of every predictor: FFN input -> the neurons a layer needs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from flashd.config import MAX_BATCH
from flashd.types import BoolArray, F32Array, I64Array


class Predictor(ABC):
    """Says which neurons of a layer are *requested* (LLM in a flash, section 3.1).

    What a token's mask is depends on the token's own FFN input and on nothing else: not on the batch it
    is in, on memory, or on what was asked before. Calls run on the compute lane.

    Attributes:
        name: what logs, metrics and ``flashd doctor`` call it.
        n_layers: of the model.
        n_neurons: of each layer.
        nbytes: memory it keeps.
    """

    name: str
    n_layers: int
    n_neurons: int
    nbytes: int

    @abstractmethod
    def masked(self, layer: int) -> bool:
        """Whether this layer has a mask; one without is computed with all its neurons."""

    @abstractmethod
    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """Requested neurons of a masked layer.

        Args:
            layer: layer index.
            x: ``[B, d_model]`` float32, the normed FFN input of 1 to ``MAX_BATCH`` tokens.

        Returns:
            ``ids int64[m]``, ascending: requested by any token; ``mask bool[B, m]``: by which.
        """

    def lookahead(self, layer: int, x: F32Array) -> I64Array | None:
        """Neurons that layer ``layer + 1`` will probably request, guessed from layer ``layer``'s input.

        Only for reading early: a wrong guess costs time, never a token.

        Args:
            layer: layer index, masked or not.
            x: as for ``predict``.

        Returns:
            ``int64[m]``, ascending; None where there is no guess.
        """
        return None

    def first_guess(self, x: F32Array) -> I64Array | None:
        """Neurons that layer 0 will probably request, at which no layer looks ahead.

        Args:
            x: ``[B, d_model]`` float32, what its FFN input would be if its attention gave nothing.

        Returns:
            As ``lookahead``.
        """
        return self.predict(0, x)[0]

    def predict_prompt(self, layer: int, x: F32Array) -> BoolArray:
        """Masks ``bool[tokens, n_neurons]`` of any number of tokens, each the same as by ``predict``."""
        mask = np.zeros((len(x), self.n_neurons), np.bool_)
        for start in range(0, len(x), MAX_BATCH):
            ids, used = self.predict(layer, np.ascontiguousarray(x[start : start + MAX_BATCH]))
            mask[start : start + MAX_BATCH, ids] = used
        return mask
