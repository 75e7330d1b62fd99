"""The case of the fused sparse FFN: ``ffn_dots`` and ``ffn_down``, as the daemon calls them in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashd import kernels
from flashd.tools.bench.kernels.cases import Call, Case, normal, weights
from flashd.tools.bench.kernels.with_torch import Torch
from flashd.types import NUMPY_DTYPE, Activation, DType, U8Array


class FfnRows(Case):
    """Some of a window's rows, or all of a layer's for a prompt.

    Args:
        dtype: of the weights.
        batch: sequences, or more than 16 tokens of a prompt.
        n: rows of the window.
        d: width of the model.
        gated: rows ``[up | gate | down]`` with SiLU, else ``[up | down]`` with ReLU.
        share: of the rows that are listed, at random and ascending.
    """

    def __init__(self, dtype: DType, batch: int, n: int, d: int, gated: bool, share: float) -> None:
        self._vectors = 3 if gated else 2
        self._row_bytes = d * NUMPY_DTYPE[dtype].itemsize
        listed = round(n * share)
        prompt = batch > 16
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
        # A prompt takes whole windows, without a list.
        chosen = np.sort(np.random.default_rng(2).permutation(n)[:listed])
        self._index = None if prompt else chosen

    def start(self, memory: U8Array) -> None:
        """See ``Case``."""
        del memory
        self._x = normal(self._sequences, self._d)
        self._h = np.empty((self._sequences, self._listed), np.float32)
        self._acc = np.zeros((self._sequences, self._d), np.float32)

    def _dots(self, rows: U8Array) -> int:
        """Compute ``h``; returns how many rows fired."""
        fired = kernels.ffn_dots(
            rows, self._kind, self._d, self._gated, self._activation, self._x, self._h, index=self._index
        )
        return len(fired)

    def ours(self, memory: U8Array) -> Call:
        """See ``Case``."""
        rows = memory.reshape(self._n, -1)

        def both() -> None:
            self._dots(rows)
            self._acc.fill(0)
            kernels.ffn_down(rows, self._kind, self._d, self._gated, self._h, self._acc, self._index)

        return both

    def counted_bytes(self, memory: U8Array) -> int:
        """See ``Case``: up and gate of the listed rows, down of those that fire."""
        fired = self._dots(memory.reshape(self._n, -1))
        return ((self._vectors - 1) * self._listed + fired) * self._row_bytes

    def torch(self, torch: Torch, parts: Sequence[U8Array]) -> list[Call] | None:
        """See ``Case``: dense layers over the same memory, so only where all rows are listed."""
        if self._listed < self._n:
            return None
        make = torch.ffn(self._x, self._kind)
        size = self._n * self._row_bytes
        calls = []
        for part in parts:
            up, *gate, down = (
                weights(part[i * size :], self._kind, self._n, self._d) for i in range(self._vectors)
            )
            calls.append(make(up, gate[0] if gate else None, down.reshape(self._d, self._n)))
        return calls
