"""A wrapper that counts what another store reads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flashd.disk.engine import FOREVER_S, ReadTicket, RowCheck
from flashd.stats import CheckStats, ReadStats, StoreStats
from flashd.store.base import WeightStore, WrappedStore
from flashd.types import I64Array, U8Array


class _Counters(StoreStats):
    """Asks the store below when somebody looks.

    Attributes:
        own_busy_ns: time with at least one call outstanding.
    """

    def __init__(self, inner: WeightStore) -> None:
        self._inner = inner
        self._busy_before_ns = inner.busy_ns or 0
        self._device = ReadStats()
        self.own_busy_ns = 0
        super().__init__(checks=inner.check_stats or CheckStats())

    @property
    def busy_ns(self) -> int:
        """See ``StoreStats``."""
        busy_ns = self._inner.busy_ns
        return self.own_busy_ns if busy_ns is None else busy_ns - self._busy_before_ns

    @busy_ns.setter
    def busy_ns(self, value: int) -> None:
        self.own_busy_ns = value

    @property
    def device(self) -> ReadStats:
        """See ``StoreStats``."""
        return self._inner.read_stats or self._device

    @device.setter
    def device(self, value: ReadStats) -> None:
        self._device = value


class MeteredStore(WrappedStore):
    """Counts calls, bytes delivered, errors and the time with at least one call outstanding, and
    collects what the stores below count.

    Attributes:
        inner: the store that does the work; closed with this one.
        stats: the counters. Where the store below knows when reads end, ``busy_ns`` is its: a call that
            a thread waits for ends only when that thread asks.
    """

    def __init__(self, inner: WeightStore) -> None:
        super().__init__(inner)
        self.has_tickets = inner.has_tickets
        self.stats = _Counters(inner)
        self._outstanding = 0
        self._counted_until_ns = 0
        self._lock = threading.Lock()  # calls end on the event loop and in threads that wait for them

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        with self._metered(out.nbytes):
            await self.inner.read_range(layer, start, stop, out)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        with self._metered(len(ids) * self.geometry.stride_bytes):
            await self.inner.read_rows(layer, ids, out, rows, prefetch=prefetch)

    def start_rows(
        self,
        layer: int,
        ids: I64Array,
        out: U8Array,
        rows: I64Array | None,
        loop: asyncio.AbstractEventLoop,
        *,
        prefetch: bool = False,
        check: RowCheck | None = None,
    ) -> ReadTicket:
        """See ``WeightStore.start_rows``."""
        if not self.has_tickets:
            return super().start_rows(layer, ids, out, rows, loop, prefetch=prefetch)
        ticket = self.inner.start_rows(layer, ids, out, rows, loop, prefetch=prefetch, check=check)
        return _Ticket(self, ticket, len(ids) * self.geometry.stride_bytes)

    @property
    def busy_ns(self) -> int | None:
        """See ``WeightStore.busy_ns``."""
        return self.inner.busy_ns

    @contextmanager
    def _metered(self, nbytes: int) -> Iterator[None]:
        self._count_time(1)
        try:
            yield
        except asyncio.CancelledError:
            self._count_time(-1)
            self.count()
            raise
        except Exception:
            self._count_time(-1)
            self.count(failed=True)
            raise
        self._count_time(-1)
        self.count(nbytes)

    def count(self, nbytes: int = 0, *, failed: bool = False) -> None:
        """A call has ended."""
        with self._lock:
            self.stats.calls += 1
            self.stats.bytes_delivered += nbytes
            self.stats.errors += failed

    def _count_time(self, calls: int) -> None:
        """So many calls more are outstanding."""
        now_ns = time.perf_counter_ns()
        if self._outstanding:
            self.stats.own_busy_ns += now_ns - self._counted_until_ns
        self._counted_until_ns = now_ns
        self._outstanding += calls

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.inner.close()


class _Ticket(ReadTicket):
    """A call that a thread waits for."""

    __slots__ = ("_inner", "_nbytes", "_store")

    def __init__(self, store: MeteredStore, inner: ReadTicket, nbytes: int) -> None:
        self._store = store
        self._inner = inner
        self._nbytes = nbytes

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """See ``ReadTicket.wait``."""
        try:
            if not self._inner.wait(timeout_s):
                return False
        except Exception:
            self._store.count(failed=True)
            raise
        self._store.count(self._nbytes)
        return True
