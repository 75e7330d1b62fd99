"""The dense model on a text, streamed, with a look at what goes into and happens in its FFNs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.manifest import Manifest
from flashd.models.decoder import Decoder, Span
from flashd.models.layers import as_f32
from flashd.predictor.base import Predictor
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.stream import StreamingFFN
from flashd.runtime.accounting import PREFILL_CHUNK_TOKENS
from flashd.store.base import WeightStore
from flashd.store.open import load_resident, open_manifest, open_store
from flashd.tools.calibrate.scratch import Scratch
from flashd.types import BoolArray, F32Array, I64Array, WeightArray

_NLL_ROWS = 64


class Observer(Protocol):
    """Told what a layer's FFN does, on the compute lane."""

    def layer(self, layer: int, x: F32Array) -> None:
        """A layer begins, with this input ``[tokens, d]``."""
        ...

    def hidden(self, start: int, values: F32Array) -> None:
        """Its neurons ``start`` on have these values ``[tokens, n]``, which may be changed."""
        ...


class Blind:
    """Looks at nothing."""

    def layer(self, layer: int, x: F32Array) -> None:
        """See ``Observer.layer``."""

    def hidden(self, start: int, values: F32Array) -> None:
        """See ``Observer.hidden``."""


class Recorder:
    """Writes down inputs, and which neurons fired."""

    def __init__(self, scratch: Scratch, n_neurons: int) -> None:
        self._scratch = scratch
        self._n_neurons = n_neurons
        self._layer = 0
        self._x: F32Array = np.empty((0, 0), np.float32)
        self._fired: BoolArray = np.empty((0, 0), np.bool_)

    def layer(self, layer: int, x: F32Array) -> None:
        """See ``Observer.layer``."""
        self._layer, self._x = layer, x
        self._fired = np.empty((len(x), self._n_neurons), np.bool_)

    def hidden(self, start: int, values: F32Array) -> None:
        """See ``Observer.hidden``."""
        stop = start + values.shape[1]
        np.not_equal(values, 0, out=self._fired[:, start:stop])
        if stop == self._n_neurons:
            self._scratch.append(self._layer, self._x, self._fired)


class Masker:
    """Lets only the requested neurons have a value: the model as it runs with its predictor."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._mask: BoolArray | None = None

    def layer(self, layer: int, x: F32Array) -> None:
        """See ``Observer.layer``."""
        masked = self._predictor.masked(layer)
        self._mask = self._predictor.predict_prompt(layer, np.ascontiguousarray(x)) if masked else None

    def hidden(self, start: int, values: F32Array) -> None:
        """See ``Observer.hidden``."""
        if self._mask is not None:
            values[~self._mask[:, start : start + values.shape[1]]] = 0


class _ObservedMath(DenseFFN):
    """Shows every slice's hidden values, in ascending order of neurons, before they are projected down."""

    def __init__(self, manifest: Manifest, observe: Callable[[F32Array], None]) -> None:
        super().__init__(manifest.ffn, manifest.model.activation)
        self._observe = observe

    def add(self, weights: SliceWeights, x: F32Array, acc: F32Array, mask: BoolArray | None = None) -> None:
        """See ``DenseFFN.add``."""
        hidden = self.dots(weights, x, mask)
        self._observe(hidden)
        self.down(weights, hidden, acc)


class DenseModel:
    """A model that is run on whole sequences.

    Attributes:
        store: its rows.
        observer: told about every FFN.
    """

    def __init__(
        self,
        manifest: Manifest,
        weights: Mapping[str, WeightArray],
        store: WeightStore,
        lane: ComputeLane,
        thresholds: tuple[float, ...],
    ) -> None:
        self.store = store
        self.observer: Observer = Blind()
        self._next = 0
        self.biases = {part: ffn_biases(weights, manifest.model.n_layers, part) for part in ("up", "gate")}
        self.ffn = StreamingFFN(
            store,
            lane,
            manifest.model.activation,
            self.biases["up"],
            self.biases["gate"],
            thresholds=thresholds,
            dense=_ObservedMath(manifest, self._hidden),
        )
        self._spec = manifest.model
        self._decoder = Decoder(manifest.model, weights, self, lane)

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``."""

        def seen() -> F32Array:
            made = x()
            self._next = 0
            self.observer.layer(layer, made)
            return made

        return await self.ffn.apply(layer, seen)

    def _hidden(self, values: F32Array) -> None:
        self.observer.hidden(self._next, values)
        self._next += values.shape[1]

    async def run(self, tokens: I64Array, *, likelihood: bool = True) -> tuple[float, int]:
        """Run one sequence.

        Args:
            tokens: of the sequence.
            likelihood: whether to compute it, which takes the model's head for every token.

        Returns:
            Negative log-likelihood (nats) of its tokens but the first, and their number.
        """
        kv = ContiguousKV(self._spec, len(tokens), "f32")
        total = 0.0
        for start in range(0, len(tokens), PREFILL_CHUNK_TOKENS):
            piece = tokens[start : start + PREFILL_CHUNK_TOKENS]
            logits = await self._decoder.forward([Span(piece, kv)], every_position=likelihood)
            if likelihood:
                total += nll(logits, tokens[start + 1 : start + 1 + len(piece)])
        return total, len(tokens) - 1 if likelihood else 0


def nll(logits: F32Array, following: I64Array) -> float:
    """Summed negative log-likelihood of the tokens that follow the first ``len(following)`` positions."""
    total = 0.0
    for start in range(0, len(following), _NLL_ROWS):
        wanted = following[start : start + _NLL_ROWS]
        block = logits[start : start + len(wanted)].astype(np.float64)
        peak = block.max(axis=1)
        spread = np.log(np.exp(block - peak[:, None]).sum(axis=1)) + peak
        total += float((spread - block[np.arange(len(wanted)), wanted]).sum())
    return total


def ffn_biases(weights: Mapping[str, WeightArray], n_layers: int, part: str) -> list[F32Array | None]:
    """Biases of up or gate projections, by layer."""
    names = [f"layers.{i}.ffn.{part}.bias" for i in range(n_layers)]
    return [as_f32(weights[name]) if name in weights else None for name in names]


@asynccontextmanager
async def dense_model(directory: Path, thresholds: tuple[float, ...]) -> AsyncIterator[DenseModel]:
    """The bundle's model, with these thresholds in the place of the manifest's; closed at the end.

    Raises:
        BundleError, DiskReadError: it cannot be opened.
    """
    manifest = open_manifest(directory)
    weights = load_resident(directory, manifest)
    store = await open_store(directory, manifest, verify="auto")
    lane = ComputeLane()
    model = DenseModel(manifest, weights, store, lane, thresholds)
    try:
        yield model
    finally:
        await model.ffn.close()
        await store.close()
        lane.close()
