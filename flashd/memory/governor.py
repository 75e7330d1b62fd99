"""How much memory weights get, as the machine's memory comes and goes. Pure: readings in, decisions out.

Shrinking is for safety and happens at once; growing is for speed and happens slowly::

    available > reserve       room: when it has been there for some seconds, weights grow into it, bounded
    ... > reserve / 2         nothing happens
    less                      shrink until all of the reserve is free again

The reserve covers what others may take before this is looked at again and a step has let go of its rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from flashd.memory.account import MemoryAccount
from flashd.memory.system import Reading

POLL_S = 0.5
# While memory is short: nobody says when it gets shorter outside of cgroups.
SHORT_POLL_S = 0.05
# Of the limit that is the tightest.
RESERVE_SHARE = 0.05
# What others may take in a second without anybody being killed.
RAMP_BYTES_PER_S = 50 << 20
# Room that was not there all this time is somebody's who comes and goes.
HOLD_S = 3.0
GROW_BYTES_PER_S = 64 << 20
# Less is not worth moving anything for.
_LEAST_GROWTH_SHARE = 0.02
# Somebody on this machine waits for memory that much of the time: it is not the moment to take more.
_STALLED_SHARE = 0.10


@dataclass(frozen=True)
class Decision:
    """A change of what weights may take.

    Attributes:
        weights_bytes: from now on.
        before_bytes: until now.
        reason: ``pressure``, ``room``, or ``sequences``: KV caches need more.
    """

    weights_bytes: int
    before_bytes: int
    reason: str


class Governor:
    """Decides for one process.

    Args:
        account: what memory is spent on; its ceiling is kept up to date here.
        weights_bytes: what weights take now.

    Attributes:
        account: as given.
        weights_bytes: what they may take.
        reserve_bytes: what is left to others, as of the last reading.
        reading: the last one.
        short: less memory is available than twice the reserve.
    """

    def __init__(self, account: MemoryAccount, weights_bytes: int) -> None:
        self.account = account
        self.weights_bytes = weights_bytes
        self.reserve_bytes = 0
        self.reading: Reading | None = None
        self.short = False
        self._soft_ceiling_bytes: int | None = None
        self._rooms: deque[tuple[float, int]] = deque()
        self._grown_s = float("-inf")

    @property
    def poll_s(self) -> float:
        """How long to wait for the next reading, if nothing happens."""
        return SHORT_POLL_S if self.short else POLL_S

    def observe(self, reading: Reading, step_s: float) -> Decision | None:
        """Take a reading into account.

        Args:
            reading: of the machine.
            step_s: how long rows that shall go may be in use still.

        Returns:
            What changes; None if nothing.
        """
        account, now_s = self.account, reading.at_s
        self.reading = reading
        self.reserve_bytes = reserve_bytes(reading.limit_bytes, step_s)
        self.short = reading.available_bytes < 2 * self.reserve_bytes
        account.excess_bytes = 0
        accounted = account.beside_bytes(now_s) + self.weights_bytes
        account.excess_bytes = max(0, reading.footprint_bytes - accounted)
        whole = reading.footprint_bytes + reading.available_bytes
        account.ceiling_bytes = whole - self.reserve_bytes
        self._soft_ceiling_bytes = whole - self.reserve_bytes // 2
        shrunk = self._shrink(now_s, "pressure")
        return shrunk or self._grow(reading)

    def recount(self, now_s: float) -> Decision | None:
        """Sequences came or went; returns what changes at once, None if nothing."""
        return self._shrink(now_s, "sequences")

    def _shrink(self, now_s: float, reason: str) -> Decision | None:
        account = self.account
        soft = account.limit_bytes if self._soft_ceiling_bytes is None else self._soft_ceiling_bytes
        if account.asked_bytes is not None:
            soft = min(soft, account.asked_bytes)
        if account.weights_bytes(now_s, soft) >= self.weights_bytes:
            return None
        self._rooms.clear()
        return self._change(account.weights_bytes(now_s), reason)

    def _grow(self, reading: Reading) -> Decision | None:
        now_s, rooms = reading.at_s, self._rooms
        if reading.stalled is not None and reading.stalled > _STALLED_SHARE:
            rooms.clear()
        rooms.append((now_s, self.account.weights_bytes(now_s)))
        while len(rooms) > 1 and now_s - rooms[1][0] >= HOLD_S:
            rooms.popleft()
        if now_s - rooms[0][0] < HOLD_S:
            return None
        growth = min(room for _, room in rooms) - self.weights_bytes
        if growth < _LEAST_GROWTH_SHARE * self.weights_bytes:
            return None
        since_s = min(1.0, now_s - self._grown_s)
        self._grown_s = now_s
        return self._change(self.weights_bytes + min(growth, int(GROW_BYTES_PER_S * since_s)), "room")

    def _change(self, weights_bytes: int, reason: str) -> Decision:
        decision = Decision(weights_bytes, self.weights_bytes, reason)
        self.weights_bytes = weights_bytes
        return decision


def reserve_bytes(limit_bytes: int, step_s: float) -> int:
    """What is left to others: a share of the limit, or twice what they may take before rows are given back,
    half of which is spent before anything happens."""
    return max(int(RESERVE_SHARE * limit_bytes), int(2 * RAMP_BYTES_PER_S * (POLL_S + step_s)))
