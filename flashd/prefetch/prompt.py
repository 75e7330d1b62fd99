"""A prompt's chunk through layers with a mask (LLM in a flash, sections 3.1 and 4.1).

Its tokens together need the union of their neurons. Slice by slice, through the ring of the streamed
FFN, either all rows are read, or those that are requested and not in the window::

    flash : [slice 0: all][slice 1: 37 rows][slice 2: all] ...
    lane  : attn, masks, plan | [slice 0][rows of the window | slice 1][slice 2] ...

Which of the two is a question of time alone: either way the requested neurons are computed, each token's own,
in ascending order. What the last tokens requested goes into the window as the slices pass by, so that the
first decoded token finds it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashd.disk.curve import DeviceCurve
from flashd.kernels.lane import ComputeLane
from flashd.layout.calibration import MAX_WINDOW
from flashd.memory.window import Window
from flashd.predictor.base import Predictor
from flashd.prefetch.dense import DenseFFN, SliceWeights
from flashd.prefetch.stream import LayerJob, Slice, StreamingFFN
from flashd.types import BoolArray, F32Array, FFNGeometry, I64Array

F64Array = npt.NDArray[np.float64]

# A virtual NVMe disk with its queue full, where nobody has measured: (bytes of a read, GB/s).
_DEFAULT_CURVE = ((4 << 10, 0.32), (16 << 10, 0.7), (32 << 10, 1.06), (64 << 10, 1.7), (1 << 20, 2.6))
# Tokens at the prompt's end whose neurons are kept.
WARM_TOKENS = MAX_WINDOW


@dataclass(frozen=True)
class ReadCosts:
    """Time that reads take while the device is kept busy.

    Attributes:
        size_bytes: ``[n]``, ascending.
        read_s: ``[n]``, elapsed time through reads of that size done.
        max_gap_bytes: longest gap that the store reads over.
    """

    size_bytes: F64Array
    read_s: F64Array
    max_gap_bytes: int = 0

    @classmethod
    def of(cls, curve: DeviceCurve | None) -> ReadCosts:
        """Of a measured device; without a curve, of a usual one, over whose gaps nothing is read."""
        if curve is None:
            points = [(size, size / (gb_per_s * 1e9)) for size, gb_per_s in _DEFAULT_CURVE]
        else:
            points = [(size, size / (point.gb_per_s * 1e9)) for size, point in curve.fastest().items()]
        size, read_s = np.array(points, np.float64).T
        return cls(size, read_s, 0 if curve is None else curve.break_even_bytes())

    @classmethod
    def of_packed(cls) -> ReadCosts:
        """Of a store that must unpack a whole chunk for any of its rows: a slice is best read at once."""
        return cls(np.array([1.0, float(1 << 60)]), np.ones(2))

    def seconds(self, nbytes: npt.NDArray[np.generic]) -> F64Array:
        """For reads of so many bytes each; longer ones than were measured take their share of time."""
        size = nbytes.astype(np.float64)
        largest = self.size_bytes[-1]
        inside: F64Array = np.interp(np.minimum(size, largest), self.size_bytes, self.read_s)
        whole: F64Array = inside * np.maximum(1.0, size / largest)
        return whole


def cheaper_in_part(missing: I64Array, geometry: FFNGeometry, slice_rows: int, costs: ReadCosts) -> BoolArray:
    """Which slices of a layer are read sooner by their missing rows than as a whole, ``[n_slices]``.

    Args:
        missing: ``[m]`` ascending, neurons that must be read.
        geometry: of the rows.
        slice_rows: neurons of a slice.
        costs: of the device.
    """
    stride = geometry.stride_bytes
    n_slices = -(-geometry.n_neurons // slice_rows)
    lengths = np.full(n_slices, slice_rows)
    lengths[-1] = geometry.n_neurons - (n_slices - 1) * slice_rows
    whole_s = costs.seconds(lengths * stride)
    if not len(missing):
        return whole_s > 0
    piece = missing // slice_rows
    ends = np.flatnonzero(
        (np.diff(missing) > costs.max_gap_bytes // stride + 1) | (np.diff(piece) != 0)
    )  # of runs that are one read each
    first = missing[np.append(0, ends + 1)]
    last = missing[np.append(ends, len(missing) - 1)]
    part_s = np.bincount(first // slice_rows, costs.seconds((last - first + 1) * stride), n_slices)
    return part_s < whole_s


@dataclass
class _PromptJob(LayerJob):
    """One layer of a chunk.

    Attributes:
        dense: the math.
        lane: counts what copying costs.
        window: rows in RAM.
        layer: layer index.
        wanted: ``[m]`` ascending, neurons that any token requests.
        mask: ``[tokens, m]``, by which.
        rows: ``[m]``, their rows in the window, negative where they must be read.
        in_part: per slice, whether only missing rows are read.
        slice_rows: neurons of a slice.
        warm_ids, warm_rows: neurons that go into the window, ascending, and the rows that wait for them.
    """

    dense: DenseFFN
    lane: ComputeLane
    window: Window
    layer: int
    wanted: I64Array
    mask: BoolArray
    rows: I64Array
    in_part: BoolArray
    slice_rows: int
    warm_ids: I64Array
    warm_rows: I64Array

    def picks(self, start: int, stop: int) -> I64Array | None:
        """See ``LayerJob.picks``."""
        if not self.in_part[start // self.slice_rows]:
            return None
        some = _between(self.wanted, start, stop)
        return self.wanted[some][self.rows[some] < 0]

    def compute(self, piece: Slice, weights: SliceWeights, x: F32Array, acc: F32Array) -> None:
        """See ``LayerJob.compute``."""
        stop = piece.start + len(piece.rows)
        some = _between(self.wanted, piece.start, stop)
        index = self.wanted[some] - piece.start
        matrix = self.window.pool.matrix
        if not piece.whole:
            with self.lane.memory_work():
                there = self.rows[some] >= 0
                piece.rows[index[there]] = matrix[self.rows[some][there]]
        if len(index):
            used = np.ascontiguousarray(self.mask[:, some])
            self.dense.down(weights, self.dense.dots(weights, x, used, index), acc, index)
        with self.lane.memory_work():
            warm = _between(self.warm_ids, piece.start, stop)
            matrix[self.warm_rows[warm]] = piece.rows[self.warm_ids[warm] - piece.start]
            if stop == self.window.row_of.shape[1]:
                self.window.settle(self.layer, self.warm_ids)
                self.warm_ids = self.warm_ids[:0]

    def give_up(self) -> None:
        """Rows that still wait will not come; on the lane."""
        if len(self.warm_ids):
            self.window.drop(self.layer, self.warm_ids)
            self.warm_ids = self.warm_ids[:0]


class PromptFFN:
    """The ``PromptSource`` of a window. One pass at a time.

    Args:
        stream: reads and computes slices; shared with layers that have no mask.
        lane: where the math runs.
        predictor: makes the masks.
        window: rows in RAM.
        dense: the math.
        geometry: of the rows.
        costs: of the device.

    Attributes:
        layers: those with a mask.
    """

    def __init__(
        self,
        stream: StreamingFFN,
        lane: ComputeLane,
        predictor: Predictor,
        window: Window,
        dense: DenseFFN,
        geometry: FFNGeometry,
        costs: ReadCosts,
    ) -> None:
        self._stream = stream
        self._lane = lane
        self._predictor = predictor
        self._window = window
        self._dense = dense
        self._geometry = geometry
        self._costs = costs
        self.layers = frozenset(i for i in range(geometry.n_layers) if predictor.masked(i))
        # Per layer, tokens of the last chunk if most slices were to be read whole; else 0.
        self._streams_from = [0] * geometry.n_layers
        self._layer = -1
        self._step = -1
        stream.planner = self

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``; for layers with a mask, and any number of tokens.

        Cancelling it leaves stream and window usable, and so does a failed read.

        Raises:
            BundleCorruptError, DiskReadError: a row could not be read.
        """
        begun: list[_PromptJob] = []

        def plan(made: F32Array) -> LayerJob:
            begun.append(self._plan(layer, made))
            return begun[0]

        try:
            return await self._stream.apply(layer, x, plan=plan)
        except BaseException:
            # The lane may be at it, or about to begin: what is run there now comes after that.
            await asyncio.shield(asyncio.create_task(self._lane.run(_give_up, begun)))
            raise

    def _plan(self, layer: int, x: F32Array) -> _PromptJob:
        """Masks, and what to read of which slice; on the lane."""
        mask = self._predictor.predict_prompt(layer, x)
        with self._lane.memory_work():
            wanted = np.flatnonzero(mask.any(axis=0))
            window = self._window
            warm_ids, warm_rows = window.remember(layer, mask[-WARM_TOKENS:], self._step_of(layer))
            # Afterwards: a row that has gone to another neuron is not there any more. One in flight may not
            # have arrived, and is read once more.
            rows, places = window.find(layer, wanted)
            rows[places.coming] = -1
            slice_rows = self._stream.slice_rows
            in_part = cheaper_in_part(wanted[rows < 0], self._geometry, slice_rows, self._costs)
            most = 2 * np.count_nonzero(in_part) <= len(in_part)
            self._streams_from[layer] = len(x) if most else 0
            used = np.ascontiguousarray(mask[:, wanted])
        return _PromptJob(
            self._dense, self._lane, window, layer, wanted, used, rows, in_part, slice_rows,
            warm_ids, warm_rows,
        )  # fmt: skip

    def _step_of(self, layer: int) -> int:
        """A chunk is one step for whoever decodes meanwhile; where nobody does, it is as many as it has
        tokens that count, and what the chunk before it requested is older."""
        if layer <= self._layer or self._step != self._window.step:
            alone = self._step == self._window.step
            self._step = self._window.step + (WARM_TOKENS if alone else 1)
        self._layer = layer
        return self._step

    def streams(self, layer: int, tokens: int) -> bool:
        """See ``Planner.streams``: whether it did so the last time, with not many more tokens."""
        return 0 < self._streams_from[layer] <= 2 * tokens


def _give_up(jobs: list[_PromptJob]) -> None:
    for job in jobs:
        job.give_up()


def _between(ids: I64Array, start: int, stop: int) -> slice:
    """Where the ids from ``start`` to ``stop - 1`` are in an ascending list."""
    first, last = np.searchsorted(ids, (start, stop))
    return slice(int(first), int(last))
