"""A wrapper that compares rows with their checksums as they are read.

What was damaged before the daemon started is found at first use, before a kernel sees it. What is
damaged later is found at the next read of the row where checking is cheap beside the step, else when
the row's turn comes (``CheckBudget``), and always at the next read where that is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashd import kernels
from flashd.disk.engine import FOREVER_S, Checked, ReadTicket, RowCheck
from flashd.errors import BundleCorruptError
from flashd.layout.manifest import BUNDLE, ZARR
from flashd.stats import CheckStats
from flashd.store.base import WeightStore, WrappedStore
from flashd.store.check_budget import CheckBudget, Sample
from flashd.types import BoolArray, I64Array, U8Array, U32Array

log = logging.getLogger("flashd.store")

# Less is done at once on the event loop: handing it to the thread would take as long.
_INLINE_NS = 150_000

_NONE: I64Array = np.empty(0, np.int64)


class _Rows(NamedTuple):
    """What one read was asked for: ``n`` neurons of a layer, a range or ids ``[n]``, and where in
    ``out`` they are: rows ``[n]``, or one behind the other."""

    layer: int
    where: slice | I64Array
    n: int
    out: U8Array
    rows: I64Array | None = None

    def neurons(self, places: I64Array | None) -> slice | I64Array:
        """Those at some places, or all, as an index of the layer."""
        if places is None:
            return self.where
        return self.where.start + places if isinstance(self.where, slice) else self.where[places]


class _Plan(NamedTuple):
    """Which rows of a read are checked (None: all), and what was reserved for those that need not be."""

    places: I64Array | None
    n_must: int
    reserved_ns: float = 0.0


class _Wrong(NamedTuple):
    """How many neurons' bytes differ from their checksum, and the first of them."""

    n: int
    first: int

    @classmethod
    def of(cls, neurons: I64Array) -> _Wrong:
        """Of some neurons."""
        return cls(len(neurons), int(neurons[0]) if len(neurons) else -1)


