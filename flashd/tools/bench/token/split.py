"""A bundle without bundling: up, gate and down parts of its rows in regions of their own.

What LLM in a flash compares bundling with (section 3.2, table 3): every neuron costs a read of its up
row and another one of its down row, far away::

    bundle   layer 0: [up 0 | down 0][up 1 | down 1] ...          one read a neuron
    split    layer 0: [up 0][up 1] ...  [down 0][down 1] ...      two
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from flashd.disk.engine import MAX_DESTINATIONS, SKIP, ReadBatch, ReadEngine, ReadTicket, RowCheck
from flashd.disk.read_once import ReadOnce
from flashd.errors import BundleCorruptError, ConfigError, DiskReadError
from flashd.layout.coalesce import GAP, plan_rows
from flashd.layout.geometry import LAYER_ALIGN_BYTES, layer_offsets, round_up
from flashd.layout.manifest import BUNDLE, Manifest
from flashd.stats import ReadStats
from flashd.store.base import WeightStore
from flashd.store.bundle_file import MAX_READ_BYTES
from flashd.store.tickets import LayerTicket, of_layer
from flashd.types import FFNGeometry, I64Array, U8Array

_BLOCK_BYTES = 16 << 20

# Told the phase, bytes done and bytes in all.
Progress = Callable[[str, int, int], None]


def parts_of(geometry: FFNGeometry) -> FFNGeometry:
    """Geometry of a split file: each layer becomes as many as its rows have parts.

    Raises:
        ConfigError: rows have padding between them, so that parts would not tile them.
    """
    n_parts = 3 if geometry.gated else 2
    if geometry.stride_bytes != geometry.row_bytes:
        raise ConfigError(
            f"rows of {geometry.row_bytes} bytes lie {geometry.stride_bytes} apart; only rows without "
            "padding can be compared with a split layout"
        )
    return FFNGeometry(
        n_layers=geometry.n_layers * n_parts,
        n_neurons=geometry.n_neurons,
        d_model=geometry.d_model,
        gated=geometry.gated,
        dtype=geometry.dtype,
        stride_bytes=geometry.stride_bytes // n_parts,
    )


@contextmanager
def split_copy(directory: Path, manifest: Manifest, scratch: Path, progress: Progress) -> Iterator[Path]:
    """A split copy of a bundle's rows, gone at the end of the block; other processes may open it, too.

    Args:
        directory: the bundle.
        manifest: its manifest; store ``file``.
        scratch: where to put the copy: a directory on the same disk.
        progress: told how far it is.

    Raises:
        ConfigError: rows with padding, or the disk has no room.
        DiskReadError, BundleCorruptError: the bundle cannot be read.
        OSError: the copy cannot be written.
    """
    parts = parts_of(manifest.ffn)
    offsets = layer_offsets(parts)
    total = offsets[-1] + round_up(parts.layer_bytes, LAYER_ALIGN_BYTES)
    status = os.statvfs(scratch)
    free = status.f_bavail * status.f_frsize
    if total > free:
        raise ConfigError(
            f"{scratch}: a split copy needs {total / 1e9:.3f} GB, the disk has {free / 1e9:.3f} GB free; "
            "give --scratch on another disk like it, or leave the modes without bundling out"
        )
    # It has no name: however this process ends, nothing of it is left.
    with tempfile.TemporaryFile(dir=scratch) as out:
        _write(directory / BUNDLE, manifest, parts, out.fileno(), total, progress)
        os.fsync(out.fileno())
        # Whatever of it is still in the page cache is memory that nobody should count on.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(f"/proc/{os.getpid()}/fd/{out.fileno()}")


def _write(
    source: Path, manifest: Manifest, parts: FFNGeometry, fd: int, total: int, progress: Progress
) -> None:
    geometry, part_bytes = manifest.ffn, parts.stride_bytes
    n_parts = geometry.stride_bytes // part_bytes
    offsets = layer_offsets(parts)
    os.ftruncate(fd, total)
    block_rows = max(1, _BLOCK_BYTES // geometry.stride_bytes)
    done = 0
    with ReadOnce(source) as file:
        for layer, layer_offset in enumerate(manifest.layer_offset_bytes):
            for start in range(0, geometry.n_neurons, block_rows):
                count = min(block_rows, geometry.n_neurons - start)
                block = np.empty((count, n_parts, part_bytes), np.uint8)
                file.read_into(layer_offset + start * geometry.stride_bytes, block.reshape(-1))
                for part in range(n_parts):
                    piece = np.ascontiguousarray(block[:, part])
                    _write_all(fd, piece.reshape(-1), offsets[layer * n_parts + part] + start * part_bytes)
                done += block.nbytes
                progress("splitting", done, geometry.n_layers * geometry.layer_bytes)


def _write_all(fd: int, data: U8Array, offset: int) -> None:
    view, done = data.data, 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


class SplitStore(WeightStore):
    """Rows put together from a split file: a read for each part of each row, less what lies side by side.

    Args:
        engine: reads the split file; closed with the store.
        geometry: of the bundle's rows, as they are in memory.
        max_gap_bytes: as for ``BundleFileStore``.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: ReadEngine, geometry: FFNGeometry, max_gap_bytes: int = 0) -> None:
        parts = parts_of(geometry)
        self.name = f"split/{engine.name}"
        self.geometry = geometry
        self.alignment_bytes = engine.alignment_bytes
        self.has_tickets = engine.has_tickets
        self.engine = engine
        self._n_parts = parts.n_layers // geometry.n_layers
        self._part_bytes = parts.stride_bytes
        self._offsets = np.array(layer_offsets(parts)).reshape(geometry.n_layers, self._n_parts)
        in_place = self._part_bytes % engine.alignment_bytes == 0
        self._max_gap = max_gap_bytes // self._part_bytes if in_place else 0
        self._max_run = min(MAX_DESTINATIONS, max(1, MAX_READ_BYTES // self._part_bytes))

    @property
    def reason(self) -> str:
        """See ``WeightStore.reason``."""
        return self.engine.reason

    @property
    def read_stats(self) -> ReadStats:
        """See ``WeightStore.read_stats``."""
        return self.engine.stats

    def register(self, memory: U8Array) -> str:
        """See ``WeightStore.register``."""
        return self.engine.register(memory)

    def unregister(self, memory: U8Array) -> None:
        """See ``WeightStore.unregister``."""
        self.engine.unregister(memory)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        self.check_request(layer, start, stop - 1, stop - start, out)
        await self._read(layer, np.arange(start, stop), out, np.arange(stop - start), prefetch=False)

    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """See ``WeightStore.read_rows``."""
        self.check_rows(layer, ids, out, rows)
        await self._read(layer, ids, out, np.arange(len(ids)) if rows is None else rows, prefetch=prefetch)

    async def _read(self, layer: int, ids: I64Array, out: U8Array, rows: I64Array, *, prefetch: bool) -> None:
        batch = self._batch(layer, ids, out, rows)
        try:
            await self.engine.read(batch, prefetch=prefetch)
        except (BundleCorruptError, DiskReadError) as exc:
            raise of_layer(exc, layer) from exc

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
        self.check_rows(layer, ids, out, rows)
        batch = self._batch(layer, ids, out, np.arange(len(ids)) if rows is None else rows)
        return LayerTicket(self.engine.start(batch, prefetch=prefetch), layer)

    @property
    def busy_ns(self) -> int | None:
        """See ``WeightStore.busy_ns``."""
        return self.engine.busy_ns

    def _batch(self, layer: int, ids: I64Array, out: U8Array, rows: I64Array) -> ReadBatch:
        """All parts in one batch. A row's parts are its neighbours in a finer matrix of the same memory, so
        that the parts of neighbours never are."""
        count, size = self._n_parts, self._part_bytes
        plan = plan_rows(ids, rows * count, max_gap_neurons=self._max_gap, max_run_neurons=self._max_run)
        part = np.arange(count)[:, None]
        return ReadBatch(
            (self._offsets[layer][:, None] + plan.neuron * size).reshape(-1),
            np.tile(plan.count * size, count),
            out.reshape(-1),
            np.where(plan.row == GAP, SKIP, (plan.row + part) * size).reshape(-1),
            (plan.first + part * len(plan.count)).reshape(-1),
        )

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.engine.close()
