"""The free run: a step's reads and kernels again, together and without waiting for each other.

Compute and flash can't both be as fast as alone where they share a machine's CPUs and memory; what a
step could reach at best is therefore measured: everything that steps have asked of the store and of the
kernels is recorded, then done once more, all reads at once beside all kernels one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from flashd import kernels
from flashd.disk.engine import ReadTicket, RowCheck
from flashd.disk.slabs import SlabBuffer
from flashd.kernels.lane import ComputeLane
from flashd.store.base import WeightStore, WrappedStore
from flashd.types import I64Array, U8Array

# Everything that a step computes with. Their other arguments only change what is computed, not how long
# it takes, but the down projection skips what is zero: its activations are kept.
_VERBS = (
    "attention", "crc32c", "ffn_dots", "ffn_down", "gemm", "gemv", "layernorm", "predict", "rmsnorm", "rope",
    "to_f32", "topk_union",
)  # fmt: skip
_HIDDEN = 4
# Where reads go when they are done once more.
ELSEWHERE_BYTES = 32 << 20


@dataclass
class Step:
    """What one step asked for.

    Attributes:
        reads: of the event loop.
        starts: reads that the compute lane has started.
        calls: of the kernels.
    """

    reads: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    starts: list[Callable[[], ReadTicket]] = field(default_factory=list)
    calls: list[Callable[[], Any]] = field(default_factory=list)


class Recorder:
    """Keeps the steps that are marked while it records.

    Attributes:
        steps: recorded so far, the last one growing.
        on: whether it records.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.on = False

    def next_step(self) -> None:
        """What comes now belongs to another step."""
        self.steps.append(Step())

    @property
    def recording(self) -> bool:
        """Whether there is a step to record now."""
        return self.on and bool(self.steps)

    def read(self, again: Callable[[], Awaitable[None]]) -> None:
        """Keep a read."""
        if self.recording:
            self.steps[-1].reads.append(again)

    def start(self, again: Callable[[], ReadTicket]) -> None:
        """Keep a read that a thread waits for by itself."""
        if self.recording:
            self.steps[-1].starts.append(again)

    @contextmanager
    def kernel_calls(self) -> Iterator[None]:
        """Keep the kernels' calls inside of the block as well."""
        module: ModuleType = kernels
        real = {name: getattr(module, name) for name in _VERBS}
        try:
            for name, verb in real.items():
                setattr(module, name, self._recorded(name, verb))
            yield
        finally:
            for name, verb in real.items():
                setattr(module, name, verb)

    def _recorded(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.recording:
                kept = args
                if name == "ffn_down":
                    kept = (*args[:_HIDDEN], args[_HIDDEN].copy(), *args[_HIDDEN + 1 :])
                self.steps[-1].calls.append(partial(verb, *kept, **kwargs))
            return verb(*args, **kwargs)

        return call


class RecordedStore(WrappedStore):
    """A store whose reads a recorder keeps. Done once more they go to memory of their own, where several
    may overlap: what a step has read stays as it is.

    It belongs below the store that checks rows.
    """

    def __init__(self, inner: WeightStore, recorder: Recorder) -> None:
        super().__init__(inner)
        self.has_tickets = inner.has_tickets
        self._recorder = recorder
        self._elsewhere: SlabBuffer | None = None

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        if self._recorder.recording:
            other = self._rows()[: stop - start]
            stop_there = start + len(other)
            self._recorder.read(lambda: self.inner.read_range(layer, start, stop_there, other))
        await self.inner.read_range(layer, start, stop, out)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        # As a demand read: guesses that give way to nothing would only be slower.
        if self._recorder.recording:
            other, places = self._places(ids, rows)
            self._recorder.read(lambda: self.inner.read_rows(layer, ids, other, places))
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
        if self._recorder.recording:
            other, places = self._places(ids, rows)
            # What overlaps is found wrong, which is nobody's business.
            checks = None if check is None else replace(check, trusted=check.trusted.copy())
            self._recorder.start(lambda: self.inner.start_rows(layer, ids, other, places, loop, check=checks))
        return self.inner.start_rows(layer, ids, out, rows, loop, prefetch=prefetch, check=check)

    def _rows(self) -> U8Array:
        stride = self.geometry.stride_bytes
        if self._elsewhere is None:
            nbytes = max(1, ELSEWHERE_BYTES // stride) * stride
            self._elsewhere = SlabBuffer(nbytes, self.inner)
            self._elsewhere.resize(nbytes)
        return self._elsewhere.memory.reshape(-1, stride)

    def _places(self, ids: I64Array, rows: I64Array | None) -> tuple[U8Array, I64Array]:
        """Rows elsewhere: neighbours stay neighbours, so that it takes the same reads."""
        other = self._rows()
        return other, (np.arange(len(ids)) if rows is None else rows) % len(other)

    @property
    def busy_ns(self) -> int | None:
        """See ``WeightStore.busy_ns``."""
        return self.inner.busy_ns

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        if self._elsewhere is not None:
            self._elsewhere.close()
        await self.inner.close()


async def free_run(steps: list[Step], lane: ComputeLane) -> list[float]:
    """Do what steps did once more; nothing that later steps need is changed.

    Returns:
        Seconds of each step.
    """
    seconds = []
    for step in steps:
        began_s = time.perf_counter()
        reads = [read() for read in step.reads]
        # All of them end before anything is said: what fails must not leave others in flight.
        results = await asyncio.gather(
            *reads,
            asyncio.to_thread(_all, [start().wait for start in step.starts]),
            lane.run(_all, step.calls),
            return_exceptions=True,
        )
        seconds.append(time.perf_counter() - began_s)
        for result in results:
            if isinstance(result, BaseException):
                raise result
    return seconds


def _all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()
