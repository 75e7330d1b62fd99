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
from functools import partial

import numpy as np

from flashd import kernels
from flashd.config import MAX_BATCH
from flashd.kernels.lane import ComputeLane
from flashd.memory.window import Split, Window
from flashd.predictor.base import Predictor
from flashd.prefetch.benefit import PrefetchBenefit
from flashd.prefetch.plan import round_end
from flashd.prefetch.scheduler import RowRead, RowReads
from flashd.prefetch.work import PromptSource, Work
from flashd.stats import SparseStats, StreamStats
from flashd.store.base import WeightStore
from flashd.types import Activation, F32Array, I64Array

# Guessed rows in flight, all layers together: a read that is needed now waits behind them for at most as
# long as the device takes for its queue, but they take its bandwidth.
PREFETCH_BYTES = 16 << 20
# Rows to read at once, at least, when a layer does not fit: others give up theirs.
MIN_ROUND_ROWS = 32
# A layer that would take more rounds is streamed.
STARVED_ROUNDS = 4
# Every so many steps layers get rows by how often their neurons were requested lately.
BALANCE_STEPS = 64


class SparseFFN:
    """An ``FFNSource`` for layers with a mask. One pass at a time.

    Attributes:
        stats: rows requested, found and read.
        waits: time that computing waited for flash.
        window: which rows are in RAM; changed on the lane only.
        reads: those in flight.
        benefit: whether reading ahead pays.
        between_layers: called on the lane before each layer, when no row is being used.
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
        self.between_layers: Callable[[], None] | None = None
        self.waits = waits or StreamStats()
        self.window = window
        self.reads = RowReads(store, window.pool.matrix, lane, self.waits)
        masked = [layer for layer in range(geometry.n_layers) if predictor.masked(layer)]
        self.benefit = PrefetchBenefit(prefetch, masked, geometry.n_layers)
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
        self._requested = [0] * geometry.n_layers  # by the last step
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
        work = await self._lane.run(self._begin, layer, x, asyncio.get_running_loop(), True)
        if isinstance(work, Work):
            return partial(self._finish, work)
        return await self._prompt.apply(layer, lambda: work)

    def apply_on_lane(
        self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop
    ) -> Callable[[], F32Array]:
        """See ``LaneFFNSource.apply_on_lane``; for layers with a mask and up to ``MAX_BATCH`` tokens."""
        work = self._begin(layer, x, loop)
        if isinstance(work, Work):
            return partial(self._finish, work)
        raise ValueError(f"{len(work)} tokens on the lane, at most {MAX_BATCH}; a prompt needs the loop")

    async def close(self) -> None:
        """Wait for reads in flight."""
        await self.reads.drain()

    def count_rows(self) -> None:
        """Bring the statistics up to date; on the lane, as all that follows."""
        pool = self.window.pool
        self.stats.evicted, self.stats.window_rows = self.window.evicted, pool.n_rows - pool.n_free

    def starved(self, layer: int) -> bool:
        """Whether there are so few rows that it is better to stream the layer."""
        return self._requested[layer] > STARVED_ROUNDS * self.window.pool.n_rows

    def _begin(
        self, layer: int, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop, streams: bool = False
    ) -> Work | F32Array:
        """A layer up to the dot products of what comes last; or the input of one that is to be streamed."""
        began_ns = time.perf_counter_ns()
        made = x()
        if self.between_layers is not None:
            self.between_layers()
        if len(made) > MAX_BATCH or (streams and self.starved(layer)):
            self._settle()
            self.count_rows()
            return made
        made = np.ascontiguousarray(made, np.float32)
        if layer == self._first:
            self._step_began_ns = began_ns
        ids, mask = self._predictor.predict(layer, made)
        work = Work(
            layer=layer,
            x=made,
            ids=ids,
            mask=mask if len(made) > 1 else None,
            hidden=np.empty((len(made), len(ids)), np.float32),
            acc=np.zeros((len(made), self._geometry.d_model), np.float32),
            loop=loop,
        )
        with self._lane.memory_work():
            self._note_ended()
            parts = self._request(work)
            here = self._plan_round(work, parts)
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

    def begin_step(self, x: Callable[[], F32Array], loop: asyncio.AbstractEventLoop) -> None:
        """See ``LaneFFNSource.begin_step``: the first layer's own predictor guesses, as long as that pays."""
        if 0 in self._masked and self.benefit.wants(0):
            self._settle()
            self._read_ahead(0, self._predictor.first_guess(x()), loop)

    def _guess(self, layer: int, x: F32Array, loop: asyncio.AbstractEventLoop) -> None:
        following = layer + 1
        if following not in self._masked or not self.benefit.wants(following):
            return
        self._read_ahead(following, self._predictor.lookahead(layer, x), loop)

    def _read_ahead(self, layer: int, guess: I64Array | None, loop: asyncio.AbstractEventLoop) -> None:
        if guess is None:
            self.benefit.cannot(layer)
            return
        with self._lane.memory_work():
            window, pool = self.window, self.window.pool
            # Only rows that are free now: a guess evicts nothing, and leaves half of them to others.
            in_flight = sum(len(read.ids) for read in self.reads.open if read.prefetch)
            room = min(self._prefetch_rows - in_flight, pool.n_free // 2)
            if room <= 0:
                return
            ids, rows = window.guess(layer, guess, room)
            if len(ids):
                self.reads.start(RowRead(layer, ids, rows, prefetch=True), loop)
                self._guessed[layer] += len(ids)
                self.stats.prefetched += len(ids)

    def _request(self, work: Work) -> Split:
        """Count a layer's neurons as requested, look where they are, and make room for those that lack."""
        window, stats, layer, ids = self.window, self.stats, work.layer, work.ids
        if self._current is not None:
            window.trim(self._current)
        if layer == self._first or layer <= (self._current or 0):
            self._step = max(self._step, window.step) + 1  # a prompt counts as steps, too
            stats.passes += 1
        self._number, self._current = self._number + 1, layer
        work.number = self._number
        from_guess, work.rows, parts = window.request(layer, ids, self._step)
        n_missing = len(parts.missing)
        window.make_room(layer, n_missing)
        stats.requested += len(ids)
        stats.resident += len(ids) - n_missing
        stats.prefetched_used += from_guess
        if layer == self._first:
            if stats.passes % BALANCE_STEPS == 0:
                window.balance()
            self.count_rows()
            stats.prefetch_layers = self.benefit.layers if self.benefit.active else 0
        self._requested[layer] = len(ids)
        self.benefit.observe(layer, self._guessed[layer], from_guess)
        self._guessed[layer] = 0
        return parts

    def _plan_round(self, work: Work, parts: Split | None = None) -> I64Array:
        """Decide how far this round goes and read what it lacks.

        Args:
            work: the layer.
            parts: where the rows are, if that is known.

        Returns:
            Places whose rows are in RAM.
        """
        layer, window = work.layer, self.window
        parts = parts or self._where(work)
        count, least = len(work.ids), min(len(parts.missing), MIN_ROUND_ROWS)
        if window.pool.n_free < least:
            self._find_room(work, least)
            parts = self._where(work)
        work.stop = round_end(parts.missing, work.start, count, window.pool.n_free)
        if work.stop < count:
            parts = Split(*(places[places < work.stop] for places in vars(parts).values()))
            self.stats.extra_rounds += 1
        # What is in flight of this layer may bring a row; a round without any waits for what frees one.
        stuck = work.stop == work.start < count
        work.waits = [
            read for read in self.reads.open if stuck or (len(parts.coming) and read.layer == layer)
        ]
        work.demand = None
        work.coming, work.missing = parts.coming, parts.missing
        if len(parts.missing):
            ids = work.ids[parts.missing]
            work.rows[parts.missing] = rows = window.insert(layer, ids)
            work.demand = self.reads.start(RowRead(layer, ids, rows, prefetch=False), work.loop)
            self.stats.demand += len(parts.missing)
        return parts.here

    def _where(self, work: Work) -> Split:
        """Look up the rows of this round and all later ones."""
        start = work.start
        work.rows[start:], parts = self.window.find(work.layer, work.ids[start:])
        return parts if not start else Split(*(places + start for places in vars(parts).values()))

    def _find_room(self, work: Work, least: int) -> None:
        """Free some rows: of rounds that are over, of what nobody wants now, of the last rounds."""
        window, pool = self.window, self.window.pool
        window.release(work.layer, work.ids[: work.start], least - pool.n_free)
        window.steal(least, work.layer)
        if not pool.n_free:
            window.release(work.layer, work.ids[: work.start : -1], least)

    def quiesce(self) -> None:
        """Wait until no read is in flight; on the lane."""
        for read in self.reads.open:
            self.reads.wait(read)
        self._settle()

    def _settle(self) -> None:
        """Take note of the reads that have ended."""
        with self._lane.memory_work():
            self._note_ended()

    def _note_ended(self) -> None:
        """See ``RowReads.ended``; inside of ``ComputeLane.memory_work``."""
        for read in self.reads.ended():
            if read.error is None:
                self.window.settle(read.layer, read.ids)
            else:
                self.window.drop(read.layer, read.ids)
                self.stats.failed_reads += 1

    def _arrived(self, work: Work) -> None:
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

    def _next_round(self, work: Work) -> None:
        """End this round and begin the next one, for which its rows may go."""
        self._add_down(work)
        work.start = work.stop
        self._settle()
        with self._lane.memory_work():
            self.window.trim(work.layer)
            here = self._plan_round(work)
        self._dots(work, here)
        self._arrived(work)

    def _finish(self, work: Work) -> F32Array:
        """The FFN's output, once everything has arrived."""
        if work.number != self._number:
            raise RuntimeError("an FFN's output is asked for after the next layer's: its rows may be gone")
        self._add_down(work)
        if work.layer == self._last:
            self.benefit.step_done(time.perf_counter_ns() - self._step_began_ns, len(work.x))
        return work.acc

    def _dots(self, work: Work, places: I64Array) -> None:
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

    def _add_down(self, work: Work) -> None:
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
