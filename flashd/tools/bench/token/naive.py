"""The naive baseline: every byte of the model is read for every token, resident weights, too.

::

    flash : [attention 0][FFN 0 ..][attention 1][FFN 1 ..] ... [embeddings][attention 0] ...
    lane  :             attn 0 | FFN 0 ..| attn 1 | ...         | head

The resident file's image stays in memory, so that the decoder needs no other weights, and its bytes are
read into it again and again, a layer ahead of the computation; rows are streamed as always.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.read_once import ReadOnce
from flashd.layout.geometry import LAYER_ALIGN_BYTES, round_up
from flashd.layout.manifest import RESIDENT
from flashd.layout.safetensors_header import TensorEntry
from flashd.stats import ReadStats, StreamStats
from flashd.store.base import WeightStore, WrappedStore
from flashd.store.open import resident_entries
from flashd.tools.bench.token.free_run import Recorder
from flashd.types import (
    NUMPY_DTYPE,
    SAFETENSORS_DTYPE,
    F32Array,
    FFNSource,
    I64Array,
    U8Array,
    WeightArray,
)

_LAYER = re.compile(r"layers\.(\d+)\.")
_DTYPES = {SAFETENSORS_DTYPE[name]: dtype for name, dtype in NUMPY_DTYPE.items()}


class ResidentImage:
    """``resident.safetensors`` as it is on disk, with its tensors as views.

    Attributes:
        memory: the file, padded to whole blocks.
        weights: tensors by name.
        parts: per layer the byte ranges of its tensors, and behind the last layer those of all others;
            whole blocks that may overlap, which brings the same bytes.
    """

    def __init__(self, directory: Path, n_layers: int) -> None:
        entries = resident_entries(directory)
        with ReadOnce(directory / RESIDENT) as file:
            self._file_bytes = file.size_bytes
            self.memory = aligned_empty(round_up(file.size_bytes, LAYER_ALIGN_BYTES), huge_pages=True)
            file.read_into(0, self.memory[: file.size_bytes])
        self.weights: dict[str, WeightArray] = {
            name: self.memory[entry.start_byte : entry.end_byte]
            .view(_DTYPES[entry.dtype])
            .reshape(entry.shape)
            for name, entry in entries.items()
        }
        groups: list[list[TensorEntry]] = [[] for _ in range(n_layers + 1)]
        for name, entry in entries.items():
            match = _LAYER.match(name)
            groups[int(match[1]) if match else n_layers].append(entry)
        self.parts = [self._ranges(group) for group in groups]

    def _ranges(self, group: list[TensorEntry]) -> list[tuple[int, int]]:
        """Neighbours merged, and grown to whole blocks."""
        ranges: list[tuple[int, int]] = []
        for entry in sorted(group, key=lambda entry: entry.start_byte):
            start = entry.start_byte - entry.start_byte % LAYER_ALIGN_BYTES
            end = min(round_up(entry.end_byte, LAYER_ALIGN_BYTES), self._file_bytes)
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((start, end))
        return ranges


class NaiveStore(WrappedStore):
    """A bundle's rows, and as one more layer for each part of the image what is resident.

    Args:
        rows: the rows; closed with this one.
        engine: of the resident file; likewise.
        image: where its bytes go.
        recorder: sees reads of the resident file.
    """

    def __init__(
        self, rows: WeightStore, engine: ReadEngine, image: ResidentImage, recorder: Recorder
    ) -> None:
        super().__init__(rows)
        self._recorder = recorder
        self._engine = engine
        self._image = image

    @property
    def read_stats(self) -> ReadStats:
        """See ``WeightStore.read_stats``."""
        total = ReadStats()
        total.add(self.inner.read_stats or total)
        total.add(self._engine.stats)
        return total

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``. Layers behind the last one are parts of the image."""
        part = layer - self.geometry.n_layers
        if part < 0:
            await self.inner.read_range(layer, start, stop, out)
            return
        ranges = np.array(self._image.parts[part], np.int64).reshape(-1, 2)
        length = ranges[:, 1] - ranges[:, 0]
        where = np.ascontiguousarray(ranges[:, 0])
        batch = ReadBatch(where, length, self._image.memory, where)
        self._recorder.read(lambda: self._engine.read(batch))
        await self._engine.read(batch)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        await self.inner.read_rows(layer, ids, out, rows, prefetch=prefetch)

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.inner.close()
        await self._engine.close()


class NaiveFFN:
    """An ``FFNSource`` that waits for a layer's resident weights before the layer begins.

    Args:
        inner: streams the rows.
        waits: counts the time that computing waits for flash, ``inner``'s and here.
        store: a ``NaiveStore`` below.
        image: the resident weights.
    """

    def __init__(
        self, inner: FFNSource, waits: StreamStats, store: WeightStore, image: ResidentImage
    ) -> None:
        self._waits = waits
        self._inner = inner
        self._store = store
        self._image = image
        self._n_layers = store.geometry.n_layers
        self._reads: dict[int, asyncio.Task[None]] = {}

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """See ``FFNSource.apply``."""
        self._start(layer)
        self._start(layer + 1)
        await self._arrived(layer)
        done = await self._inner.apply(layer, x)
        if layer == self._n_layers - 1:
            # The head needs them; the next token's first layer is read while it is computed.
            await self._arrived(self._n_layers)
            self._start(0)
        return done

    async def drain(self) -> None:
        """Wait for reads in flight."""
        if self._reads:
            await asyncio.wait(self._reads.values())

    def _start(self, part: int) -> None:
        if part not in self._reads:
            # The place is known below; the size is for those who count.
            out = self._image.memory[: sum(end - start for start, end in self._image.parts[part])]
            reading = self._store.read_range(self._n_layers + part, 0, 0, out)
            self._reads[part] = asyncio.create_task(reading)

    async def _arrived(self, part: int) -> None:
        read, since_ns = self._reads.pop(part), time.perf_counter_ns()
        await read
        self._waits.wait_ns += time.perf_counter_ns() - since_ns
