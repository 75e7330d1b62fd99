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
from dataclasses import dataclass

import numpy as np

from flashd import kernels
from flashd.memory.eviction import EvictionPolicy
from flashd.memory.pool import RowPool
from flashd.types import BoolArray, F32Array, I32Array, I64Array

MISSING = -1
_NEVER = -(1 << 30)
_NO_STEP = _NEVER - 1


@dataclass(frozen=True)
class Split:
    """Where the wanted rows of a layer are; every place of the list is in exactly one column.

    Attributes:
        here: places of rows in RAM, ascending.
        coming: places of rows in flight, ascending.
        missing: places of neurons without a row, ascending.
    """

    here: I64Array
    coming: I64Array
    missing: I64Array


class Window:
    """Rows by layer and neuron. Used from one thread.

    Attributes:
        pool: the rows.
        capacity: rows that each layer may keep.
        used: rows that each layer has, those in flight included.
        n_in_flight: rows of each layer that are in flight.
        row_of: ``[n_layers, n_neurons]`` int32, or ``MISSING``.
        in_flight: ``[n_layers, n_neurons]``, whether a read may be writing to its row, which then stays.
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
        # Narrow, because a step goes through all of them and finds none in the processor's caches.
        self.row_of: I32Array = np.full((n_layers, n_neurons), MISSING, np.int32)
        self.in_flight: BoolArray = np.zeros((n_layers, n_neurons), np.bool_)
        self.step = 0
        self._n_neurons = n_neurons
        self.evicted = 0
        self._last: I32Array = np.full((n_layers, n_neurons), _NEVER, np.int32)
        # Rows that only a guess has asked for.
        self._guessed: BoolArray = np.zeros((n_layers, n_neurons), np.bool_)
        self._n_guessed = [0] * n_layers
        self._up_bias = list(up_bias) or [None] * n_layers
        self._gate_bias = list(gate_bias) or [None] * n_layers

    def request(self, layer: int, ids: I64Array, step: int) -> tuple[int, I64Array, Split]:
        """Count neurons as requested at a step, and look up their rows.

        Args:
            layer: layer index.
            ids: ``[m]``, all different.
            step: never less than before.

        Returns:
            How many of their rows are there by a guess that nobody had used so far; what ``find`` returns.
        """
        self.step = step
        used, rows, here, coming, missing = kernels.request_rows(
            ids,
            step,
            self._last[layer],
            self._guessed[layer],
            self.row_of[layer],
            self.in_flight[layer],
            self.policy.counts(layer),
            self.policy.credit(step),
        )
        self._n_guessed[layer] -= used
        return used, rows, Split(here, coming, missing)

    def find(self, layer: int, ids: I64Array) -> tuple[I64Array, Split]:
        """Look up neurons' rows.

        Returns:
            Rows, ``[m]``, ``MISSING`` where there is none; which of them are here.
        """
        rows, *places = kernels.find_rows(ids, self.row_of[layer], self.in_flight[layer])
        return rows, Split(*places)

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
        counts = self.policy.counts(layer)
        if counts is not None:
            counts += tail.sum(axis=0, dtype=np.float32) * np.float32(self.policy.credit(step))
        self._guessed[layer, ids] = False
        self._n_guessed[layer] = int(np.count_nonzero(self._guessed[layer]))
        there = self._evictable(layer, requested_now=True)
        new = ids[self.row_of[layer][ids] < 0]
        both = np.concatenate([new, there])
        expired = self.policy.expired(last[both], step)
        value = self.policy.values(layer, last)[both]
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
        if self._expires(layer):
            ids = self._evictable(layer, requested_now=False)
            expired = self.policy.expired(self._last[layer][ids], self.step)
            if expired is not None and expired.any():
                self._evict(layer, ids[expired])
        over = self.used[layer] + n_new - self.capacity[layer]
        self._evict_least(layer, over, requested_now=False)

    def trim(self, layer: int) -> None:
        """Evict what is above the layer's capacity, as far as it is not in flight."""
        self._evict_least(layer, self.used[layer] - self.capacity[layer], requested_now=True)

    def steal(self, n: int, layer: int) -> None:
        """Evict until ``n`` rows are free: what this step did not request of ``layer``, then anything of the
        others, the fullest first. A last resort; what is in flight stays, so it may not be enough."""
        others = sorted(range(len(self.used)), key=lambda i: -self.used[i] if i != layer else -(1 << 62))
        for other in others:
            wanted = n - self.pool.n_free
            if wanted <= 0:
                return
            self._evict_least(other, wanted, requested_now=other != layer)

    def release(self, layer: int, ids: I64Array, n: int) -> None:
        """Free up to ``n`` rows of these neurons, where they have any that is not in flight."""
        ids = ids[(self.row_of[layer][ids] >= 0) & ~self.in_flight[layer][ids]]
        self._evict(layer, np.sort(ids[: max(0, n)]))

    def insert(self, layer: int, ids: I64Array) -> I64Array:
        """Take rows for neurons that have none; they are in flight from now on.

        Args:
            layer: layer index.
            ids: ``[m]`` ascending.

        Returns:
            Rows, ``[m]``.

        Raises:
            ValueError: the pool has not so many, or one has a row (our own bug).
        """
        if len(ids) > self.pool.n_free:
            raise ValueError(f"{len(ids)} rows are wanted, {self.pool.n_free} are free")
        taken, rows = self._take(layer, ids, len(ids), None)
        if len(taken) < len(ids):
            raise ValueError(
                f"layer {layer}: {len(ids) - len(taken)} of {len(ids)} neurons have a row already"
            )
        return rows

    def guess(self, layer: int, ids: I64Array, most: int) -> tuple[I64Array, I64Array]:
        """Take rows for those of some neurons that have none, though nobody has requested them: they are in
        flight from now on, and later the first to go.

        Args:
            layer: layer index.
            ids: ``[m]`` ascending.
            most: rows to take; the lower neurons get them.

        Returns:
            Neurons that have got a row, and their rows.
        """
        taken, rows = self._take(layer, ids, most, self._guessed[layer])
        self._n_guessed[layer] += len(taken)
        return taken, rows

    def _take(
        self, layer: int, ids: I64Array, most: int, guessed: BoolArray | None
    ) -> tuple[I64Array, I64Array]:
        pool = self.pool
        first = layer * self._n_neurons
        taken, rows = pool.take(ids, most, self.row_of[layer], self.in_flight[layer], first, guessed)
        self.used[layer] += len(taken)
        self.n_in_flight[layer] += len(taken)
        up_bias, gate_bias = self._up_bias[layer], self._gate_bias[layer]
        if up_bias is not None and pool.up_bias is not None:
            pool.up_bias[rows] = up_bias[taken]
        if gate_bias is not None and pool.gate_bias is not None:
            pool.gate_bias[rows] = gate_bias[taken]
        return taken, rows

    def settle(self, layer: int, ids: I64Array) -> None:
        """These neurons' rows have arrived."""
        self.in_flight[layer][ids] = False
        self.n_in_flight[layer] -= len(ids)

    def drop(self, layer: int, ids: I64Array) -> None:
        """These neurons' rows will not arrive; no read writes to them any more."""
        self.settle(layer, ids)
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

    def balanced(self, capacity: Sequence[int]) -> list[int]:
        """The same number of rows, split so that no layer would save more reads with another one than it
        costs the layer that gives it: those neurons of all layers that are requested most.

        Args:
            capacity: rows of each layer; layers with none get none.

        Returns:
            Rows of each layer; ``capacity`` where nobody counts requests.
        """
        layers = [layer for layer, rows in enumerate(capacity) if rows]
        counts = [self.policy.counts(layer) for layer in layers]
        known = [count for count in counts if count is not None]
        shared = sum(capacity) - len(layers)  # each has one anyway
        if len(known) < len(layers) or not 0 < shared < len(layers) * (self._n_neurons - 1):
            return list(capacity)
        every = np.concatenate(known)
        best = np.argpartition(every, len(every) - shared)[len(every) - shared :]
        shares = np.bincount(best // self._n_neurons, minlength=len(layers))
        split = [0] * len(capacity)
        for layer, rows in zip(layers, shares.tolist(), strict=True):
            split[layer] = min(self._n_neurons, 1 + rows)
        return split

    def balance(self) -> None:
        """Split the layers' rows anew by what was requested lately."""
        self.capacity = self.balanced(self.capacity)

    def _expires(self, layer: int) -> bool:
        return type(self.policy).expired is not EvictionPolicy.expired and self.used[layer] > 0

    def _evictable(self, layer: int, *, requested_now: bool) -> I64Array:
        """Neurons whose rows may go."""
        there = self.row_of[layer] >= 0
        if not requested_now:
            there &= self._last[layer] != self.step
        ids = np.flatnonzero(there)
        if self.n_in_flight[layer]:
            ids = ids[~self.in_flight[layer][ids]]
        return ids

    def _evict_least(self, layer: int, n: int, *, requested_now: bool) -> None:
        """Evict up to ``n`` of the rows that may go."""
        if n <= 0:
            return
        last = self._last[layer]
        step = _NO_STEP if requested_now else self.step
        gone, were_guessed = self.pool.evict(
            n,
            self.row_of[layer],
            self.in_flight[layer],
            last,
            step,
            self.policy.values(layer, last),
            self._guessed[layer],
        )
        self.used[layer] -= gone
        self.evicted += gone
        self._n_guessed[layer] -= were_guessed

    def _evict(self, layer: int, ids: I64Array) -> None:
        self.pool.give_back(ids, self.row_of[layer])
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
        flying = self.in_flight.sum(axis=1).tolist()
        assert flying == self.n_in_flight, f"{flying} rows are in flight, {self.n_in_flight} are counted"
        assert not (self.in_flight & (self.row_of < 0)).any(), "a read without a row"
        assert not (self._guessed & (self.row_of < 0)).any(), "a guess without a row"
        assert self._guessed.sum(axis=1).tolist() == self._n_guessed, "guesses are miscounted"
        for layer, (up, gate) in enumerate(zip(self._up_bias, self._gate_bias, strict=True)):
            ids = np.flatnonzero(self.row_of[layer] >= 0)
            for bias, by_row in ((up, self.pool.up_bias), (gate, self.pool.gate_bias)):
                if bias is not None and by_row is not None:
                    assert np.array_equal(by_row[self.row_of[layer][ids]], bias[ids]), "a row's bias is wrong"
