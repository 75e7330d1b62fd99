"""Whole-layer streaming: the FFN of every neuron, read slice by slice ahead of the computation.

::

    flash : [L0 s0][L0 s1][L1 s0][L1 s1] ...   reads go ahead cyclically, while a buffer is free
    lane  : attn 0 | [s0][s1] | attn 1 | [s0][s1] | attn 2 ...

A slice is a fixed number of rows, whatever memory there is, so results do not depend on it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from flashd.config import MAX_BATCH
from flashd.disk.buffers import aligned_empty
from flashd.kernels.lane import ComputeLane
from flashd.layout.geometry import LAYER_ALIGN_BYTES, MIN_STRIDE_ALIGN_BYTES, round_up
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.stats import StreamStats
from flashd.store.base import WeightStore
from flashd.types import Activation, BoolArray, F32Array, FFNGeometry, I64Array, U8Array

RING_BYTES = 16 << 20
RING_BUFFERS = 4
_ROWS_PER_ALIGNED_GROUP = LAYER_ALIGN_BYTES // MIN_STRIDE_ALIGN_BYTES


class LayerJob:
    """What is read and computed of the slices of one layer: here, all of it.

    Args:
        dense: the math.
        mask: ``bool[tokens, n_neurons]``, which token uses which neuron; None: all are used.
    """

    def __init__(self, dense: DenseFFN, mask: BoolArray | None) -> None:
        self._dense = dense
        self._mask = mask

    def picks(self, start: int, stop: int) -> I64Array | None:
        """Neurons to read of a slice that is not in the ring yet, ascending; None: all of it."""
        return None

    def compute(self, piece: Slice, weights: SliceWeights, x: F32Array, acc: F32Array) -> None:
        """Add a slice, in ascending order, to ``acc [tokens, d]``; on the lane."""
        where = slice(piece.start, piece.start + len(piece.rows))
        used = None if self._mask is None else np.ascontiguousarray(self._mask[:, where])
        self._dense.add(weights, x, acc, used)


# What to do with a layer, given its FFN input; called on the lane.
Plan = Callable[[F32Array], LayerJob]


class Planner(Protocol):
    """What is expected of layers with a plan."""

    @property
    def layers(self) -> Collection[int]:
        """These layers."""
        ...

    def streams(self, layer: int, tokens: int) -> bool:
        """Whether a chunk of so many tokens will probably need most of a layer."""
        ...


@dataclass(frozen=True)
class Slice:
    """A buffer of the ring, and the read that fills it with neurons of one layer.

    Attributes:
        layer: layer index.
        start: first neuron.
        rows: ``[n, stride_bytes]``, neuron ``start + i`` in row ``i``.
        whole: whether all rows are read, or only those that the job has picked.
        buffer: the memory.
        read: the read.
    """

    layer: int
    start: int
    rows: U8Array
    whole: bool
    buffer: U8Array
    read: asyncio.Task[None]


class StreamingFFN:
    """An ``FFNSource`` that reads each layer's rows from a store when it needs them.

    Attributes:
        layers: those that are read ahead, ascending; others are read when they are asked for. May be
            changed between two calls.
        planner: of layers that prompts, and nobody else, bring here with a plan; None where there are none.
        stats: time that computing waited for flash, and slices computed.
        slice_rows: neurons per slice.
        ring_bytes: memory of the buffers.
        why_unregistered: why they are not registered with the read engine; empty if they are.
    """

    def __init__(
        self,
        store: WeightStore,
        lane: ComputeLane,
        activation: Activation,
        up_bias: Sequence[F32Array | None],
        gate_bias: Sequence[F32Array | None],
        *,
        thresholds: Sequence[float] = (),
        layers: Sequence[int] | None = None,
        dense: DenseFFN | None = None,
        stats: StreamStats | None = None,
        ring_bytes: int | None = None,
        n_buffers: int = RING_BUFFERS,
    ) -> None:
        """Args:
        store: where the rows are; stays the caller's to close.
        lane: where the math runs.
        activation: of the hidden units.
        up_bias: per layer ``[n_neurons]`` or None.
        gate_bias: per layer ``[n_neurons]`` or None.
        thresholds: per layer, activations up to it count as zero; empty: 0 for all.
        layers: those to read ahead; None: all.
        dense: the math of a slice; None: ``DenseFFN``.
        stats: counts the time that computing waits for flash, and slices.
        ring_bytes: memory for buffers. A slice is ``ring_bytes / n_buffers`` at most; None: what
            ``ring_slice_rows`` says.
        n_buffers: slices that are read or computed at the same time, at least 2.
        """
        geometry = store.geometry
        if n_buffers < 2 or (ring_bytes is not None and ring_bytes < n_buffers * geometry.stride_bytes):
            raise ValueError(f"{n_buffers} buffers of {ring_bytes} bytes in all; a slice needs a row")
        if not len(up_bias) == len(gate_bias) == geometry.n_layers:
            raise ValueError(f"{len(up_bias)} and {len(gate_bias)} biases for {geometry.n_layers} layers")
        self.stats = stats or StreamStats()
        self.layers = tuple(range(geometry.n_layers) if layers is None else layers)
        self.planner: Planner | None = None
        if ring_bytes is None:
            self.slice_rows = ring_slice_rows(geometry)
        else:
            self.slice_rows = slice_rows(geometry, ring_bytes // n_buffers)
        slice_bytes = self.slice_rows * geometry.stride_bytes
        alignment = max(LAYER_ALIGN_BYTES, store.alignment_bytes)
        step = round_up(slice_bytes, alignment)
        self._ring_memory = aligned_empty(n_buffers * step, alignment, huge_pages=True)
        self._free = [self._ring_memory[i * step : i * step + slice_bytes] for i in range(n_buffers)]
        self.ring_bytes = n_buffers * slice_bytes
        self.why_unregistered = store.register(self._ring_memory)
        self._store = store
        self._lane = lane
        self._dense = dense or DenseFFN(geometry, activation)
        self._up_bias = list(up_bias)
        self._gate_bias = list(gate_bias)
        self._thresholds = list(thresholds) or [0.0] * geometry.n_layers
        self._ring: deque[Slice] = deque()  # in the order of reading and of computing
        # Layer and first neuron of the slice to read next; none where no layer is read ahead.
        self._next: tuple[int, int] | None = (0, 0)
        self._job: tuple[int, LayerJob] | None = None  # of the layer that is being computed
        self._tokens = 0  # of the last input
        self._broken = False  # what the ring holds is of no use, e.g. because a read failed
        self._computing: asyncio.Task[None] | None = None
        self._closed = False
        self._lock = asyncio.Lock()

    async def apply(
        self,
        layer: int,
        x: Callable[[], F32Array],
        mask: Callable[[F32Array], BoolArray | None] | None = None,
        *,
        plan: Plan | None = None,
    ) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``. Any layer may be asked for; ascending order is fast.

        Cancelling it leaves the source usable, and so does a failed read.

        Args:
            layer: as for ``FFNSource.apply``.
            x: likewise.
            mask: called with the input on the lane, in the same call: ``bool[tokens, n_neurons]``, which
                token uses which neuron. None, or None as its result: all are used.
            plan: called instead of ``mask``: which slices are not read whole, too. What has been read ahead
                has been read whole.

        Raises:
            BundleCorruptError, DiskReadError: a row could not be read.
            ValueError: the source is closed, or ``x`` is not ``[tokens, d_model]``.
        """
        geometry = self._store.geometry
        if self._closed:
            raise ValueError("the streaming source is closed")
        if not 0 <= layer < geometry.n_layers:
            raise ValueError(f"layer {layer}, expected 0 to {geometry.n_layers - 1}")
        if plan is None:
            plan = partial(self._plan, mask)
        async with self._lock:
            if layer in self.layers:
                await self._seek(layer)
            made, job = await self._lane.run(self._input, x, plan)
            self._job = layer, job
            try:
                await self._seek(layer)
                acc = np.zeros(made.shape, np.float32)
                for _ in range(0, geometry.n_neurons, self.slice_rows):
                    await self._arrived(self._ring[0])
                    await self._compute(self._ring[0], job, made, acc)
                    self._free.append(self._ring.popleft().buffer)
                    self._read_ahead()
            except BaseException:
                # What was read in part is of no use to another job.
                self._broken |= not all(piece.whole for piece in self._ring)
                raise
            finally:
                self._job = None
        return lambda: acc

    def _plan(self, mask: Callable[[F32Array], BoolArray | None] | None, x: F32Array) -> LayerJob:
        return LayerJob(self._dense, None if mask is None else mask(x))

    def _input(self, x: Callable[[], F32Array], plan: Plan) -> tuple[F32Array, LayerJob]:
        """The FFN's input and what to do with it; on the lane."""
        made, d = x(), self._store.geometry.d_model
        if made.ndim != 2 or made.shape[1] != d:
            raise ValueError(f"x is {list(made.shape)}, expected [tokens, {d}]")
        made = np.ascontiguousarray(made, dtype=np.float32)
        self._tokens = len(made)
        return made, plan(made)

    async def close(self) -> None:
        """Wait for reads and math in flight, then drop the buffers. Idempotent."""
        self._closed = True
        async with self._lock:
            await self._drain()
            self._free.clear()
            self._store.unregister(self._ring_memory)
            self._ring_memory = self._ring_memory[:0].copy()

    async def _seek(self, layer: int) -> None:
        """Make the first slice of ``layer`` the head of the ring."""
        head = self._ring[0] if self._ring else None
        if self._broken or head is None or (head.layer, head.start) != (layer, 0):
            await self._drain()
            self._next = (layer, 0)
            self._broken = False
        self._read_ahead()

    async def _drain(self) -> None:
        """Empty the ring. A buffer is free only when neither a read nor the lane touches it, so
        both are waited for, whoever gave up on them; being cancelled in here loses nothing."""
        if self._computing is not None:
            await asyncio.wait([self._computing])
            self._computing = None
        while self._ring:
            read = self._ring[0].read
            await asyncio.wait([read])
            if not read.cancelled():
                read.exception()  # seen: it belongs to nobody any more
            self._free.append(self._ring.popleft().buffer)

    def _read_ahead(self) -> None:
        """Start reads while there are free buffers: the next slices, the next layers, and after
        the last layer the first one, for the next step."""
        geometry = self._store.geometry
        while self._free and self._next is not None and not self._closed:
            layer, start = self._next
            stop = min(start + self.slice_rows, geometry.n_neurons)
            buffer = self._free.pop()
            count = stop - start
            rows = buffer[: count * geometry.stride_bytes].reshape(count, geometry.stride_bytes)
            job = self._job[1] if self._job is not None and self._job[0] == layer else None
            picks = None if job is None else job.picks(start, stop)
            read = asyncio.create_task(
                self._store.read_range(layer, start, stop, rows)
                if picks is None
                else _read_rows(self._store, layer, picks, rows, start)
            )
            self._ring.append(Slice(layer, start, rows, picks is None, buffer, read))
            self._next = self._after(layer) if stop == geometry.n_neurons else (layer, stop)

    def _after(self, layer: int) -> tuple[int, int] | None:
        """Where to read on after a layer: at the next one that will come here, if that will be streamed."""
        planner = self.planner
        if planner is None or self._tokens <= MAX_BATCH:  # only the streamed ones come here
            following = [i for i in self.layers if i > layer] or self.layers
            return (following[0], 0) if following else None
        coming = sorted({*self.layers, *planner.layers})
        later = next((i for i in coming if i > layer), None)
        if later is not None and (later in self.layers or planner.streams(later, self._tokens)):
            return later, 0
        # Behind the last layer nobody knows whether the prompt has another chunk.
        return (coming[0], 0) if later is None and coming[0] in self.layers else None

    async def _arrived(self, piece: Slice) -> None:
        """Wait for a slice's read. Cancelling the wait leaves the read alone."""
        if not piece.read.done():
            waiting_since_ns = time.perf_counter_ns()
            try:
                await asyncio.wait([piece.read])
            finally:
                self.stats.wait_ns += time.perf_counter_ns() - waiting_since_ns
        try:
            piece.read.result()
        except BaseException:
            self._broken = True
            raise

    async def _compute(self, piece: Slice, job: LayerJob, x: F32Array, acc: F32Array) -> None:
        """Run a slice on the lane, which goes on when the wait is cancelled: ``_drain`` and the
        lane's order keep the buffer from being read into meanwhile."""
        where = slice(piece.start, piece.start + len(piece.rows))
        up, gate = self._up_bias[piece.layer], self._gate_bias[piece.layer]
        weights = SliceWeights(
            piece.rows,
            None if up is None else up[where],
            None if gate is None else gate[where],
            self._thresholds[piece.layer],
        )
        self._computing = asyncio.create_task(_run(self._lane, job.compute, piece, weights, x, acc))
        await asyncio.shield(self._computing)
        self._computing = None
        self.stats.slices += 1
        self.stats.partial_slices += not piece.whole


