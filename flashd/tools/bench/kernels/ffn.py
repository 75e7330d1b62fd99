"""The case of the fused sparse FFN: ``ffn_dots`` and ``ffn_down``, as the daemon calls them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt

from flashd import kernels
from flashd.tools.bench.kernels.cases import MANY, Case, normal, weights
from flashd.tools.bench.kernels.turns import Call
from flashd.tools.bench.kernels.with_torch import MakeFfn, Torch
from flashd.types import NUMPY_DTYPE, Activation, DType, U8Array


class FfnRows(Case):
    """Some of a window's rows, or all of a layer's for a prompt.

    Args:
        dtype: of the weights.
        batch: sequences, or more than 16 tokens of a prompt.
        n: rows of the window.
        d: width of the model.
        gated: rows ``[up | gate | down]`` with SiLU, else ``[up | down]`` with ReLU.
        share: of the rows that are listed, at random and ascending. Each time that a piece of memory comes
            round again, its call lists rows that it did not list before, as long as there are such: what
            was listed last time may still be in the caches.
    """

    def __init__(self, dtype: DType, batch: int, n: int, d: int, gated: bool, share: float) -> None:
        self._vectors = 3 if gated else 2
        self._row_bytes = d * NUMPY_DTYPE[dtype].itemsize
        listed = round(n * share)
        prompt = batch > MANY
        super().__init__(
            "ffn_rows",
            dtype,
            batch,
            f"{n}x{d} {'gated' if gated else 'relu'} {share:.0%}",
            n * self._vectors * self._row_bytes,
            compute_bound=prompt,
            flops=2.0 * self._vectors * listed * d * batch,
        )
        self._kind, self._sequences, self._n, self._d, self._gated = dtype, batch, n, d, gated
        self._activation: Activation = "silu" if gated else "relu"
        self._listed = listed
        rows = np.random.default_rng(2).permutation(n)
        # A prompt takes whole windows, without a list.
        self._lists: list[npt.NDArray[np.int64] | None] = (
            [None] if prompt else [np.sort(rows[i : i + listed]) for i in range(0, n - listed + 1, listed)]
        )

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        self._x = normal(self._sequences, self._d)
        self._h = np.empty((self._sequences, self._listed), np.float32)
        self._acc = np.zeros((self._sequences, self._d), np.float32)

    def _dots(self, rows: U8Array, index: npt.NDArray[np.int64] | None) -> int:
        """Compute ``h``; returns how many rows fired."""
        fired = kernels.ffn_dots(
            rows, self._kind, self._d, self._gated, self._activation, self._x, self._h, index=index
        )
        return len(fired)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        rows = memory.reshape(self._n, -1)
        lists = cycle(self._lists)

        def both() -> None:
            index = next(lists)
            self._dots(rows, index)
            self._acc.fill(0)
            kernels.ffn_down(rows, self._kind, self._d, self._gated, self._h, self._acc, index)

        return both

    def counted(self, memory: U8Array) -> tuple[float, float]:
        """See ``Case``: up and gate of the listed rows, down of those that fire; means of the lists.

        A sequence leaves out the rows that did not fire for it; a prompt's tokens share their rows.
        """
        rows = memory.reshape(self._n, -1)
        read = products = 0
        for index in self._lists:
            fired = self._dots(rows, index)
            read += fired
            products += fired * self._sequences if self.compute_bound else int(np.count_nonzero(self._h))
        before_down = (self._vectors - 1) * self._listed
        vectors = before_down + read / len(self._lists)
        all_products = before_down * self._sequences + products / len(self._lists)
        return vectors * self._row_bytes, 2.0 * self._d * all_products

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[list[Call]]:
        """See ``Case``: dense layers over the same memory, so only where all rows are listed."""
        if self._listed < self._n:
            return []
        return [[self._with(make, part) for part in parts] for make in torch.ffn(self._x, self._kind)]

    def _with(self, make: MakeFfn, memory: U8Array) -> Call:
        size = self._n * self._row_bytes
        up, *gate, down = (
            weights(memory[i * size :], self._kind, self._n, self._d) for i in range(self._vectors)
        )
        return make(up, gate[0] if gate else None, down.reshape(self._d, self._n))
