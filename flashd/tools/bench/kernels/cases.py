"""The cases of ``flashd bench kernels``: how each verb is called on a piece of cold memory.

A call's results go to arrays that are used again and again and so stay in the caches, as a decoder's
activations do. Sizes are those of models of 1 to 7 billion parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flashd import kernels
from flashd.tools.bench.kernels.turns import Call
from flashd.tools.bench.kernels.with_torch import NoTorch, Torch
from flashd.types import NUMPY_DTYPE, F32Array, U8Array, WeightArray

EPS = 1e-5
# Sequences from which a product has as much to compute as to read.
MANY = 16


class Case(ABC):
    """A verb on weights of one type and shape.

    Args:
        verb: one of ``VERBS``.
        dtype: of what is read.
        batch: sequences, or tokens of a prompt; None where there are none.
        shape: in words.
        nbytes: memory of one call.
        compute_bound: whether arithmetic is its limit.
        flops: of a call that leaves nothing out; None where they are not what it is about.
    """

    def __init__(
        self,
        verb: str,
        dtype: str,
        batch: int | None,
        shape: str,
        nbytes: int,
        *,
        compute_bound: bool = False,
        flops: float | None = None,
    ) -> None:
        self.verb = verb
        self.dtype = dtype
        self.batch = batch
        self.shape = shape
        self.nbytes = nbytes
        self.compute_bound = compute_bound
        self.flops = flops

    def start(self, memory: U8Array) -> None:
        """Make the arrays that all calls share; ``memory`` is a piece to try something on."""
        del memory

    @abstractmethod
    def ours(self, memory: U8Array) -> Call:
        """The verb's call on a piece of cold memory."""

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """The same with torch, in as many ways as there are, each a call for each piece.

        Raises:
            NoTorch: this torch cannot; later ones can.
        """
        del torch, parts
        return []

    def counted(self, memory: U8Array) -> tuple[float, float | None]:
        """Bytes of the piece that a call must read once, and its floating-point operations."""
        del memory
        return self.nbytes, self.flops

    @property
    def beside_product(self) -> bool:
        """Whether it is worth a look beside a matrix product of as many threads."""
        return self.flops is not None and (self.compute_bound or (self.batch or 0) >= MANY)

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        return f"{self.verb} {self.dtype}{batch}, {self.shape}"


def normal(*shape: int) -> F32Array:
    """Activations: the same numbers every time."""
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def weights(memory: U8Array, dtype: str, *shape: int) -> WeightArray:
    """A piece of memory as weights; what is left of it stays out."""
    return memory[: np.prod(shape) * NUMPY_DTYPE[dtype].itemsize].view(NUMPY_DTYPE[dtype]).reshape(shape)