async def _run(lane: ComputeLane, fn: Any, *args: Any) -> None:
    await lane.run(fn, *args)


async def _read_rows(store: WeightStore, layer: int, ids: I64Array, rows: U8Array, start: int) -> None:
    if len(ids):
        await store.read_rows(layer, ids, rows, ids - start)


def ring_slice_rows(geometry: FFNGeometry) -> int:
    """Rows per slice where nobody says otherwise: the ring holds at most one layer, so that a small model
    needs a small one."""
    rows = slice_rows(geometry, RING_BYTES // RING_BUFFERS)
    quarter = round_up(-(-geometry.n_neurons // RING_BUFFERS), _ROWS_PER_ALIGNED_GROUP)
    return min(rows, quarter, geometry.n_neurons)


def slice_rows(geometry: FFNGeometry, limit_bytes: int) -> int:
    """Rows per slice: as many as fit, the same for a stride of 512 and of 4096 (so that the mount
    a model was converted on does not show in its results), and such that every slice of a layer
    starts on 4096 in the file, whatever the stride."""
    row = max(geometry.stride_bytes, round_up(geometry.row_bytes, LAYER_ALIGN_BYTES))
    rows = max(1, limit_bytes // row)
    if rows > _ROWS_PER_ALIGNED_GROUP:
        rows -= rows % _ROWS_PER_ALIGNED_GROUP
    return min(rows, geometry.n_neurons)
