"""One matrix of neuron rows for all layers. Reads land in free rows, so nothing is ever copied.

The paper keeps a layer's rows together and overwrites an evicted one with the last (LLM in a flash,
section 3.3), because it multiplies by the whole window. Here kernels are given the numbers of the rows
they shall use: an evicted row is a hole that the next read fills. Only shrinking moves rows.
"""

from __future__ import annotations

import numpy as np

from flashd import kernels
from flashd.types import BoolArray, F32Array, I32Array, I64Array, U8Array

FREE = -1
# Rows that are moved at a time when the pool shrinks, so that the copy needs little memory of its own.
_MOVE_ROWS = 256


class RowPool:
    """Rows that belong to nobody or to a neuron; neurons of all layers have one numbering.

    Attributes:
        matrix: ``[capacity, stride_bytes]`` uint8; only the first ``n_rows`` may be used.
        n_rows: usable rows.
        owner: ``[capacity]`` int64, the neuron of each row, or ``FREE``.
        up_bias, gate_bias: ``[capacity]`` float32 by row, or None for a model without.
    """

    def __init__(
        self, matrix: U8Array, n_rows: int, *, up_bias: bool = False, gate_bias: bool = False
    ) -> None:
        """Args:
        matrix: the rows' memory.
        n_rows: how many may be used from the start.
        up_bias, gate_bias: whether the model has biases, which the kernels want by row.
        """
        if not 0 <= n_rows <= len(matrix):
            raise ValueError(f"{n_rows} rows of a matrix of {len(matrix)}")
        self.matrix = matrix
        self.n_rows = n_rows
        self.owner: I64Array = np.full(len(matrix), FREE, np.int64)
        self.up_bias: F32Array | None = np.zeros(len(matrix), np.float32) if up_bias else None
        self.gate_bias: F32Array | None = np.zeros(len(matrix), np.float32) if gate_bias else None
        # A stack: what was given back last, and is still in a cache, goes first.
        self._free: I64Array = np.empty(len(matrix), np.int64)
        self._n_free = 0
        self._find_free()

    @property
    def n_free(self) -> int:
        """Rows that can be taken."""
        return self._n_free

    def take(
        self,
        ids: I64Array,
        most: int,
        row_of: I32Array,
        in_flight: BoolArray,
        first: int = 0,
        guessed: BoolArray | None = None,
    ) -> tuple[I64Array, I64Array]:
        """Free rows for those of some neurons that have none, ascending like these, so that neighbours in the
        file become neighbours in memory where that is possible; see ``kernels.take_rows``.

        Returns:
            Neurons that have got a row, and their rows.

        Raises:
            ValueError: there are not so many (our own bug).
        """
        taken, rows = kernels.take_rows(
            ids, most, first, row_of, in_flight, self.owner, self._free, self._n_free, guessed
        )
        self._n_free -= len(taken)
        return taken, rows

    def evict(
        self,
        n: int,
        row_of: I32Array,
        in_flight: BoolArray,
        last: I32Array,
        step: int,
        value: F32Array | I32Array,
        guessed: BoolArray,
    ) -> tuple[int, int]:
        """Free up to ``n`` rows of a layer, those that are worth least; see ``kernels.evict_rows``.

        Returns:
            How many, and how many of them were guessed.
        """
        gone, were_guessed = kernels.evict_rows(
            row_of, in_flight, last, step, value, guessed, n, self.owner, self._free, self._n_free
        )
        self._n_free += gone
        return gone, were_guessed

    def give_back(self, ids: I64Array, row_of: I32Array) -> None:
        """Free the rows of some neurons, ``[m]`` ascending, which no read may be writing to."""
        kernels.drop_rows(ids, row_of, self.owner, self._free, self._n_free)
        self._n_free += len(ids)

    def resize(self, n_rows: int) -> tuple[I64Array, I64Array]:
        """Change how many rows may be used; rows behind the new end move into holes before it, so no read may
        be in flight.

        Returns:
            Neurons that have moved, and their new rows.

        Raises:
            ValueError: more rows than the matrix has or fewer than are in use.
        """
        n_used = self.n_rows - self._n_free
        if not n_used <= n_rows <= len(self.matrix):
            raise ValueError(f"{n_rows} rows, expected {n_used} (in use) to {len(self.matrix)}")
        source = np.flatnonzero(self.owner[n_rows:] != FREE) + n_rows
        dest = np.flatnonzero(self.owner[:n_rows] == FREE)[: len(source)]
        columns = (self.matrix, self.owner, self.up_bias, self.gate_bias)
        for start in range(0, len(source), _MOVE_ROWS):
            some = slice(start, start + _MOVE_ROWS)
            for column in columns:
                if column is not None:
                    column[dest[some]] = column[source[some]]
        self.owner[source] = FREE
        self.n_rows = n_rows
        self._find_free()
        return self.owner[dest], dest

    def _find_free(self) -> None:
        rows = np.flatnonzero(self.owner[: self.n_rows] == FREE)[::-1]
        self._free[: len(rows)] = rows
        self._n_free = len(rows)

    def check_integrity(self) -> None:
        """``AssertionError`` unless every row is either free or owned, and counted so."""
        free = self._free[: self._n_free]
        assert len(np.unique(free)) == len(free), "a row is free twice"
        owned = np.flatnonzero(self.owner != FREE)
        assert np.array_equal(np.sort(np.concatenate([free, owned])), np.arange(self.n_rows)), (
            "rows are lost, or both free and in use"
        )
        assert len(np.unique(self.owner[owned])) == len(owned), "a neuron has two rows"
