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

    def inference(self) -> AbstractContextManager[Any]:
        """A block without gradients; all calls belong into one."""
        return self._torch.inference_mode()

    def tensor(self, array: WeightArray) -> torch.Tensor:
        """The array's own memory as a tensor; uint16 is bfloat16."""
        if array.dtype == np.uint16:
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def like(self, array: F32Array, weights: WeightArray) -> torch.Tensor:
        """A copy of activations in the weights' type: torch multiplies like with like."""
        return self._torch.from_numpy(array).to(self.tensor(weights).dtype)

    def linear(self, w: WeightArray, x: F32Array) -> Call:
        """``x @ w.T``."""
        linear = self._torch.nn.functional.linear
        weights, inputs = self.tensor(w), self.like(x, w)
        return lambda: linear(inputs, weights)

    def ffn(self, up: WeightArray, gate: WeightArray | None, down: WeightArray, x: F32Array) -> Call:
        """An FFN of dense layers.

        Args:
            up: ``[n, d]``.
            gate: ``[n, d]`` for SiLU of it times up; None for ReLU of up.
            down: ``[d, n]``.
            x: ``[T, d]``.
        """
        functional = self._torch.nn.functional
        inputs, ups, downs = self.like(x, up), self.tensor(up), self.tensor(down)
        if gate is None:
            return lambda: functional.linear(functional.relu(functional.linear(inputs, ups)), downs)
        gates = self.tensor(gate)

        def gated() -> object:
            h = functional.silu(functional.linear(inputs, gates)) * functional.linear(inputs, ups)
            return functional.linear(h, downs)

        return gated

    def attention(self, q: F32Array, k: WeightArray, v: WeightArray, scale: float) -> Call:
        """Causal attention of the last ``T`` of ``length`` positions.

        Args:
            q: ``[T, H, hd]``.
            k, v: ``[n_kv, length, hd]``.
            scale: factor of the scores.
        """
        torch = self._torch
        attend = torch.nn.functional.scaled_dot_product_attention
        tokens, heads, _ = q.shape
        length = k.shape[1]
        queries = self.like(q, k).transpose(0, 1).contiguous()[None]
        keys, values = self.tensor(k)[None], self.tensor(v)[None]
        causal = 1 < tokens == length  # it counts from the first key: right only without a past
        mask = None
        if 1 < tokens < length:
            mask = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        return lambda: attend(
            queries, keys, values, mask, is_causal=causal, scale=scale, enable_gqa=heads != len(k)
        )

    def rmsnorm(self, x: F32Array, weight: F32Array, eps: float) -> Call | None:
        """Over the last axis; None where this torch does not know it."""
        norm = getattr(self._torch.nn.functional, "rms_norm", None)
        if norm is None:
            return None
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
