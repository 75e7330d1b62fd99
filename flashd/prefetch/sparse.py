"""The FFN over predicted neurons (LLM in a flash, sections 3.1 to 3.3), for decoding.

A layer is one call on the compute lane, which starts reads and waits for them by itself::

    lane  : end of i-1 | attn i | predict i | plan i | guess i+1 | dots of i in RAM | wait | end of i | ...
    flash :                                          [demand i ..............][prefetch i+1 ...]

Only requested neurons are computed, and the down projection sums them in ascending order: neither what is
in RAM, nor how it came there, nor who else is served shows in the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from flashd import kernels
from flashd.config import MAX_BATCH
from flashd.kernels.lane import ComputeLane
from flashd.memory.window import Window
from flashd.predictor.base import Predictor
from flashd.prefetch.benefit import PrefetchBenefit
from flashd.prefetch.plan import Split, round_end, split, worth_reading
from flashd.prefetch.scheduler import RowRead, RowReads
from flashd.stats import SparseStats, StreamStats
from flashd.store.base import WeightStore
from flashd.types import Activation, BoolArray, F32Array, I64Array

# Guessed rows in flight, all layers together: a read that is needed now waits behind them for at most as
# long as the device takes for its queue, but they take its bandwidth.
PREFETCH_BYTES = 4 << 20
# Rows to read at once, at least, when a layer does not fit: others give up theirs for so many.
MIN_ROUND_ROWS = 32


class PromptSource(Protocol):
    """The FFN of a prompt's chunk."""

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """As ``FFNSource.apply``, for more than ``MAX_BATCH`` tokens."""
        ...


@dataclass(eq=False)
class _Work:
    """A layer of one step. Places are indices into ``ids``, and columns of ``hidden``.

    Attributes:
        ids: ``[m]`` ascending, requested neurons.
        mask: ``[B, m]``, by which sequence; None where there is one.
        rows: ``[m]``, their rows, up to ``stop``.
        hidden: ``[B, m]``.
        acc: ``[B, d_model]``, the sum so far.
        start, stop: places of this round.
        coming: places of this round whose rows a guess is bringing.
        missing: places of this round that ``demand`` is bringing.
        demand: this round's read of what was missing.
        waits: other reads to wait for.
    """

    number: int
    layer: int
    x: F32Array
    ids: I64Array
    mask: BoolArray | None
    rows: I64Array
    hidden: F32Array
    acc: F32Array
    loop: asyncio.AbstractEventLoop
    start: int = 0
    stop: int = 0
    coming: I64Array = field(default_factory=lambda: np.empty(0, np.int64))
    missing: I64Array = field(default_factory=lambda: np.empty(0, np.int64))
    demand: RowRead | None = None
    waits: list[RowRead] = field(default_factory=list)


