"""The same work in torch. Only the bench imports it, and only when it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashd.tools.bench.kernels.turns import Call
from flashd.types import F32Array, U8Array, WeightArray

if TYPE_CHECKING:
    import torch

# Weights -> a function that makes them ready for a product, again in each call.
_Ready = Callable[["torch.Tensor"], Callable[[], "torch.Tensor"]]
# Up, gate or None, down -> a call.
MakeFfn = Callable[[WeightArray, WeightArray | None, WeightArray], Call]


_WAIT_POLICY = "OMP_WAIT_POLICY"


class NoTorch(Exception):
    """torch cannot take part; the text says why."""


@contextmanager
def passive_waiting() -> Iterator[None]:
    """A block in which OpenMP, if it is loaded in it, learns that its threads shall not spin while they wait.

    On a busy machine they spin on the CPU that the thread they wait for needs, which makes a call take 30
    times as long; on an idle one spinning saves some microseconds a call.
    """
    before = os.environ.get(_WAIT_POLICY)
    os.environ.setdefault(_WAIT_POLICY, "passive")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WAIT_POLICY]


class Torch:
    """torch with a number of threads, and calls to measure that share the arrays' memory.

    Args:
        threads: of its operations.
        passive: whether they shall not spin while they wait; without effect once torch is imported.

    Attributes:
        version: as it calls itself.
        has_rmsnorm: whether it knows ``rms_norm``, as it does since 2.4.
        has_gqa: whether its attention takes several heads to one of keys and values, as it does since 2.5.

    Raises:
        NoTorch: it is not installed, or cannot be imported.
    """

    def __init__(self, threads: int, *, passive: bool = False) -> None:
        try:
            with passive_waiting() if passive else nullcontext():
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
        self.has_gqa = self._knows_gqa()

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

    def linear(self, x: F32Array, dtype: str) -> list[Callable[[WeightArray], Call]]:
        """What makes ``x @ w.T`` of weights ``w`` of a type, in one or two ways."""
        return [self._linear(inputs, ready) for inputs, ready in self._ways(x, dtype)]

    def _linear(self, inputs: torch.Tensor, ready: _Ready) -> Callable[[WeightArray], Call]:
        linear = self._torch.nn.functional.linear

        def with_weights(w: WeightArray) -> Call:
            weights = ready(self.tensor(w))
            return lambda: linear(inputs, weights())

        return with_weights

    def _ways(self, x: F32Array, dtype: str) -> list[tuple[torch.Tensor, _Ready]]:
        """Inputs and what makes weights ready, in the weights' own type and in float32.

        For several tokens torch's float32 product is often so much faster that it pays to convert the weights
        for each call.
        """
        ways: list[tuple[torch.Tensor, _Ready]] = [(self.like(x, dtype), lambda weights: lambda: weights)]
        if dtype != "f32" and len(x) > 1:
            ways.append((self.tensor(x), self._converted()))
        return ways

    def _converted(self) -> _Ready:
        """Weights of each shape become float32 in memory that is used again and again."""
        targets: dict[tuple[int, ...], torch.Tensor] = {}

        def ready(weights: torch.Tensor) -> Callable[[], torch.Tensor]:
            shape = tuple(weights.shape)
            if shape not in targets:
                targets[shape] = self._torch.empty(shape, dtype=self._torch.float32)
            target = targets[shape]
            return lambda: target.copy_(weights)

        return ready

    def ffn(self, x: F32Array, dtype: str) -> list[MakeFfn]:
        """What makes an FFN of dense layers, in one or two ways.

        Args:
            x: ``[T, d]``.
            dtype: of the weights.

        Returns:
            Functions of ``up`` ``[n, d]``, ``gate`` ``[n, d]`` (SiLU of it times up) or None (ReLU of up),
            and ``down`` ``[d, n]``.
        """
        return [self._ffn(inputs, ready) for inputs, ready in self._ways(x, dtype)]

    def _ffn(self, inputs: torch.Tensor, ready: _Ready) -> MakeFfn:
        functional = self._torch.nn.functional

        def with_weights(up: WeightArray, gate: WeightArray | None, down: WeightArray) -> Call:
            ups, downs = ready(self.tensor(up)), ready(self.tensor(down))
            if gate is None:
                return lambda: functional.linear(functional.relu(functional.linear(inputs, ups())), downs())
            gates = ready(self.tensor(gate))

            def gated() -> object:
                # One after the other: converted weights of a shape share their memory.
                h = functional.silu(functional.linear(inputs, gates()))
                return functional.linear(h * functional.linear(inputs, ups()), downs())

            return gated

        return with_weights

    def attention(
        self, q: F32Array, dtype: str, kv_heads: int, length: int, scale: float
    ) -> list[Callable[[WeightArray, WeightArray], Call]]:
        """What makes causal attention of the last ``T`` of ``length`` positions, in one or two ways.

        Args:
            q: ``[T, H, hd]``.
            dtype: of keys and values.
            kv_heads: heads of keys and values.
            length: of the cache.
            scale: factor of the scores.

        Returns:
            Functions of keys and values, each ``[kv_heads, length, hd]``; what they compute has a
            ``[H, T, hd]`` in it.
        """
        torch = self._torch
        tokens, heads, width = q.shape
        queries = self.like(q, dtype).transpose(0, 1).contiguous()[None]
        # Heads with the same keys as if they were more queries: without a mask all torch needs for one.
        group = heads // kv_heads
        folded = queries.reshape(1, kv_heads, group * tokens, width)
        if tokens == 1:
            return [self._attention(folded, scale=scale)]
        mask = torch.full((tokens, length), -torch.inf).triu(length - tokens + 1).to(queries.dtype)
        options: dict[str, Any] = {"scale": scale}
        if tokens == length:
            options["is_causal"] = True  # it counts from the first key: right only without a past
        else:
            options["attn_mask"] = mask
        if group == 1:
            return [self._attention(queries, **options)]
        ways = [self._attention(folded, attn_mask=mask.repeat(group, 1), scale=scale)]
        if self.has_gqa:
            ways.append(self._attention(queries, **options, enable_gqa=True))
        return ways

    def _attention(self, queries: torch.Tensor, **options: Any) -> Callable[[WeightArray, WeightArray], Call]:
        attend = self._torch.nn.functional.scaled_dot_product_attention

        def with_cache(k: WeightArray, v: WeightArray) -> Call:
            keys, values = self.tensor(k)[None], self.tensor(v)[None]
            return lambda: attend(queries, keys, values, **options)

        return with_cache

    def _knows_gqa(self) -> bool:
        """Whether attention takes ``enable_gqa``; a built-in function has no signature to look at."""
        zeros = self._torch.zeros(1, 1, 1, 8)
        try:
            self._torch.nn.functional.scaled_dot_product_attention(zeros, zeros, zeros, enable_gqa=True)
        except (TypeError, RuntimeError):
            return False
        return True

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
