"""Which neurons are in RAM, layer by layer (the sliding window of LLM in a flash, sections 3.1, 3.3).

::

    request(ids) -> rows, -1 where missing     all of them count as requested now
    make_room, insert(missing) -> rows         in flight until settled, or dropped if the read failed
    trim                                       back to the layer's capacity

All layers share the rows of one pool. A layer may go over its capacity for as long as it is being
computed; what it took is given back by ``trim``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flashd.memory.eviction import EvictionPolicy
from flashd.memory.pool import RowPool
from flashd.types import BoolArray, F32Array, I64Array

MISSING = -1
_NEVER = -(1 << 30)


class Window:
    """Rows by layer and neuron. Used from one thread.

    Attributes:
        pool: the rows.
        capacity: rows that each layer may keep.
        used: rows that each layer has, those in flight included.
        n_in_flight: rows of each layer that are in flight.
        row_of: ``[n_layers, n_neurons]`` int64, or ``MISSING``.
        step: of the last request.
        evicted: rows that have gone so far.
    """

    def __init__(
        self,
        pool: RowPool,
        n_layers: int,
        n_neurons: int,
        capacity: Sequence[int],
        policy: EvictionPolicy,
        up_bias: Sequence[F32Array | None] = (),
        gate_bias: Sequence[F32Array | None] = (),
    ) -> None:
        """Args:
        pool: where rows come from; nobody else takes any.
        n_layers: of the model.
        n_neurons: of a layer.
        capacity: rows that each layer may keep, ``[n_layers]``.
        policy: what goes first.
        up_bias, gate_bias: per layer ``[n_neurons]`` or None.
        """
        self.pool = pool
        self.policy = policy
        self.capacity = [min(rows, n_neurons) for rows in capacity]
        self.used = [0] * n_layers
        self.n_in_flight = [0] * n_layers
        self.row_of: I64Array = np.full((n_layers, n_neurons), MISSING, np.int64)
        self.step = 0
        self._n_neurons = n_neurons
        self.evicted = 0
        self._last: npt.NDArray[np.int32] = np.full((n_layers, n_neurons), _NEVER, np.int32)
        # Rows that only a guess has asked for.
        self._guessed: BoolArray = np.zeros((n_layers, n_neurons), np.bool_)
        self._n_guessed = [0] * n_layers
        self._up_bias = list(up_bias) or [None] * n_layers
        self._gate_bias = list(gate_bias) or [None] * n_layers

    def request(self, layer: int, ids: I64Array, step: int) -> tuple[I64Array, int]:
        """Count neurons as requested at a step.

        Args:
            layer: layer index.
            ids: ``[m]``, all different.
            step: never less than before.

        Returns:
            Their rows, ``[m]``, ``MISSING`` where there is none; how many of these rows were there by a
            guess that nobody had used so far.
        """
        self.step = step
        self._last[layer][ids] = step
        self.policy.requested(layer, ids, step)
        used = 0
        if self._n_guessed[layer]:
            guessed = self._guessed[layer]
            used = int(np.count_nonzero(guessed[ids]))
            guessed[ids] = False
            self._n_guessed[layer] -= used
        return self.row_of[layer][ids], used

    def remember(self, layer: int, tail: BoolArray, step: int) -> tuple[I64Array, I64Array]:
        """Count what a prompt's last tokens requested, the last one at ``step`` and each before it a step
        earlier, and take rows for what is worth having one for: the layer is within its capacity again.

        Args:
            layer: layer index.
            tail: ``[tokens, n_neurons]``, which token requested which neuron.
            step: never less than before.

        Returns:
            Neurons without a row so far, ascending, and their new rows: in flight until they are settled
            or dropped.
        """
        self.step = step
        ids = np.flatnonzero(tail.any(axis=0))
        age = tail[::-1, ids].argmax(axis=0)
        last = self._last[layer]
        last[ids] = np.maximum(last[ids], step - age)
        if type(self.policy).requested is not EvictionPolicy.requested:
            for token in tail:
                self.policy.requested(layer, np.flatnonzero(token), step)
        self._guessed[layer, ids] = False
        self._n_guessed[layer] = int(np.count_nonzero(self._guessed[layer]))
        there = self._evictable(layer, requested_now=True)
        new = ids[self.row_of[layer][ids] < 0]
        both = np.concatenate([new, there])
        expired = self.policy.expired(last[both], step)
        value = self.policy.value(layer, both, last[both])
        best = np.argsort(value, kind="stable")[::-1]  # of equals, what is there
        if expired is not None:
            best = best[~expired[best]]
        best = best[: max(0, self.capacity[layer] - self.n_in_flight[layer])]
        stays = np.zeros(len(both), np.bool_)
        stays[best] = True
        self._evict(layer, there[~stays[len(new) :]])
        taken = np.sort(both[best[best < len(new)]][: self.pool.n_free])
        return taken, self.insert(layer, taken)

    def make_room(self, layer: int, n_new: int) -> None:
        """Evict what has expired, and what must go so that ``n_new`` rows fit into the layer's capacity:
        of those that were not requested at this step, as far as they reach."""
        over = self.used[layer] + n_new - self.capacity[layer]
        ids = self._evictable(layer, requested_now=False) if over > 0 or self._expires(layer) else None
        if ids is None:
            return
        last = self._last[layer][ids]
        expired = self.policy.expired(last, self.step)
        if expired is not None and expired.any():
            self._evict(layer, ids[expired])
            over -= int(np.count_nonzero(expired))
            ids, last = ids[~expired], last[~expired]
        self._evict_least(layer, ids, last, over)

    def trim(self, layer: int) -> None:
        """Evict what is above the layer's capacity, as far as it is not in flight."""
        over = self.used[layer] - self.capacity[layer]
        if over > 0:
            ids = self._evictable(layer, requested_now=True)
            self._evict_least(layer, ids, self._last[layer][ids], over)

    def steal(self, n: int, layer: int) -> None:
        """Evict until ``n`` rows are free: what this step did not request of ``layer``, then anything of the
        others, the fullest first. A last resort; what is in flight stays, so it may not be enough."""
        others = sorted(range(len(self.used)), key=lambda i: -self.used[i] if i != layer else -(1 << 62))
        for other in others:
            wanted = n - self.pool.n_free
            if wanted <= 0:
                return
            ids = self._evictable(other, requested_now=other != layer)
            self._evict_least(other, ids, self._last[other][ids], wanted)

    def release(self, layer: int, ids: I64Array, n: int) -> None:
        """Free up to ``n`` rows of these neurons, where they have any that is not in flight."""
        rows = self.row_of[layer][ids]
        ids = ids[rows >= 0]
        ids = ids[~self.pool.in_flight[rows[rows >= 0]]]
        self._evict(layer, ids[: max(0, n)])

    def insert(self, layer: int, ids: I64Array, *, guessed: bool = False) -> I64Array:
        """Take rows for neurons that have none; they are in flight from now on.

        Args:
            layer: layer index.
            ids: ``[m]`` ascending.
            guessed: nobody has requested them: they are the first to go.

        Returns:
            Rows, ``[m]``.

        Raises:
            ValueError: the pool has not so many (our own bug).
        """
        rows = self.pool.take(ids + layer * self._n_neurons)
        self.row_of[layer][ids] = rows
        self.pool.in_flight[rows] = True
        self.used[layer] += len(ids)
        self.n_in_flight[layer] += len(ids)
        if guessed:
            self._guessed[layer][ids] = True
            self._n_guessed[layer] += len(ids)
        for biases, by_row in (
            (self._up_bias[layer], self.pool.up_bias),
            (self._gate_bias[layer], self.pool.gate_bias),
        ):
            if biases is not None and by_row is not None:
                by_row[rows] = biases[ids]
        return rows

    def settle(self, layer: int, rows: I64Array) -> None:
        """Rows have arrived."""
        self.pool.in_flight[rows] = False
        self.n_in_flight[layer] -= len(rows)

    def drop(self, layer: int, ids: I64Array, rows: I64Array) -> None:
        """Rows in flight will not arrive; no read writes to them any more."""
        self.settle(layer, rows)
        self._evict(layer, ids)

    def resize(self, n_rows: int, capacity: Sequence[int]) -> None:
        """Change the pool's size and all layers' capacities; rows that are too many go.

        Raises:
            ValueError: a read is in flight, or more rows than the pool's matrix has.
        """
        if any(self.n_in_flight):
            raise ValueError("a read is in flight")
        self.capacity = [min(rows, self._n_neurons) for rows in capacity]
        for layer in range(len(self.used)):
            self.trim(layer)
        excess = sum(self.used) - n_rows
        if excess > 0:
            self.steal(self.pool.n_free + excess, -1)
        moved, rows = self.pool.resize(n_rows)
        self.row_of.reshape(-1)[moved] = rows

    def _expires(self, layer: int) -> bool:
        return type(self.policy).expired is not EvictionPolicy.expired and self.used[layer] > 0

    def _evictable(self, layer: int, *, requested_now: bool) -> I64Array:
        """Neurons whose rows may go."""
        there = self.row_of[layer] >= 0
        if not requested_now:
            there &= self._last[layer] != self.step
        ids = np.flatnonzero(there)
        if self.n_in_flight[layer]:
            ids = ids[~self.pool.in_flight[self.row_of[layer][ids]]]
        return ids

    def _evict_least(self, layer: int, ids: I64Array, last: npt.NDArray[np.int32], n: int) -> None:
        if n <= 0 or not len(ids):
            return
        if n < len(ids):
            value = self.policy.value(layer, ids, last)
            if self._n_guessed[layer]:
                value = np.where(self._guessed[layer][ids], -np.inf, value)
            ids = ids[np.argpartition(value, n)[:n]]
        self._evict(layer, ids)

    def _evict(self, layer: int, ids: I64Array) -> None:
        row_of = self.row_of[layer]
        self.pool.give_back(row_of[ids])
        row_of[ids] = MISSING
        self.used[layer] -= len(ids)
        self.evicted += len(ids)
        if self._n_guessed[layer]:
            guessed = self._guessed[layer]
            self._n_guessed[layer] -= int(np.count_nonzero(guessed[ids]))
            guessed[ids] = False

    def check_integrity(self) -> None:
        """``AssertionError`` unless all tables say the same."""
        self.pool.check_integrity()
        there = np.flatnonzero(self.row_of.reshape(-1) >= 0)
        rows = self.row_of.reshape(-1)[there]
        assert np.array_equal(self.pool.owner[rows], there), "a neuron's row belongs to somebody else"
        assert len(rows) == self.pool.n_rows - self.pool.n_free, "a row belongs to a neuron that lacks it"
        per_layer = (self.row_of >= 0).sum(axis=1).tolist()
        assert per_layer == self.used, f"layers have {per_layer} rows, {self.used} are counted"
        flying = np.bincount(
            self.pool.owner[self.pool.in_flight] // self._n_neurons, minlength=len(self.used)
        ).tolist()
        assert flying == self.n_in_flight, f"{flying} rows are in flight, {self.n_in_flight} are counted"
        assert not (self._guessed & (self.row_of < 0)).any(), "a guess without a row"
        assert self._guessed.sum(axis=1).tolist() == self._n_guessed, "guesses are miscounted"
        for layer, (up, gate) in enumerate(zip(self._up_bias, self._gate_bias, strict=True)):
            ids = np.flatnonzero(self.row_of[layer] >= 0)
            for bias, by_row in ((up, self.pool.up_bias), (gate, self.pool.gate_bias)):
                if bias is not None and by_row is not None:
                    assert np.array_equal(by_row[self.row_of[layer][ids]], bias[ids]), "a row's bias is wrong"