class SparseFFN:
    """An ``FFNSource`` for layers with a mask. One pass at a time.

    Attributes:
        stats: rows requested, found and read.
        waits: time that computing waited for flash.
        window: which rows are in RAM; changed on the lane only.
        reads: those in flight.
        benefit: whether reading ahead pays.
    """

    def __init__(
        self,
        store: WeightStore,
        lane: ComputeLane,
        predictor: Predictor,
        window: Window,
        activation: Activation,
        prompt: PromptSource,
        *,
        thresholds: Sequence[float] = (),
        prefetch: str = "auto",
        prefetch_bytes: int = PREFETCH_BYTES,
        waits: StreamStats | None = None,
    ) -> None:
        """Args:
        store: where rows are; stays the caller's to close.
        lane: where the math runs.
        predictor: which neurons are requested.
        window: over a pool whose matrix the store can read into.
        activation: of the hidden units.
        prompt: computes what has more tokens than a step.
        thresholds: per layer, activations up to it count as zero; empty: 0 for all.
        prefetch: ``on``, ``off`` or ``auto``: as long as it pays.
        prefetch_bytes: guessed rows in flight, at most.
        waits: counts the time that computing waits for flash.
        """
        geometry = store.geometry
        self.stats = SparseStats()
        self.waits = waits or StreamStats()
        self.window = window
        self.reads = RowReads(store, window.pool.matrix, lane, self.waits)
        masked = [layer for layer in range(geometry.n_layers) if predictor.masked(layer)]
        self.benefit = PrefetchBenefit(prefetch, [i for i in masked if i > 0], geometry.n_layers)
        self._geometry = geometry
        self._lane = lane
        self._predictor = predictor
        self._activation: Activation = activation
        self._prompt = prompt
        self._thresholds = list(thresholds) or [0.0] * geometry.n_layers
        self._first, self._last = (masked[0], masked[-1]) if masked else (-1, -1)
        self._masked = frozenset(masked)
        self._prefetch_rows = prefetch_bytes // geometry.stride_bytes
        self._guessed = [0] * geometry.n_layers  # rows read ahead for a layer since it was last asked for
        self._step = 0
        self._step_began_ns = 0
        self._number = 0  # of the last work: only that one's rows are where it says
        self._current: int | None = None

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``; for layers with a mask.

        Cancelling it leaves the source usable, and so does a failed read.

        Raises:
            BundleCorruptError, DiskReadError: a row could not be read.
        """
        work = await self._lane.run(self._begin, layer, x, asyncio.get_running_loop())
        if isinstance(work, _Work):
            return partial(self._finish, work)
        return await self._prompt.apply(layer, lambda: work)

    async def close(self) -> None:
        """Wait for reads in flight."""
        await self.reads.drain()

    # What follows runs on the lane.

    def _begin(
        self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop
    ) -> _Work | F32Array:
        """A layer up to the dot products of what comes last, or a prompt's input."""
        began_ns = time.perf_counter_ns()
        made = x()
        self._settle(layer)
        if len(made) > MAX_BATCH:
            return made
        made = np.ascontiguousarray(made, np.float32)
        ids, mask = self._predictor.predict(layer, made)
        with self._lane.memory_work():
            work = self._request(layer, made, ids, mask, loop)
            if layer == self._first:
                self._step_began_ns = began_ns
            here = self._plan_round(work)
        self._guess(layer, made, loop)
        self._dots(work, here)
        self._arrived(work)
        while work.stop < len(work.ids):
            self._next_round(work)
        return work

    def look_ahead(self, layer: int, x: F32Array, loop: asyncio.AbstractEventLoop) -> None:
        """Start to read what the next layer will probably request; on the lane.

        Args:
            layer: layer index, masked or not.
            x: its FFN input, ``[tokens, d_model]``.
            loop: the store's.
        """
        self._settle()
        self._guess(layer, x, loop)

    def _guess(self, layer: int, x: F32Array, loop: asyncio.AbstractEventLoop) -> None:
        following = layer + 1
        if following not in self._masked or not self.benefit.wants(following):
            return
        guess = self._predictor.lookahead(layer, x)
        if guess is None:
            self.benefit.cannot(following)
            return
        with self._lane.memory_work():
            window, pool = self.window, self.window.pool
            # Only rows that are free now: a guess evicts nothing, and leaves half of what is free to reads
            # that are needed.
            in_flight = sum(len(read.ids) for read in self.reads.open if read.prefetch)
            room = min(self._prefetch_rows - in_flight, pool.n_free // 2)
            ids = worth_reading(guess, window.row_of[following][guess], room)
            if len(ids):
                self._read(following, ids, loop, prefetch=True)
                self._guessed[following] += len(ids)
                self.stats.prefetched += len(ids)

    def _request(
        self, layer: int, x: F32Array, ids: I64Array, mask: BoolArray, loop: asyncio.AbstractEventLoop
    ) -> _Work:
        """Count a layer's neurons as requested, and make room for them."""
        window, stats, batch = self.window, self.stats, len(x)
        if self._current is not None:
            window.trim(self._current)
        if layer == self._first or layer <= (self._current or 0):
            self._step = max(self._step, window.step) + 1  # a prompt counts as steps, too
            stats.passes += 1
        self._number, self._current = self._number + 1, layer
        rows, from_guess = window.request(layer, ids, self._step)
        n_missing = int(np.count_nonzero(rows < 0))
        window.make_room(layer, n_missing)
        stats.requested += len(ids)
        stats.resident += len(ids) - n_missing
        stats.prefetched_used += from_guess
        if layer == self._first:
            stats.evicted, stats.window_rows = window.evicted, window.pool.n_rows - window.pool.n_free
            stats.prefetch_layers = self.benefit.layers if self.benefit.active else 0
        self.benefit.observe(layer, self._guessed[layer], from_guess)
        self._guessed[layer] = 0
        hidden = np.empty((batch, len(ids)), np.float32)
        acc = np.zeros((batch, self._geometry.d_model), np.float32)
        return _Work(self._number, layer, x, ids, mask if batch > 1 else None, rows, hidden, acc, loop)

    def _plan_round(self, work: _Work) -> I64Array:
        """Decide how far this round goes and read what it lacks.

        Returns:
            Places whose rows are in RAM.
        """
        layer, window = work.layer, self.window
        parts = self._where(work)
        count, least = len(work.ids), min(len(parts.missing), MIN_ROUND_ROWS)
        if window.pool.n_free < least:
            self._find_room(work, least)
            parts = self._where(work)
        work.stop = round_end(parts.missing, work.start, count, window.pool.n_free)
        if work.stop < count:
            parts = Split(*(places[places < work.stop] for places in vars(parts).values()))
            self.stats.extra_rounds += 1
        # Whatever of this layer is in flight may bring a row of this round; and a round without any
        # row waits for whatever will free one.
        stuck = work.stop == work.start < count
        work.waits = [
            read for read in self.reads.open if stuck or (len(parts.coming) and read.layer == layer)
        ]
        work.demand = None
        work.coming, work.missing = parts.coming, parts.missing
        if len(parts.missing):
            work.demand = self._read(layer, work.ids[parts.missing], work.loop)
            work.rows[parts.missing] = work.demand.rows
            self.stats.demand += len(parts.missing)
        return parts.here

    def _where(self, work: _Work) -> Split:
        """Look up the rows of this round and all later ones."""
        window, start = self.window, work.start
        work.rows[start:] = window.row_of[work.layer][work.ids[start:]]
        in_flight = window.pool.in_flight if window.n_in_flight[work.layer] else None
        parts = split(work.rows[start:], in_flight)
        return parts if not start else Split(*(places + start for places in vars(parts).values()))

    def _find_room(self, work: _Work, least: int) -> None:
        """Free some rows: of rounds that are over, of what nobody wants now, of the last rounds."""
        window, pool = self.window, self.window.pool
        window.release(work.layer, work.ids[: work.start], least - pool.n_free)
        window.steal(least, work.layer)
        if not pool.n_free:
            window.release(work.layer, work.ids[: work.start : -1], least)

    def _read(
        self, layer: int, ids: I64Array, loop: asyncio.AbstractEventLoop, *, prefetch: bool = False
    ) -> RowRead:
        rows = self.window.insert(layer, ids, guessed=prefetch)
        return self.reads.start(RowRead(layer, ids, rows, prefetch), loop)

    def _settle(self, layer: int | None = None) -> None:
        """Take note of the reads that have ended; of guesses at ``layer`` only where they were waited for."""
        over = self.reads.ended(layer)
        if not over:
            return
        with self._lane.memory_work():
            for read in over:
                if read.error is None:
                    self.window.settle(read.layer, read.rows)
                else:
                    self.window.drop(read.layer, read.ids, read.rows)
                    self.stats.failed_reads += 1

    def _arrived(self, work: _Work) -> None:
        """Wait for the rows of this round; those of a guess, which was started earlier, are computed while
        what is missing is still on its way.

        A guess that failed harms nobody: what it should have brought is read again.

        Raises:
            BundleCorruptError, DiskReadError: what the step needs could not be read.
        """
        while True:
            for read in work.waits:
                self.reads.wait(read)
            again = work.stop == work.start < len(work.ids) or any(read.error for read in work.waits)
            if not again:
                self._dots(work, work.coming)
            if work.demand is not None:
                self.reads.wait(work.demand)
                if work.demand.error is not None:
                    raise work.demand.error
            if not again:
                return
            if not work.waits:
                raise RuntimeError(f"layer {work.layer}: no row can be freed in a pool that is too small")
            # A guess has failed, or there was no row to go on with.
            self._settle()
            with self._lane.memory_work():
                here = self._plan_round(work)
            self._dots(work, here)

    def _next_round(self, work: _Work) -> None:
        """End this round and begin the next one, for which its rows may go."""
        self._add_down(work)
        work.start = work.stop
        self._settle()
        with self._lane.memory_work():
            self.window.trim(work.layer)
            here = self._plan_round(work)
        self._dots(work, here)
        self._arrived(work)

    def _finish(self, work: _Work) -> F32Array:
        """The FFN's output, once everything has arrived."""
        if work.number != self._number:
            raise RuntimeError("an FFN's output is asked for after the next layer's: its rows may be gone")
        self._add_down(work)
        if work.layer == self._last:
            self.benefit.step_done(time.perf_counter_ns() - self._step_began_ns, len(work.x))
        return work.acc

    def _dots(self, work: _Work, places: I64Array) -> None:
        """Activations of some places."""
        if not len(places):
            return
        geometry, pool = self._geometry, self.window.pool
        fired = kernels.ffn_dots(
            pool.matrix,
            geometry.dtype,
            geometry.d_model,
            geometry.gated,
            self._activation,
            work.x,
            work.hidden,
            pool.up_bias,
            pool.gate_bias,
            index=work.rows[places],
            slots=places,
            mask=work.mask,
            threshold=self._thresholds[work.layer],
        )
        self.stats.fired += len(fired)

    def _add_down(self, work: _Work) -> None:
        """Activations of what came last, and the round's part of the output."""
        self._dots(work, work.missing)
        if work.stop == work.start:
            return
        geometry = self._geometry
        hidden = work.hidden
        if work.stop - work.start < len(work.ids):
            hidden = np.ascontiguousarray(hidden[:, work.start : work.stop])
        kernels.ffn_down(
            self.window.pool.matrix,
            geometry.dtype,
            geometry.d_model,
            geometry.gated,
            hidden,
            work.acc,
            work.rows[work.start : work.stop],
        )
