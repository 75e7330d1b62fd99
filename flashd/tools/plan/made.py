"""Made-up parts of a model's shape: weights, and a predictor that always requests the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from flashd import kernels
from flashd.disk.buffers import HUGE_PAGE_BYTES, aligned_empty
from flashd.layout.safetensors_header import TensorEntry
from flashd.predictor.base import Predictor
from flashd.types import (
    DTYPES,
    NUMPY_DTYPE,
    SAFETENSORS_DTYPE,
    BoolArray,
    DType,
    F32Array,
    I64Array,
    ModelSpec,
    U8Array,
    WeightArray,
)

_TILE = 1 << 18
# A real model's weights have about this spread: sums over thousands stay far from float16's limits.
_SPREAD = 0.05


def filled(nbytes: int, dtype: DType) -> U8Array:
    """Memory full of normally distributed numbers; in huge pages, as weights have it, where it fills any."""
    memory = aligned_empty(nbytes, huge_pages=nbytes >= HUGE_PAGE_BYTES)
    fill(memory, dtype)
    return memory


def fill(memory: U8Array, dtype: DType) -> None:
    """Write normally distributed numbers of a type into ``memory``."""
    values = np.random.default_rng(0).standard_normal(_TILE, np.float32) * np.float32(_SPREAD)
    if dtype == "bf16":
        tile = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    else:
        tile = values.astype(NUMPY_DTYPE[dtype]).view(np.uint8)
    for start in range(0, memory.size, tile.size):
        part = memory[start : start + tile.size]
        part[:] = tile[: part.size]


@dataclass(frozen=True)
class MaskShape:
    """What a masked layer asks for.

    Attributes:
        requested: rows per token.
        fired_share: of these, how many are not zero.
        rank: of the predictor; 0: it computes the gate of every neuron.
        lookahead_rank: of the guess at the next layer; 0: there is none.
    """

    requested: int
    fired_share: float
    rank: int
    lookahead_rank: int


class FixedPredictor(Predictor):
    """Computes what a real predictor does, and requests the same neurons each time.

    Args:
        n_layers, n_neurons, d_model: of the model.
        dtype: of the gate, where the predictor computes it.
        shape: of the masks.

    Attributes:
        ids: requested in every layer.
        seen: the last input.
    """

    name = "fixed"
    nbytes = 0

    def __init__(self, n_layers: int, n_neurons: int, d_model: int, dtype: DType, shape: MaskShape) -> None:
        self.n_layers, self.n_neurons = n_layers, n_neurons
        rng = np.random.default_rng(1)
        self.ids: I64Array = np.sort(rng.choice(n_neurons, shape.requested, replace=False)).astype(np.int64)
        self.seen: F32Array | None = None
        self._mask = np.ones((1, shape.requested), np.bool_)
        self._maps = [
            [_low_rank(rank, n_neurons, d_model) for _ in range(n_layers)] if rank else None
            for rank in (shape.rank, shape.lookahead_rank)
        ]
        self._gates: list[WeightArray] = []
        if not shape.rank:
            gate_bytes = n_neurons * d_model * NUMPY_DTYPE[dtype].itemsize
            gates = filled(n_layers * gate_bytes, dtype).view(NUMPY_DTYPE[dtype])
            self._gates = list(gates.reshape(n_layers, n_neurons, d_model))

    def masked(self, layer: int) -> bool:
        """See ``Predictor.masked``."""
        return layer < self.n_layers

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """See ``Predictor.predict``."""
        self.seen = x
        if self._gates:
            scores = np.empty((len(x), self.n_neurons), np.float32)
            kernels.gemv(self._gates[layer], x, scores)
        else:
            self._compute(0, layer, x)
        return self.ids, self._mask

    def lookahead(self, layer: int, x: F32Array) -> I64Array | None:
        """See ``Predictor.lookahead``."""
        if self._maps[1] is None:
            return None
        self._compute(1, layer, x)
        return self.ids

    def first_guess(self, x: F32Array) -> I64Array | None:
        """See ``Predictor.first_guess``."""
        if self._maps[0] is not None:
            self._compute(0, 0, x)
        return self.ids

    def _compute(self, kind: int, layer: int, x: F32Array) -> None:
        maps = self._maps[kind]
        if maps is not None:
            kernels.predict(*maps[layer], x, float("inf"))


def _low_rank(rank: int, n_neurons: int, d_model: int) -> tuple[WeightArray, WeightArray]:
    sizes = rank * d_model, n_neurons * rank
    memory = filled(2 * sum(sizes), "f16").view(np.float16)
    return memory[: sizes[0]].reshape(rank, d_model), memory[sizes[0] :].reshape(n_neurons, rank)


def made_weights(entries: Mapping[str, TensorEntry], spec: ModelSpec) -> dict[str, WeightArray]:
    """Resident tensors of a smaller model by name: those of the bundle, as far as ``spec`` has layers, words
    and positions."""
    weights: dict[str, WeightArray] = {}
    for name, entry in entries.items():
        parts = name.split(".")
        if parts[0] == "layers" and int(parts[1]) >= spec.n_layers:
            continue
        if name == "head.weight" and spec.tied_head:
            continue
        shape = list(entry.shape)
        if name in ("embed.weight", "head.weight"):
            shape[0] = spec.vocab_size
        elif name == "position.weight":
            shape[0] = spec.max_context
        dtype = _dtype(entry)
        nbytes = prod(shape) * NUMPY_DTYPE[dtype].itemsize
        weights[name] = filled(nbytes, dtype).view(NUMPY_DTYPE[dtype]).reshape(shape)
    return weights


def _dtype(entry: TensorEntry) -> DType:
    return next(dtype for dtype in DTYPES if SAFETENSORS_DTYPE[dtype] == entry.dtype)
