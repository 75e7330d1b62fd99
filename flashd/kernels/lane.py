"""The compute lane: one worker thread on which all kernels run, in order of submission.

The kernels use all cores inside one call, so more than one lane would only make them compete.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar

from flashd.stats import LaneStats

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Job(NamedTuple):
    call: Callable[[], Any]
    memory: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class _Work(ABC):
    """A part of a call that is timed. Several a layer: a generator would take ten times as long."""

    __slots__ = ("_since_ns", "stats")

    def __init__(self, stats: LaneStats) -> None:
        self.stats = stats

    def __enter__(self) -> None:
        self._since_ns = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self.spent(time.perf_counter_ns() - self._since_ns)

    @abstractmethod
    def spent(self, time_ns: int) -> None:
        """Count it."""


class _MemoryWork(_Work):
    __slots__ = ()

    def spent(self, time_ns: int) -> None:
        self.stats.memory_ns += time_ns
        self.stats.compute_ns -= time_ns


class _AttentionWork(_Work):
    __slots__ = ()

    def spent(self, time_ns: int) -> None:
        self.stats.attention_ns += time_ns


class ComputeLane:
    """Runs calls one after the other on its thread; counts what they cost.

    Attributes:
        stats: nanoseconds by kind of work; written by the lane's thread only.
    """

    def __init__(self) -> None:
        self.stats = LaneStats()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        # A daemon thread does not hold up the interpreter's exit, and the exit hook ends it while
        # it can still be ended: a thread caught inside a kernel later would abort the process.
        self._thread = threading.Thread(target=self._work, name="flashd-lane", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def closed(self) -> bool:
        """Whether the lane ends when what was submitted has ended."""
        return self._closed

    async def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        kind: Literal["compute", "memory"] = "compute",
    ) -> T:
        """Run ``fn(*args)`` on the lane and return its result.

        Cancelling the await does not stop the call: it runs to its end on the lane, and an exception
        that nobody waits for any more is logged.

        Args:
            fn: what to run.
            *args: its arguments.
            kind: which cost it counts as: math, or moving rows about.

        Raises:
            RuntimeError: the lane is closed.
        """
        if self._closed:
            raise RuntimeError("the compute lane is closed; nothing can run on it any more")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(lambda: fn(*args), kind == "memory", loop, future))
        return await future

    def memory_work(self) -> _MemoryWork:
        """Inside a compute call on the lane: count this part of it as memory (window, KV) upkeep."""
        return _MemoryWork(self.stats)

    def attention_work(self) -> _AttentionWork:
        """Inside a compute call on the lane: count this part of it as attention over the KV cache, too."""
        return _AttentionWork(self.stats)

    def close(self) -> None:
        """Finish what was submitted, then end the thread. Blocks until then. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            atexit.unregister(self.close)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result, error = None, None
            start_ns = time.perf_counter_ns()
            try:
                result = job.call()
            except BaseException as exc:
                error = exc
            spent_ns = time.perf_counter_ns() - start_ns
            if job.memory:
                self.stats.memory_ns += spent_ns
            else:
                self.stats.compute_ns += spent_ns
            try:
                job.loop.call_soon_threadsafe(_deliver, job.future, result, error)
            except RuntimeError:  # the loop was closed while the lane worked
                _report(error)
            # Arrays of the last job must not live until the next one arrives.
            del job, result, error


def _deliver(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        _report(error)
    elif error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _report(error: BaseException | None) -> None:
    if error is not None:
        _log.error("a call on the compute lane failed after its caller was gone", exc_info=error)
