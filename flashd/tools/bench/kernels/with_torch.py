"""The same work in torch. Only the bench imports it, and only when it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashd.types import F32Array, U8Array, WeightArray

if TYPE_CHECKING:
    import torch

Call = Callable[[], object]


class NoTorch(Exception):
    """torch cannot take part; the text says why."""


class Torch:
    """torch with a number of threads, and calls to measure that share the arrays' memory.

    Args:
        threads: of its operations.

    Attributes:
        version: as it calls itself.
        has_rmsnorm: whether it knows ``rms_norm``, as it does since 2.4.

    Raises:
        NoTorch: it is not installed, or cannot be imported.
    """

    def __init__(self, threads: int) -> None:
        try:
            import torch
        except ImportError as exc:
            missing = isinstance(exc, ModuleNotFoundError) and exc.name == "torch"
            raise NoTorch("it is not installed" if missing else f"it cannot be imported: {exc}") from exc
        except OSError as exc:  # a library of its own
            raise NoTorch(f"it cannot be imported: {exc}") from exc
        torch.set_num_threads(threads)
        self._torch = torch
        self.version = str(torch.__version__)
        self.has_rmsnorm = hasattr(torch.nn.functional, "rms_norm")

    def inference(self) -> AbstractContextManager[Any]:
        """A block without gradients; all calls belong into one."""
        return self._torch.inference_mode()

    def tensor(self, array: WeightArray) -> torch.Tensor:
        """The array's own memory as a tensor; uint16 is bfloat16."""
        if array.dtype == np.uint16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        tensor: torch.Tensor = self._torch.from_numpy(array)
        return tensor

    def like(self, array: F32Array, dtype: str) -> torch.Tensor:
        """A copy of activations in the weights' type: torch multiplies like with like."""
        torch = self._torch
        types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        return self.tensor(array).to(types[dtype])

    def linear(self, x: F32Array, dtype: str) -> Callable[[WeightArray], Call]:
        """What makes ``x @ w.T`` of weights ``w`` of a type."""
        linear = self._torch.nn.functional.linear
        inputs = self.like(x, dtype)

        def with_weights(w: WeightArray) -> Call:
            weights = self.tensor(w)
            return lambda: linear(inputs, weights)

        return with_weights

    def ffn(self, x: F32Array, dtype: str) -> Callable[[WeightArray, WeightArray | None, WeightArray], Call]:
        """What makes an FFN of dense layers.

        Args:
            x: ``[T, d]``.
            dtype: of the weights.

        Returns:
            A function of ``up`` ``[n, d]``, ``gate`` ``[n, d]`` (SiLU of it times up) or None (ReLU of up),
            and ``down`` ``[d, n]``.
        """
        functional = self._torch.nn.functional
        inputs = self.like(x, dtype)

        def with_weights(up: WeightArray, gate: WeightArray | None, down: WeightArray) -> Call:
            ups, downs = self.tensor(up), self.tensor(down)
            if gate is None:
                return lambda: functional.linear(functional.relu(functional.linear(inputs, ups)), downs)
            gates = self.tensor(gate)

            def gated() -> object:
                h = functional.silu(functional.linear(inputs, gates)) * functional.linear(inputs, ups)
                return functional.linear(h, downs)

            return gated

        return with_weights

    def attention(
        self, q: F32Array, dtype: str, length: int, scale: float
    ) -> Callable[[WeightArray, WeightArray], Call]:
        """What makes causal attention of the last ``T`` of ``length`` positions.

        Args:
            q: ``[T, H, hd]``.
            dtype: of keys and values.
            length: of the cache.
            scale: factor of the scores.

        Returns:
            A function of keys and values, each ``[n_kv, length, hd]``.
        """
        torch = self._torch
        attend = torch.nn.functional.scaled_dot_product_attention
        tokens, heads, _ = q.shape
        queries = self.like(q, dtype).transpose(0, 1).contiguous()[None]
        causal = 1 < tokens == length  # it counts from the first key: right only without a past
        mask = None
        if 1 < tokens < length:
            mask = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)

        def with_cache(k: WeightArray, v: WeightArray) -> Call:
            keys, values = self.tensor(k)[None], self.tensor(v)[None]
            gqa = heads != len(k)
            return lambda: attend(queries, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=gqa)

        return with_cache

    def rmsnorm(self, x: F32Array, weight: F32Array, eps: float) -> Call:
        """Over the last axis, where ``has_rmsnorm``."""
        norm = self._torch.nn.functional.rms_norm
        inputs, weights = self.tensor(x), self.tensor(weight)
        return lambda: norm(inputs, weights.shape, weights, eps)

    def layernorm(self, x: F32Array, weight: F32Array, bias: F32Array, eps: float) -> Call:
        """Over the last axis."""
        norm = self._torch.nn.functional.layer_norm
        inputs, weights, biases = self.tensor(x), self.tensor(weight), self.tensor(bias)
        return lambda: norm(inputs, weights.shape, weights, biases, eps)

    def convert(self, src: WeightArray, out: WeightArray) -> Call:
        """From one type into another, into memory that is there already."""
        source, target = self.tensor(src), self.tensor(out)
        return lambda: target.copy_(source)

    def read(self, memory: U8Array) -> Call:
        """Sum of 64-bit words: its fastest way to look at every byte."""
        words = self._torch.from_numpy(memory.view(np.int64))
        return words.sum

    def matmul(self, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> Call:
        """``a @ b``."""
        left, right = self.tensor(a), self.tensor(b)
        return lambda: self._torch.matmul(left, right)