class CheckedStore(WrappedStore):
    """Compares rows with their checksums; a mismatch is read again once, then it is an error.

    Each row is checked at its first read, and at every one after it was found wrong until it is right.

    Args:
        inner: the store that does the work; closed with this one.
        sums: CRC32C of every row, ``[n_layers, n_neurons]``.
        directory: the bundle, for messages.
        every_read: check every row at every read, whatever it costs.
        budget: how many rows to check otherwise.

    Attributes:
        stats: what was checked and found.
    """

    def __init__(
        self,
        inner: WeightStore,
        sums: U32Array,
        directory: Path,
        *,
        every_read: bool = False,
        budget: CheckBudget | None = None,
    ) -> None:
        super().__init__(inner)
        self.has_tickets = inner.has_tickets
        self.stats = CheckStats()
        self._sums = sums
        self._file = directory / (ZARR if inner.name.startswith("zarr") else BUNDLE)
        self._every_read = every_read
        self._row_bytes = inner.geometry.stride_bytes
        self._budget = budget or CheckBudget()
        self._trusted = np.zeros(sums.shape, np.bool_)
        # By layer; making a view takes longer than using one.
        self._sums_of, self._trusted_of = list(sums), list(self._trusted)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flashd-check")
        self._lock = (
            threading.Lock()
        )  # of counters: rows are checked on the loop, and by who waits for a ticket
        self._n_reads = 0  # that have begun and not ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def check_stats(self) -> CheckStats:
        """See ``WeightStore.check_stats``."""
        return self.stats

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``.

        Cancelling it waits until the checks let go of ``out``.

        Raises:
            BundleCorruptError: also when a row isn't what was written.
        """

        async def read() -> None:
            await self.inner.read_range(layer, start, stop, out)

        with self._counted():
            await read()
            await self._check(_Rows(layer, slice(start, stop), stop - start, out), read)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``.

        Cancelling it waits until the checks let go of ``out``.

        Raises:
            BundleCorruptError: also when a row isn't what was written.
        """

        async def read() -> None:
            await self.inner.read_rows(layer, ids, out, rows, prefetch=prefetch)

        with self._counted():
            await read()
            await self._check(_Rows(layer, ids, len(ids), out, rows), read)

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
        """See ``WeightStore.start_rows``. Where the store below has tickets, the thread that reads checks the
        rows, or where it does not, whoever waits for them."""
        if not self.has_tickets:
            return super().start_rows(layer, ids, out, rows, loop, prefetch=prefetch)
        if self._closed:
            raise ValueError(f"{self._file}: the store is closed")
        if not 0 <= layer < self.geometry.n_layers:
            raise IndexError(f"layer {layer} of {self.geometry.n_layers}")

        def start(check: RowCheck) -> ReadTicket:
            return self.inner.start_rows(layer, ids, out, rows, loop, prefetch=prefetch, check=check)

        return _Ticket(self, _Rows(layer, ids, len(ids), out, rows), start)

    @property
    def busy_ns(self) -> int | None:
        """See ``WeightStore.busy_ns``."""
        return self.inner.busy_ns

    async def close(self) -> None:
        """See ``WeightStore.close``; waits for checks, too."""
        self._closed = True
        # A read that has found a wrong row still needs the inner store to read it again.
        await self._idle.wait()
        await self.inner.close()
        self._thread.shutdown()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._closed:
            raise ValueError(f"{self._file}: the store is closed")
        self._n_reads += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_reads -= 1
            if not self._n_reads:
                self._idle.set()

    async def _check(self, rows: _Rows, read_again: Callable[[], Awaitable[None]]) -> None:
        """Check what was read; once something was wrong, everything that is read in its place."""
        plan = self._plan(rows)
        bad = await self._wrong(rows, plan)
        if not bad.size:
            return
        with self._lock:
            self.stats.rereads += 1
            self.stats.rows += rows.n
        await read_again()
        still_bad = await self._wrong(rows, _Plan(None, rows.n))
        self.judge(rows, _Wrong.of(bad), _Wrong.of(still_bad))

    def plan_check(self, rows: _Rows, *, again: bool = False) -> tuple[Sample, RowCheck]:
        """What of a read to check where that is done by whoever reads, and what was reserved for it; of one
        that is made again because something was wrong, everything."""
        n, layer, stats = rows.n, rows.layer, self.stats
        with self._lock:
            stats.rows += n
            stats.rereads += again
            everything = self._every_read or again
            sample = Sample(0, n, 0.0) if everything else self._budget.sample(n, self._row_bytes)
        return sample, RowCheck(self._sums_of[layer], self._trusted_of[layer], sample.start, sample.count)

    def found(self, rows: _Rows, sample: Sample, checked: Checked | None) -> _Wrong:
        """What has come of a check; made in this thread where whoever has read did not."""
        if checked is None:
            return _Wrong.of(self._checked_here(rows, sample))
        n_rows, n_untrusted, n_wrong, first_wrong, time_ns = checked
        row_bytes, stats = self._row_bytes, self.stats
        must = n_rows if self._every_read else n_untrusted
        with self._lock:
            if n_rows:
                self._budget.settle(time_ns, n_rows * row_bytes, must * row_bytes, sample.reserved_ns)
            stats.checked_rows += n_rows
            stats.mismatched_rows += n_wrong
            stats.check_ns += time_ns
        return _Wrong(n_wrong, first_wrong)

    def _checked_here(self, rows: _Rows, sample: Sample) -> I64Array:
        plan = self._plan_of(rows, sample)
        n_checked = rows.n if plan.places is None else len(plan.places)
        if not n_checked:
            return _NONE
        got = np.empty(n_checked, np.uint32)
        return self._judged(rows, plan, got, _sum(rows, got, plan.places))

    def judge(self, rows: _Rows, wrong: _Wrong, still_wrong: _Wrong) -> None:
        """Neurons that were wrong at first, and those that are wrong again: is that an error?"""
        if still_wrong.n:
            raise BundleCorruptError(
                f"{self._file}: layer {rows.layer}, neuron {still_wrong.first}: checksum mismatch "
                f"({still_wrong.n} of {rows.n} rows); see `flashd verify`, then copy the bundle again or "
                "convert again"
            )
        log.warning(
            "%s: layer %d, neuron %d: checksum mismatch (%d of %d rows), right when read again; "
            "check the device (dmesg) and the memory",
            *(self._file, rows.layer, wrong.first, wrong.n, rows.n),
        )

    def _plan(self, rows: _Rows) -> _Plan:
        """First reads and suspects, and of the others as many as there is time for."""
        with self._lock:
            self.stats.rows += rows.n
            trusted = self._trusted[rows.layer][rows.where]
            all_of_them = self._every_read or not trusted.any()
            sample = None if all_of_them else self._budget.sample(rows.n, self._row_bytes)
        return _Plan(None, rows.n) if sample is None else self._plan_of(rows, sample)

    def _plan_of(self, rows: _Rows, sample: Sample) -> _Plan:
        """First reads and suspects beside a sample."""
        trusted: BoolArray = self._trusted[rows.layer][rows.where]
        n_must = rows.n - int(np.count_nonzero(trusted))
        if n_must == rows.n or sample.count == rows.n:
            return _Plan(None, rows.n if self._every_read else n_must, sample.reserved_ns)
        places: I64Array = np.arange(sample.start, sample.start + sample.count)
        if sample.start + sample.count > rows.n:
            places %= rows.n
        if n_must:
            selected = ~trusted
            selected[places] = True
            places = np.flatnonzero(selected)
        return _Plan(places, n_must, sample.reserved_ns)

    async def _wrong(self, rows: _Rows, plan: _Plan) -> I64Array:
        """Neurons whose bytes differ from their checksum; the others of the plan are trusted now."""
        row_bytes = self._row_bytes
        n_checked = rows.n if plan.places is None else len(plan.places)
        if not n_checked:
            return _NONE
        got = np.empty(n_checked, np.uint32)
        if n_checked * row_bytes * self._budget.ns_per_byte <= _INLINE_NS:
            spent_ns = _sum(rows, got, plan.places)
        else:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._thread, _sum, rows, got, plan.places)
            spent_ns = await _to_its_end(work)
        return self._judged(rows, plan, got, spent_ns)

    def _judged(self, rows: _Rows, plan: _Plan, got: U32Array, spent_ns: int) -> I64Array:
        """Neurons whose sum ``got`` is wrong; counts what was checked."""
        bad = self._compare(rows, got, plan.places)
        row_bytes = self._row_bytes
        with self._lock:
            nbytes, must = len(got) * row_bytes, plan.n_must * row_bytes
            self._budget.settle(spent_ns, nbytes, must, plan.reserved_ns)
            self.stats.checked_rows += len(got)
            self.stats.mismatched_rows += bad.size
            self.stats.check_ns += spent_ns
        return bad

    def _compare(self, rows: _Rows, got: U32Array, places: I64Array | None) -> I64Array:
        expected, trusted = self._sums[rows.layer], self._trusted[rows.layer]
        neurons = rows.neurons(places)
        right = got == expected[neurons]
        trusted[neurons] = True
        if right.all():
            return _NONE
        wrong: I64Array = np.arange(len(expected))[neurons][~right]
        trusted[wrong] = False
        return wrong


