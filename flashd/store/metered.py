"""A wrapper that counts what another store reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flashd.stats import CheckStats, StoreStats
from flashd.store.base import WeightStore, WrappedStore
from flashd.types import I64Array, U8Array


class MeteredStore(WrappedStore):
    """Counts calls, bytes delivered, errors and the time with at least one call outstanding, and
    collects what the stores below count.

    Attributes:
        inner: the store that does the work; closed with this one.
        stats: the counters. ``busy_ns`` grows whenever a call starts or ends, ``device`` when one ends.
    """

    def __init__(self, inner: WeightStore) -> None:
        super().__init__(inner)
        self.stats = StoreStats(checks=inner.check_stats or CheckStats())
        self._outstanding = 0
        self._counted_until_ns = 0

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

    @contextmanager
    def _metered(self, nbytes: int) -> Iterator[None]:
        self._count_time()
        self._outstanding += 1
        try:
            yield
            self.stats.bytes_delivered += nbytes
        except asyncio.CancelledError:
            raise
        except Exception:
            self.stats.errors += 1
            raise
        finally:
            self._count_time()
            self._outstanding -= 1
            self.stats.calls += 1
            self.stats.device = self.inner.read_stats or self.stats.device

    def _count_time(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._outstanding:
            self.stats.busy_ns += now_ns - self._counted_until_ns
        self._counted_until_ns = now_ns

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.inner.close()
