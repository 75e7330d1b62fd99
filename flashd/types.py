"""Words shared by all rooms: the model's shape, weight dtypes, and the protocols that keep
the rooms acyclic (``FFNSource`` and ``KVCache``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

F32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
U8Array = npt.NDArray[np.uint8]
U32Array = npt.NDArray[np.uint32]
I32Array = npt.NDArray[np.int32]
I64Array = npt.NDArray[np.int64]
# float32, float16, or uint16 holding bfloat16 bits: NumPy has no bfloat16 of its own.
WeightArray = npt.NDArray[Any]

DType = Literal["f32", "f16", "bf16"]
Activation = Literal["relu", "relu2", "silu", "gelu", "gelu_tanh"]
StoreKind = Literal["file", "zarr"]

DTYPES: tuple[DType, ...] = ("f32", "f16", "bf16")
NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
SAFETENSORS_DTYPE: dict[str, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


@dataclass(frozen=True)
class ModelSpec:
    """Everything the decoder needs to know about a model besides its weights.

    A family (``models/families``) fills it from a checkpoint's own configuration; the bundle's
    manifest stores it. Sizes are in elements.
    """

    family: str
    vocab_size: int
    d_model: int
    d_embed: int  # differs from d_model only with project_in/project_out (OPT-350m)
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ffn: int
    max_context: int
    activation: Activation
    gated: bool
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    norm_first: bool  # False: post-norm, as OPT-350m
    final_norm: bool
    rope: bool  # False: learned positions
    tied_head: bool


@dataclass(frozen=True)
class TokenizerSpec:
    """What the tokenizer file itself does not say.

    Attributes:
        bos_id: beginning-of-sequence token, if the model has one.
        eos_ids: tokens that end a generation (a chat model may have several).
        add_bos: whether a plain prompt gets ``bos_id`` in front.
        chat_template: Jinja source, if the model is a chat model.
        bos_token, eos_token: texts of the special tokens, for chat templates that use them.
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""


@dataclass(frozen=True)
class FFNGeometry:
    """Where the FFN neurons of a bundle lie. Row = ``[up | gate (gated) | down]``, padded.

    ``stride_bytes`` is the distance between two neurons' rows; every layer starts on 4096.
    """

    n_layers: int
    n_neurons: int
    d_model: int
    gated: bool
    dtype: DType
    stride_bytes: int

    @property
    def row_elements(self) -> int:
        """Elements of one neuron's bundle, without padding."""
        return (3 if self.gated else 2) * self.d_model

    @property
    def row_bytes(self) -> int:
        """Bytes of one neuron's bundle, without padding."""
        return self.row_elements * NUMPY_DTYPE[self.dtype].itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's rows, padding included."""
        return self.n_neurons * self.stride_bytes


class FFNSource(Protocol):
    """The models' view of FFN weights, wherever they are."""

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """Run one layer's FFN, without the down projection's bias.

        What comes before and after it runs on the compute lane in the same call as the FFN's own first
        and last piece of work: every change of thread costs some 50 us, and there are two a layer.

        Args:
            layer: layer index; within a step layers come in ascending order.
            x: called once, on the lane: makes the normed FFN input ``[tokens, d_model]``, which is
                not modified.

        Returns:
            To be called on the lane before the source is asked for the next layer, or dropped: gives
            ``[tokens, d_model]``, owned by the caller.
        """
        ...


@runtime_checkable
class LaneFFNSource(FFNSource, Protocol):
    """An ``FFNSource`` that can do without the event loop, which then is entered once a step instead of
    once a layer."""

    def on_lane(self, layer: int, n_tokens: int) -> bool:
        """Whether ``apply_on_lane`` can be used for so many tokens."""
        ...

    def begin_step(self, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop) -> None:
        """The first layer begins, which nothing is known of so far; called on the lane before its attention.

        Args:
            x: makes what its FFN input would be if its attention gave nothing, ``[tokens, d_model]``.
            loop: the store's, running in another thread.
        """
        ...

    def apply_on_lane(
        self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop
    ) -> Callable[[], F32Array]:
        """``apply``, called on the lane, which waits for reads by itself.

        Args:
            layer: layer index.
            x: as for ``apply``.
            loop: the store's, running in another thread.
        """
        ...


class KVCache(Protocol):
    """Keys and values of one sequence."""

    @property
    def length(self) -> int:
        """Tokens held, the same for every layer between steps."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes reserved for this sequence."""
        ...

    def append(self, layer: int, k: F32Array, v: F32Array) -> None:
        """Add ``[tokens, n_kv_heads, d_head]`` at the end of one layer (keys already rotated)."""
        ...

    def view(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Keys and values so far, each ``[n_kv_heads, capacity, d_head]``; only the first
        ``length`` (plus what this step appended) along axis 1 are valid."""
        ...

    def commit(self, n_tokens: int) -> None:
        """All layers have appended ``n_tokens``: they count from now on."""
        ...
