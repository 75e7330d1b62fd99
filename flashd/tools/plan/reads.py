"""How long the bundle's own reads take: scattered rows, alone and beside computing, and whole layers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median
from threading import Event
from time import perf_counter, sleep

import numpy as np

from flashd.disk.engine import ReadTicket
from flashd.disk.slabs import SlabBuffer
from flashd.kernels.lane import ComputeLane
from flashd.prefetch.stream import RING_BUFFERS, ring_slice_rows
from flashd.store.metered import MeteredStore
from flashd.tools.plan.facts import RowTimes
from flashd.types import I64Array

# Reads go to so much of the file, which is read once beforehand: the first pass over a file may be ten times
# slower than the second.
REGION_BYTES = 256 << 20
_BATCHES = (8, 32, 128, 512, 2048)
_LEAST_BATCHES = 5
_DRAWS = 16
# A batch is no larger: more rows than that take as much longer as they are more.
_MOST_BYTES = 64 << 20


class Reads:
    """Reads of a bundle's rows.

    Args:
        store: the bundle's, as the daemon opens it.
        lane: starts reads, as in the daemon.
        layers: layers to read from.
    """

    def __init__(self, store: MeteredStore, lane: ComputeLane, layers: Sequence[int]) -> None:
        geometry = store.geometry
        self._store = store
        self._lane = lane
        self._layers = list(layers)
        self._loop = asyncio.get_running_loop()
        self._rng = np.random.default_rng(2)
        self._half = max(1, min(geometry.n_neurons // 2, _MOST_BYTES // geometry.stride_bytes))
        n_rows = max(self._half, RING_BUFFERS * ring_slice_rows(geometry))
        self._memory = SlabBuffer(n_rows * geometry.stride_bytes, store)
        self._memory.resize(n_rows * geometry.stride_bytes)
        self._matrix = self._memory.memory.reshape(-1, geometry.stride_bytes)
        self._matrix[:] = 0  # touched now: page faults are not the device's
        self._count = 0
        self._made: dict[int, list[I64Array]] = {}

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    async def warm(self, limit_s: float) -> None:
        """Read the layers once, as far as the time goes."""
        began_s = perf_counter()
        for layer in self._layers:
            if perf_counter() - began_s > limit_s:
                return
            await self._whole(layer)

    async def layer_s(self, limit_s: float) -> float:
        """Seconds of reading a whole layer with nothing else to do."""
        taken_s: list[float] = []
        began_s = perf_counter()
        while not taken_s or perf_counter() - began_s < limit_s:
            start_s = perf_counter()
            await self._whole(self._layers[len(taken_s) % len(self._layers)])
            taken_s.append(perf_counter() - start_s)
        return median(taken_s)

    async def _whole(self, layer: int) -> None:
        """A layer in slices, as the daemon streams it."""
        geometry, rows = self._store.geometry, ring_slice_rows(self._store.geometry)

        async def some(first: int) -> None:
            for start in range(first * rows, geometry.n_neurons, RING_BUFFERS * rows):
                stop = min(start + rows, geometry.n_neurons)
                place = self._matrix[first * rows : first * rows + stop - start]
                await self._store.read_range(layer, start, stop, place)

        await asyncio.gather(*map(some, range(RING_BUFFERS)))

    async def rows(self, limit_s: float) -> RowTimes:
        """Batches of scattered rows, of sizes up to half of a layer, each waited for."""
        sizes = [size for size in _BATCHES if size < self._half] + [self._half]
        taken_s = [await self._lane.run(self._batches, size, limit_s / len(sizes)) for size in sizes]
        handling_s = await self._lane.run(self._handling_s, sizes[0], 2 * taken_s[0])
        return RowTimes(tuple(sizes), tuple(taken_s), handling_s)

    @property
    def n_layers(self) -> int:
        """Layers to read from."""
        return len(self._layers)

    async def batch_s(self, n_rows: int, limit_s: float = 0.15) -> float:
        """Mean seconds of a batch, alone, in a thread of its own."""
        end = Event()
        asyncio.get_running_loop().call_later(limit_s, end.set)
        return await self.beside(n_rows, end)

    async def beside(self, n_rows: int, end: Event) -> float:
        """Read batches one after the other in a thread of its own until ``end``; mean seconds of each."""
        return await asyncio.to_thread(self._until, n_rows, end)

    def _until(self, n_rows: int, end: Event) -> float:
        self._ids(n_rows)
        began_s, count = perf_counter(), 0
        while not count or not end.is_set():
            self._batch(n_rows)
            count += 1
        return (perf_counter() - began_s) / count

    def _batches(self, n_rows: int, limit_s: float) -> float:
        self._ids(n_rows)
        taken_s: list[float] = []
        began_s = perf_counter()
        while len(taken_s) < _LEAST_BATCHES or perf_counter() - began_s < limit_s:
            start_s = perf_counter()
            self._batch(n_rows)
            taken_s.append(perf_counter() - start_s)
        return median(taken_s)

    def _batch(self, n_rows: int) -> None:
        self._start(n_rows).wait()

    def _start(self, n_rows: int) -> ReadTicket:
        layer = self._layers[int(self._rng.integers(len(self._layers)))]
        self._count += 1
        ids = self._ids(n_rows)
        return self._store.start_rows(layer, ids, self._matrix, np.arange(n_rows), self._loop)

    def _handling_s(self, n_rows: int, meanwhile_s: float) -> float:
        """Seconds of starting a batch and of taking note that it has ended some time later."""
        taken_s = []
        for _ in range(_DRAWS):
            began_s = perf_counter()
            ticket = self._start(n_rows)
            started_s = perf_counter()
            sleep(meanwhile_s)
            slept_s = perf_counter()
            ticket.wait()
            taken_s.append(started_s - began_s + perf_counter() - slept_s)
        return median(taken_s)

    def _ids(self, n_rows: int) -> I64Array:
        """Different neurons each time; made beforehand, because drawing them takes as long as reading."""
        if n_rows not in self._made:
            n = self._store.geometry.n_neurons
            draws = [self._rng.choice(n, n_rows, replace=False) for _ in range(_DRAWS)]
            self._made[n_rows] = [np.sort(draw).astype(np.int64) for draw in draws]
        return self._made[n_rows][self._count % _DRAWS]
