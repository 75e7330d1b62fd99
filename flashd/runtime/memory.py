"""Keeps a running daemon within the memory that there is: looks, decides, and has rows and layers come
and go.

::

    kernel -> Reading -> Governor -> Decision -> allocate -> rows (at the next layer), layers (after the step)
    engine -> KV caches of its sequences  ^
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from flashd.errors import RequestError
from flashd.kernels.lane import ComputeLane
from flashd.memory.account import Claim, can_all_end
from flashd.memory.budget import Allocation, allocate
from flashd.memory.governor import Decision, Governor
from flashd.memory.system import Reading
from flashd.memory.wake import MemoryWake
from flashd.runtime.ffn import BuiltFFN
from flashd.stats import MemoryStats

log = logging.getLogger("flashd.memory")

# A request that waits for memory this long is told so.
ADMISSION_PATIENCE_S = 60.0
# Kernels that tell a lot are not listened to more often.
_LEAST_POLL_S = 0.02
_MB = 1e6


class HasKV(Protocol):
    """A sequence, as memory sees it."""

    @property
    def promised_tokens(self) -> int:
        """Tokens that its KV cache may come to hold."""
        ...

    @property
    def granted_tokens(self) -> int:
        """Of these, tokens that memory is set aside for."""
        ...

    @property
    def wanted_tokens(self) -> int:
        """Tokens that memory should be set aside for now."""
        ...


class MemoryKeeper:
    """One model's memory.

    Args:
        ffn: what comes and goes.
        lane: where its rows are used.
        fixed_k: the window's length where somebody has chosen it; 0: as long as fits.
        read: gives readings.
        wake: tells when to look sooner; None: nobody does.

    Attributes:
        account: what memory is spent on.
        stats: for the metrics.
    """

    def __init__(
        self,
        ffn: BuiltFFN,
        lane: ComputeLane,
        fixed_k: int,
        read: Callable[[], Reading],
        wake: MemoryWake | None = None,
    ) -> None:
        self.account = ffn.account
        self.stats = MemoryStats()
        self._ffn = ffn
        self._lane = lane
        self._fixed_k = fixed_k
        self._read = read
        self._wake = wake
        self._allocation = ffn.allocation
        budget_bytes = ffn.allocation.budget_bytes if ffn.allocation else ffn.account.demand.least_bytes
        self.governor = Governor(ffn.account, budget_bytes)
        self._look = asyncio.Event()
        # The engine's: called when it has something to do between two steps, or may admit somebody.
        self.on_change: Callable[[], None] | None = None
        self.step_s = 0.0  # how long the last step took
        self._settled = True
        self._last_way = ""
        self._show()

    async def run(self) -> None:
        """Look until cancelled."""
        if self._wake is not None:
            self._wake.start(self._look.set)
        try:
            while True:
                try:
                    self.look()
                except Exception:  # whatever it is, serving goes on
                    log.exception("memory cannot be looked at")
                try:
                    async with asyncio.timeout(self.governor.poll_s):
                        await self._look.wait()
                except TimeoutError:
                    continue
                self._look.clear()
                self.stats.wake_ups += 1
                await asyncio.sleep(_LEAST_POLL_S)
        finally:
            if self._wake is not None:
                self._wake.stop()

    def look(self) -> None:
        """Take a reading, and begin what follows from it."""
        reading = self._read()
        # Rows go between two layers, whole layers between two steps.
        use_s = self.step_s / max(1, self.account.demand.geometry.n_layers) if self._ffn.rows else self.step_s
        self._begin(self.governor.observe(reading, use_s))
        self._show()
        if self.on_change is not None and (not self._settled or self.stats.admission_paused):
            self.on_change()

    # What follows is the engine's.

    def kv_bytes(self, tokens: int) -> int:
        """KV cache of so many tokens."""
        return tokens * self.account.beside.kv_token_bytes

    def check(self, least_tokens: int) -> None:
        """Refuse a sequence that has no room even alone.

        Args:
            least_tokens: that its KV cache must hold.

        Raises:
            RequestError: 400 where it never has, 429 where it has none now.
        """
        kv_bytes = self.kv_bytes(least_tokens)
        if kv_bytes > self.account.most_kv_bytes(asked=True):
            raise RequestError(
                f"the request cannot fit: {self.account.shortage(kv_bytes)}; shorten the prompt, ask for "
                "fewer max_tokens, or start flashd with more --memory",
                code="out_of_memory",
            )
        if kv_bytes > self.account.most_kv_bytes():
            raise self.no_room(kv_bytes)

    def no_room(self, kv_bytes: int) -> RequestError:
        """What a request is told that other programs have left no room for."""
        reading = self.governor.reading
        have = "" if reading is None else f" ({reading.available_bytes / _MB:.1f} MB are available)"
        return RequestError(
            f"the request has no room now{have}: {self.account.shortage(kv_bytes)}; try again later",
            code="out_of_memory",
            status=429,
        )

    def open_tokens(self, context: int) -> int:
        """Tokens at most of a sequence whose length nobody has said: the model's context, or half of what
        there is room for, so that another one fits beside it."""
        most = self.account.most_kv_bytes() // max(1, self.account.beside.kv_token_bytes)
        return context if context <= most else most // 2

    def fits(self, sessions: Sequence[HasKV], session: HasKV) -> bool:
        """Whether there is room for what a running sequence wants now, whatever others may come to need."""
        granted = sum(one.granted_tokens for one in sessions if one is not session)
        return self.kv_bytes(granted + session.wanted_tokens) <= self.account.most_kv_bytes()

    def grants(self, sessions: Sequence[HasKV], session: HasKV) -> bool:
        """Whether a sequence, one of those that run or one more, can have what it wants now so that all can
        still come to their end."""
        claims = [
            Claim(self.kv_bytes(one.granted_tokens), self.kv_bytes(one.promised_tokens))
            for one in sessions
            if one is not session
        ]
        claims.append(Claim(self.kv_bytes(session.wanted_tokens), self.kv_bytes(session.promised_tokens)))
        return can_all_end(claims, self.account.most_kv_bytes())

    def count(self, sessions: Sequence[HasKV], *, paused: bool = False) -> None:
        """These sequences run, and one more waits for memory or not."""
        self.stats.admission_paused = paused
        promised = self.kv_bytes(sum(session.promised_tokens for session in sessions))
        counted = self.kv_bytes(sum(session.granted_tokens for session in sessions))
        if (promised, counted) != (self.account.promised_bytes, self.account.counted_bytes):
            now_s = self._now_s()
            self.account.count_kv(promised, counted, now_s)
            self._begin(self.governor.recount(now_s))
            self._show()

    async def settle(self) -> None:
        """Do what is left to be done, while nothing is computed."""
        if self._settled:
            return
        self._settled = True
        if self._ffn.layers is not None:
            self._ffn.layers.apply()
            self._settled = not self._ffn.layers.loading
        if self._ffn.rows is not None:
            await self._lane.run(self._ffn.rows.apply, kind="memory")

    def _now_s(self) -> float:
        return time.monotonic()

    def _begin(self, decision: Decision | None) -> None:
        """Spend memory anew."""
        before = self._allocation
        if decision is None or before is None:
            return
        demand = self.account.demand
        budget_bytes = min(decision.weights_bytes, demand.everything_bytes)
        after = self._allocation = allocate(budget_bytes, demand, self._fixed_k)
        if replace(after, budget_bytes=0) == replace(before, budget_bytes=0):
            return
        self._settled = False
        if self._ffn.layers is not None:
            self._ffn.layers.ask(after.resident_layers)
        if self._ffn.rows is not None:
            self._ffn.rows.ask(after)
        self._explain(decision, before, after)

    def _explain(self, decision: Decision, before: Allocation, after: Allocation) -> None:
        reading, account = self.governor.reading, self.account
        way = "shrink" if decision.weights_bytes < decision.before_bytes else "grow"
        self.stats.changes[way, decision.reason] += 1
        if before.k != after.k:
            self.stats.k_changes += 1
        # Growing takes many small steps.
        told = before.k != after.k or way != self._last_way
        self._last_way = way
        log.log(
            logging.INFO if told else logging.DEBUG,
            "window %s: k=%d->%d rows=%d->%d dense_layers=%d->%d reason=%s available_mb=%.0f source=%s "
            "stalled=%s footprint_mb=%.0f limit_mb=%.0f reserve_mb=%.0f weights_mb=%.0f->%.0f kv_mb=%.0f",
            way,
            *(before.k, after.k, before.n_rows, after.n_rows),
            *(len(before.resident_layers), len(after.resident_layers)),
            decision.reason,
            -1 if reading is None else reading.available_bytes / _MB,
            "unknown" if reading is None else reading.source,
            "unknown" if reading is None or reading.stalled is None else f"{reading.stalled:.0%}",
            -1 if reading is None else reading.footprint_bytes / _MB,
            account.limit_bytes / _MB,
            self.governor.reserve_bytes / _MB,
            *(decision.before_bytes / _MB, decision.weights_bytes / _MB),
            account.kv_bytes(self._now_s()) / _MB,
        )

    def _show(self) -> None:
        """Copy facts into the statistics."""
        stats, account, allocation = self.stats, self.account, self._allocation
        reading = self.governor.reading
        if reading is not None:
            stats.available_bytes = reading.available_bytes
            stats.footprint_bytes = reading.footprint_bytes
            stats.stalled = reading.stalled or 0.0
        stats.limit_bytes = account.limit_bytes
        stats.reserve_bytes = self.governor.reserve_bytes
        stats.weights_bytes = self.governor.weights_bytes
        stats.kv_promised_bytes = account.promised_bytes
        stats.kv_counted_bytes = account.kv_bytes(self._now_s())
        if allocation is not None:
            stats.k = allocation.k
            stats.window_capacity = allocation.n_rows
            stats.dense_layers = len(allocation.resident_layers)
        if self._ffn.rows is not None:
            stats.window_bytes = self._ffn.rows.nbytes