class _Ticket(ReadTicket):
    """Rows that are checked as they arrive, or by whoever waits for them."""

    __slots__ = ("_first", "_inner", "_plan", "_rows", "_start", "_store")

    def __init__(self, store: CheckedStore, rows: _Rows, start: Callable[[RowCheck], ReadTicket]) -> None:
        self._store = store
        self._rows = rows
        self._start = start
        self._first: _Wrong | None = None  # of the first read, once `_inner` is the second
        self._plan, check = store.plan_check(rows)
        self._inner = start(check)

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """See ``ReadTicket.wait``. Reading again may take as long once more."""
        if not self._inner.wait(timeout_s):
            return False
        wrong = self._store.found(self._rows, self._plan, self._inner.checked)
        if self._first is not None:
            self._store.judge(self._rows, self._first, wrong)
        elif wrong.n:
            self._first = wrong
            self._plan, check = self._store.plan_check(self._rows, again=True)
            self._inner = self._start(check)
            return self.wait(timeout_s)
        return True


def _sum(rows: _Rows, got: U32Array, places: I64Array | None) -> int:
    """CRC32C of the rows at ``places`` into ``got``; CPU time in ns."""
    start_ns = time.thread_time_ns()
    index = rows.rows
    if places is not None:
        index = places if index is None else index[places]
    kernels.crc32c(rows.out, got, index)
    return time.thread_time_ns() - start_ns


async def _to_its_end(work: asyncio.Future[Any]) -> Any:
    """Wait for work that cannot be stopped; a cancellation is raised when it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return work.result()