class ReadAll(Case):
    """Plain memory: the yardstick measured against itself, which shows how much the figures vary."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("read_all", "u8", None, f"{nbytes >> 20} MiB", nbytes)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        return lambda: kernels.read_all(memory)

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """See ``Case``."""
        return [[torch.read(part) for part in parts]]


class Gemv(Case):
    """A dense layer: ``gemv`` for a few sequences, ``gemm`` for a prompt."""

    def __init__(self, dtype: str, batch: int, n: int, k: int) -> None:
        prompt = batch > MANY
        nbytes = n * k * NUMPY_DTYPE[dtype].itemsize
        super().__init__(
            "gemm" if prompt else "gemv",
            dtype,
            batch,
            f"{n}x{k}",
            nbytes,
            compute_bound=prompt,
            flops=2.0 * n * k * batch,
        )
        self._n, self._k = n, k

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        assert self.batch is not None
        self._x = normal(self.batch, self._k)
        self._out = np.empty((self.batch, self._n), np.float32)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        verb = kernels.gemm if self.compute_bound else kernels.gemv
        w, x, out = weights(memory, self.dtype, self._n, self._k), self._x, self._out
        return lambda: verb(w, x, out)

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """See ``Case``."""
        ways = torch.linear(self._x, self.dtype)
        return [[make(weights(part, self.dtype, self._n, self._k)) for part in parts] for make in ways]


class Predict(Case):
    """The low-rank predictor, a tenth of the neurons active."""

    def __init__(self, dtype: str, batch: int, n: int, d: int, rank: int) -> None:
        self._first = rank * d * NUMPY_DTYPE[dtype].itemsize
        nbytes = self._first + n * rank * NUMPY_DTYPE[dtype].itemsize
        flops = 2.0 * (rank * d + n * rank) * batch
        super().__init__("predict", dtype, batch, f"{n}x{rank}x{d}", nbytes, flops=flops)
        self._n, self._d, self._rank = n, d, rank

    def _both(self, memory: U8Array) -> tuple[WeightArray, WeightArray]:
        first = weights(memory, self.dtype, self._rank, self._d)
        return first, weights(memory[self._first :], self.dtype, self._n, self._rank)

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        assert self.batch is not None
        self._x = normal(self.batch, self._d)
        scores = np.empty((self.batch, self._n), np.float32)
        kernels.predict(*self._both(memory), self._x, 0.0, scores=scores)
        self._threshold = float(np.quantile(scores, 0.9))

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        w1, w2 = self._both(memory)
        return lambda: kernels.predict(w1, w2, self._x, self._threshold)


class TopK(Case):
    """The highest tenth of each sequence's scores."""

    def __init__(self, batch: int, n: int) -> None:
        super().__init__("topk_union", "f32", batch, f"{n // 10} of {n}", batch * n * 4)
        self._n = n

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        assert self.batch is not None
        scores = weights(memory, "f32", self.batch, self._n)
        return lambda: kernels.topk_union(scores, self._n // 10)


class Attention(Case):
    """One query, or a prompt's, over keys and values."""

    WIDTH = 128

    def __init__(self, dtype: str, tokens: int, heads: int, kv_heads: int, length: int) -> None:
        nbytes = 2 * kv_heads * length * self.WIDTH * NUMPY_DTYPE[dtype].itemsize
        # Query t of a prompt attends to length - tokens + 1 + t positions.
        scores = heads * (tokens * (length - tokens) + tokens * (tokens + 1) / 2)
        super().__init__(
            "attention",
            dtype,
            tokens,
            f"{heads}/{kv_heads}x{self.WIDTH} of {length}",
            nbytes,
            compute_bound=tokens > MANY,
            flops=4.0 * self.WIDTH * scores,
        )
        self._heads, self._kv_heads, self._length = heads, kv_heads, length
        self._scale = self.WIDTH**-0.5

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        assert self.batch is not None
        self._q = normal(self.batch, self._heads, self.WIDTH)
        self._out = np.empty_like(self._q)

    def _keys_values(self, memory: U8Array) -> tuple[WeightArray, WeightArray]:
        k, v = weights(memory, self.dtype, 2, self._kv_heads, self._length, self.WIDTH)
        return k, v

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        k, v = self._keys_values(memory)
        return lambda: kernels.attention(self._q, k, v, self._length, self._scale, self._out)

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """See ``Case``."""
        ways = torch.attention(self._q, self.dtype, self._kv_heads, self._length, self._scale)
        return [[make(*self._keys_values(part)) for part in parts] for make in ways]


class Norm(Case):
    """``rmsnorm`` or ``layernorm`` of a prompt's chunk."""

    def __init__(self, verb: str, tokens: int, d: int) -> None:
        super().__init__(verb, "f32", tokens, f"{tokens}x{d}", tokens * d * 4)
        self._tokens, self._d = tokens, d

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        self._weight, self._bias = normal(2, self._d)
        self._out = np.empty((self._tokens, self._d), np.float32)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        x = weights(memory, "f32", self._tokens, self._d)
        if self.verb == "rmsnorm":
            return lambda: kernels.rmsnorm(x, self._weight, EPS, self._out)
        return lambda: kernels.layernorm(x, self._weight, self._bias, EPS, self._out)

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """See ``Case``."""
        all_x = [weights(part, "f32", self._tokens, self._d) for part in parts]
        if self.verb == "layernorm":
            return [[torch.layernorm(x, self._weight, self._bias, EPS) for x in all_x]]
        if not torch.has_rmsnorm:
            raise NoTorch(f"torch {torch.version} has no rms_norm, 2.4 and later have")
        return [[torch.rmsnorm(x, self._weight, EPS) for x in all_x]]


class Rope(Case):
    """Rotary positions of a prompt's chunk, in place: what is written back is not counted."""

    WIDTH = 128

    def __init__(self, tokens: int, heads: int) -> None:
        super().__init__("rope", "f32", tokens, f"{heads}x{self.WIDTH}", tokens * heads * self.WIDTH * 4)
        self._tokens, self._heads = tokens, heads

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        angles = normal(self._tokens, self.WIDTH // 2)
        self._cos, self._sin = np.cos(angles), np.sin(angles)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        x = weights(memory, "f32", self._tokens, self._heads, self.WIDTH)
        return lambda: kernels.rope(x, self._cos, self._sin)


class Checksums(Case):
    """CRC32C of bundle rows."""

    def __init__(self, n: int, stride_bytes: int) -> None:
        super().__init__("crc32c", "u8", None, f"{n}x{stride_bytes}", n * stride_bytes)
        self._rows = n
        self._out = np.empty(n, np.uint32)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        rows = memory.reshape(self._rows, -1)
        return lambda: kernels.crc32c(rows, self._out)


class Convert(Case):
    """Between float32 and a weight type; ``dtype`` is the latter, in both directions."""

    def __init__(self, verb: str, dtype: str, elements: int) -> None:
        self._types = (dtype, "f32") if verb == "to_f32" else ("f32", dtype)
        super().__init__(verb, dtype, None, str(elements), elements * NUMPY_DTYPE[self._types[0]].itemsize)
        self._elements = elements

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        self._out: npt.NDArray[Any] = np.empty(self._elements, NUMPY_DTYPE[self._types[1]])

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        src = weights(memory, self._types[0], self._elements)
        verb = kernels.to_f32 if self.verb == "to_f32" else kernels.from_f32
        return lambda: verb(src, self._out)

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """See ``Case``."""
        return [[torch.convert(weights(part, self._types[0], self._elements), self._out) for part in parts]]
