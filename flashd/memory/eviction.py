"""Which neurons leave RAM first: the order of a layer's rows, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from flashd.types import BoolArray, F32Array, I32Array

# Steps after which a request counts half. Of 4 to 128, 32 reads least on a small trained ReLU model: at equal
# bytes 7 to 24 % less than `lru`, and still less than the paper's window.
HALF_LIFE_STEPS = 32
_RESCALE_ABOVE = 1e15


class EvictionPolicy(ABC):
    """Ranks a layer's rows.

    Attributes:
        name: in the configuration.
        k: steps whose requests fit; may be changed. Only ``window`` goes by it.
    """

    name: str
    k: int = 1

    def counts(self, layer: int) -> F32Array | None:
        """What requests add up to, ``[n_neurons]``; None: nobody counts them."""
        return None

    def credit(self, step: int) -> float:
        """What a request at ``step`` adds; steps never go back."""
        return 0.0

    def expired(self, last_step: I32Array, step: int) -> BoolArray | None:
        """Which rows go even where there is room, by the step of their last request; None: none."""
        return None

    @abstractmethod
    def values(self, layer: int, last_step: I32Array) -> F32Array | I32Array:
        """What each neuron of a layer is worth, ``[n_neurons]``: the least goes first.

        Args:
            layer: layer index.
            last_step: ``[n_neurons]``, the step of its last request.
        """


class LeastRecent(EvictionPolicy):
    """``lru``: rows stay until there is no room; the longest not requested goes first."""

    name = "lru"

    def values(self, layer: int, last_step: I32Array) -> F32Array | I32Array:
        """See ``EvictionPolicy.values``."""
        return last_step


class PaperWindow(LeastRecent):
    """``window``: what the last ``k`` steps did not request goes (LLM in a flash, section 3.1).

    Args:
        k: steps.
    """

    name = "window"

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"a window of {k} steps, expected 1 or more")
        self.k = k

    def expired(self, last_step: I32Array, step: int) -> BoolArray:
        """See ``EvictionPolicy.expired``."""
        return last_step <= step - self.k


class Frequency(EvictionPolicy):
    """``frequency``: rows stay until there is no room; what was requested least often goes first,
    where a request counts half after some steps.

    Args:
        n_layers: of the model.
        n_neurons: of a layer.
        prior: share of tokens that request each neuron, ``[n_layers, n_neurons]``, known beforehand.
        half_life_steps: steps after which a request counts half.
    """

    name = "frequency"

    def __init__(
        self,
        n_layers: int,
        n_neurons: int,
        prior: F32Array | None = None,
        half_life_steps: float = HALF_LIFE_STEPS,
    ) -> None:
        self._growth = 2 ** (1 / half_life_steps)
        self._weight = 1.0  # of a request now; growing is the others' decay, without touching them
        self._step = 0
        # What so many tokens for ever would add up to.
        steady = 1 / (1 - 1 / self._growth)
        self._count = np.zeros((n_layers, n_neurons), np.float32)
        if prior is not None:
            self._count += prior * np.float32(steady)

    def counts(self, layer: int) -> F32Array:
        """See ``EvictionPolicy.counts``."""
        counts: F32Array = self._count[layer]
        return counts

    def credit(self, step: int) -> float:
        """See ``EvictionPolicy.credit``."""
        if step != self._step:
            self._weight *= self._growth ** (step - self._step)
            self._step = step
            if self._weight > _RESCALE_ABOVE:
                self._count /= np.float32(self._weight)
                self._weight = 1.0
        return self._weight

    def values(self, layer: int, last_step: I32Array) -> F32Array | I32Array:
        """See ``EvictionPolicy.values``."""
        return self.counts(layer)


Maker = Callable[[int, int, int, F32Array | None], EvictionPolicy]

POLICIES: dict[str, Maker] = {
    "lru": lambda n_layers, n_neurons, k, prior: LeastRecent(),
    "window": lambda n_layers, n_neurons, k, prior: PaperWindow(k),
    "frequency": lambda n_layers, n_neurons, k, prior: Frequency(n_layers, n_neurons, prior),
}


def make_policy(name: str, n_layers: int, n_neurons: int, k: int, prior: F32Array | None) -> EvictionPolicy:
    """A policy by name.

    Args:
        name: one of ``POLICIES``.
        n_layers: of the model.
        n_neurons: of a layer.
        k: window length in steps, for ``window``.
        prior: as for ``Frequency``.

    Raises:
        ValueError: an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name](n_layers, n_neurons, k, prior)
