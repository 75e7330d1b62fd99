"""What a model family says about a checkpoint: the model's shape and where each tensor comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, Literal

import numpy as np

from flashd.errors import ConversionError
from flashd.types import Activation, F32Array, ModelSpec, WeightArray

# Source tensor name -> shape. A family looks here to tell prefixes and optional tensors.
TensorShapes = Mapping[str, tuple[int, ...]]

# Several times what the largest models have. Buffers are made in proportion to these sizes, which
# are only numbers in a file; vocabulary and context are streamed and need no limit but an int's.
MAX_LAYERS = 10_000
MAX_WIDTH = 1 << 18
MAX_FFN = 1 << 21
MAX_HEADS = 1 << 14
MAX_HEAD_SIZE = 1 << 14
MAX_SIZE = (1 << 31) - 1
# Weights are computed with in float32: what it rounds to zero or infinity is no such number.
_MIN_NUMBER = float(np.finfo(np.float32).tiny)
_MAX_NUMBER = float(np.finfo(np.float32).max)

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = 2

# Hugging Face's names of activation functions that flashd's kernels compute. gelu_new and
# gelu_fast are the tanh approximation written in other words.
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class TensorRule:
    """How one resident tensor of the bundle is made.

    Attributes:
        name: canonical name in ``resident.safetensors``.
        shape: shape the source tensor must have.
        kind: a matrix is stored in the bundle's dtype, a vector always as float32.
        sources: names in the checkpoint, the first that exists counts.
        skip_rows: leading rows of the source that the bundle drops.
        transform: applied to blocks of ``block_rows`` whole rows; keeps the block's shape.
        block_rows: a block handed to ``transform`` is a multiple of this.
        values: the tensor itself, when it comes from the configuration and not from a source.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["matrix", "vector"]
    sources: tuple[str, ...] = ()
    skip_rows: int = 0
    transform: Callable[[WeightArray], WeightArray] | None = None
    block_rows: int = 1
    values: F32Array | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape in the bundle."""
        return (self.shape[0] - self.skip_rows, *self.shape[1:])


@dataclass(frozen=True)
class FFNNames:
    """Source names of one layer's FFN matrices: up and gate ``[d_ffn, d]``, down ``[d, d_ffn]``."""

    up: str
    down: str
    gate: str | None = None


@dataclass(frozen=True)
class CheckpointPlan:
    """A model's shape, the rules of its resident tensors in file order, its FFN layers."""

    spec: ModelSpec
    rules: tuple[TensorRule, ...]
    ffn: tuple[FFNNames, ...]


@dataclass(frozen=True)
class Family:
    """One row of the registry: which checkpoints it understands and how to read them."""

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    from_hf: Callable[[Config, TensorShapes], CheckpointPlan]
    from_gguf: Callable[[Config, TensorShapes], CheckpointPlan] | None = None


class Config:
    """A checkpoint's configuration, read with types. ``null`` counts as absent.

    Args:
        values: the parsed ``config.json``, or a GGUF file's metadata.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A positive whole number up to ``most``."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(key, value, "a positive whole number")
        if value > most:
            raise self._wrong(key, value, f"at most {most}")
        return value

    def number(self, key: str, default: float | None = None, most: float = _MAX_NUMBER) -> float:
        """A positive number that float32 holds, up to ``most``."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(key, value, "a positive number")
        if not _MIN_NUMBER <= value <= most:
            raise self._wrong(key, value, f"a number from {_MIN_NUMBER:.3g} to {most:.3g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """A nested object; empty if absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def layers(self, key: str) -> int:
        """A number of layers that a real model can have."""
        return self.integer(key, most=MAX_LAYERS)

    def activation(self, key: str, default: str) -> Activation:
        """An activation function by Hugging Face's name."""
        name = self.text(key, default)
        if name not in ACTIVATIONS:
            raise self.refused(f"activation {shown(name)}", f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def refused(self, what: str, expected: str) -> ConversionError:
        """The error for a model that flashd doesn't run."""
        return ConversionError(
            f"{self.where}: {what} is not supported, expected {expected}; convert another model"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: Any, expected: str) -> ConversionError:
        got = "missing" if value is None else shown(value)
        return ConversionError(
            f"{self.where}: {key} is {got}, expected {expected}; download the file again or correct it"
        )


def shown(value: object) -> str:
    """A value from a file for a message: one short line, however large or nested it is."""
    return _SHORT.repr(value)


def find_prefix(shapes: TensorShapes, candidates: tuple[str, ...], suffix: str) -> str:
    """The prefix under which a checkpoint keeps its tensors; the first candidate if none fits
    (the missing tensor is then reported by its usual name)."""
    return next((prefix for prefix in candidates if prefix + suffix in shapes), candidates[0])
