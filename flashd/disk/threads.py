"""Backend ``threads``: O_DIRECT and preadv on a small thread pool.

A batch is cut into as many runs of pieces as there are threads; each run costs one queue entry
and one Python call, and the batch wakes the event loop once. (One Python call per read would
cost 67 us of CPU each; per run it is about 24.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable

from flashd.disk.pieces import cut_evenly
from flashd.disk.pooled import PooledEngine, Transfer, open_readonly

DEFAULT_THREADS = 32


class ThreadsEngine(PooledEngine):
    """Reads past the page cache. Threads start with the first batch."""

    name = "threads"
    direct = True

    def __init__(
        self, path: str, alignment_bytes: int, reason: str = "asked for", n_threads: int = DEFAULT_THREADS
    ) -> None:
        super().__init__(open_readonly(path, os.O_DIRECT), path, alignment_bytes, reason)
        self._n_threads = n_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def _run(self, transfer: Transfer) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        runs = cut_evenly(len(transfer.pieces), self._n_threads)
        countdown = _Countdown(len(runs), loop, done)
        self._start_threads(len(runs))
        for start, stop in runs:
            self._jobs.put(_Job(self, transfer, start, stop, countdown))
        await done

    def _start_threads(self, wanted: int) -> None:
        """A machine that only ever streams needs few threads; random reads need all."""
        while len(self._threads) < min(wanted, self._n_threads):
            name = f"flashd-read-{len(self._threads)}"
            # Daemon: an engine that nobody closed must not keep the process from ending.
            thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    async def _release(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        # Immediate, as no job is left; at a loop's teardown, when even the tasks that wait for
        # reads get cancelled, this is what keeps the descriptor open until the reads have ended.
        for thread in self._threads:
            thread.join()
        os.close(self._file.fd)


class _Countdown:
    """Settles one future when the last run of a batch has ended."""

    def __init__(self, runs: int, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        self._left = runs
        self._loop = loop
        self._done = done
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            last = self._left == 0
        if last:
            # A loop that was closed meanwhile has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if self._done.cancelled():
            return
        if self._error is not None:
            self._done.set_exception(self._error)
        else:
            self._done.set_result(None)


class _Job:
    """One run of pieces, as it lies in the queue."""

    __slots__ = ("_countdown", "_engine", "_start", "_stop", "_transfer")

    def __init__(
        self, engine: ThreadsEngine, transfer: Transfer, start: int, stop: int, countdown: _Countdown
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._start = start
        self._stop = stop
        self._countdown = countdown

    def __call__(self) -> None:
        error: BaseException | None = None
        try:
            self._engine.read_run(self._transfer, self._start, self._stop)
        except BaseException as exc:
            error = exc
        self._countdown.ended(error)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # An idle thread must not keep the last batch's destination alive.
        del job
