"""The contract of every weight store: (layer, neuron ids) -> rows."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import numpy as np

from flashd.disk.engine import ReadTicket, RowCheck
from flashd.stats import CheckStats, ReadStats
from flashd.store.tickets import LoopTicket
from flashd.types import FFNGeometry, I64Array, U8Array


class WeightStore(ABC):
    """FFN neuron rows of one model. Calls are batch-shaped; several may be outstanding at once.

    Attributes:
        name: what ``flashd doctor``, logs and metrics call it, e.g. ``file/uring``.
        geometry: shape of the rows.
        alignment_bytes: destinations must start on this (1: anywhere).
        has_tickets: whether ``start_rows`` reads without the event loop.
    """

    has_tickets = False
    name: str
    geometry: FFNGeometry
    alignment_bytes: int

    @abstractmethod
    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """Read neurons ``start..stop-1`` of one layer, padding included, into ``out``.

        Args:
            layer: layer index.
            start: first neuron.
            stop: one past the last neuron.
            out: ``[stop - start, stride_bytes]`` uint8, C-contiguous, aligned.

        Raises:
            IndexError: layer or neurons that do not exist (our own bug).
            ValueError: ``out`` has the wrong shape, dtype, layout or alignment.
            BundleCorruptError: the file is shorter than its manifest says.
            DiskReadError: the device failed.
        """

    @abstractmethod
    async def read_rows(
        self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None = None, *, prefetch: bool = False
    ) -> None:
        """Read the neurons ``ids`` of one layer, any order, repeats allowed, into rows of ``out``.

        Cancelling it may leave reads in flight into ``out``: who reuses its rows shields the call.

        Args:
            layer: layer index.
            ids: ``[m]`` int64.
            out: ``[m, stride_bytes]`` or, with ``rows``, ``[any, stride_bytes]``; otherwise as for
                ``read_range``.
            rows: ``[m]`` int64, the row of ``out`` for each id, all different; None: row ``i`` for the
                ``i``-th. Other rows stay as they are.
            prefetch: a guess: reads that somebody needs now go first.

        Raises:
            As ``read_range``, and ValueError for ``rows`` outside ``out`` or not ``[m]`` int64.
        """

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
        """Begin what ``read_rows`` does, from a thread that waits for it by itself.

        Args:
            layer, ids, out, rows, prefetch: as for ``read_rows``. ``ids`` and ``rows`` must not change.
            loop: the store's event loop, which runs in another thread: a store without tickets of its own
                reads there.
            check: rows to check while they arrive, where the store has tickets of its own and they lie so
                that it can (``ReadTicket.checked``).

        Returns:
            What to wait for, before the store is closed. It raises what ``read_rows`` raises, unless that
            was raised here.
        """
        return LoopTicket(self.read_rows(layer, ids, out, rows, prefetch=prefetch), loop)

    @property
    def busy_ns(self) -> int | None:
        """Time so far with at least one read on its way; None where nobody measures it."""
        return None

    @property
    def reason(self) -> str:
        """Why rows are read the way they are; empty for a store that has no choice."""
        return ""

    @property
    def read_stats(self) -> ReadStats | None:
        """Reads of the device so far, a snapshot; None for a store that reads from none."""
        return None

    @property
    def check_stats(self) -> CheckStats | None:
        """Checksums compared so far, kept up to date; None for a store that compares none."""
        return None

    def register(self, memory: U8Array) -> str:
        """Pin memory that rows will be read into; see ``ReadEngine.register``.

        Returns:
            Nothing if it worked, else why not: reads work all the same.
        """
        return f"{self.name} registers no memory"

    def unregister(self, memory: U8Array) -> None:
        """Undo ``register``; see ``ReadEngine.unregister``."""
        return

    @abstractmethod
    async def close(self) -> None:
        """Release file descriptors and threads; waits for reads in flight. Idempotent."""

    def check_request(self, layer: int, low: int, high: int, count: int, out: U8Array) -> None:
        """Validate arguments that every store checks the same way."""
        geometry = self.geometry
        if not 0 <= layer < geometry.n_layers:
            raise IndexError(f"layer {layer} of {geometry.n_layers}")
        if count and not 0 <= low <= high < geometry.n_neurons:
            raise IndexError(f"neurons {low}..{high} of {geometry.n_neurons}")
        if out.shape != (count, geometry.stride_bytes) or out.dtype.itemsize != 1:
            raise ValueError(
                f"out is {out.dtype}{out.shape}, expected uint8 {(count, geometry.stride_bytes)}"
            )
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be C-contiguous and writeable")
        if count and out.ctypes.data % self.alignment_bytes:
            raise ValueError(f"out must start on a multiple of {self.alignment_bytes} bytes")

    def check_rows(self, layer: int, ids: I64Array, out: U8Array, rows: I64Array | None) -> None:
        """Validate the arguments of ``read_rows``."""
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ValueError(f"ids are {ids.dtype}{list(ids.shape)}, expected int64[m]")
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        self.check_request(layer, low, high, len(ids) if rows is None else len(out), out)
        if rows is None:
            return
        if rows.dtype != np.int64 or rows.shape != ids.shape:
            raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, expected int64[{len(ids)}]")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(out):
            raise ValueError(f"rows {int(rows.min())}..{int(rows.max())} of out, which has {len(out)}")


class WrappedStore(WeightStore):
    """A store around another one, which it is like in all that it doesn't define anew.

    Attributes:
        inner: the store that does the work; closed with this one.
    """

    def __init__(self, inner: WeightStore) -> None:
        self.inner = inner
        self.name = inner.name
        self.geometry = inner.geometry
        self.alignment_bytes = inner.alignment_bytes

    @property
    def reason(self) -> str:
        """See ``WeightStore.reason``."""
        return self.inner.reason

    @property
    def read_stats(self) -> ReadStats | None:
        """See ``WeightStore.read_stats``."""
        return self.inner.read_stats

    @property
    def check_stats(self) -> CheckStats | None:
        """See ``WeightStore.check_stats``."""
        return self.inner.check_stats

    def register(self, memory: U8Array) -> str:
        """See ``WeightStore.register``."""
        return self.inner.register(memory)

    def unregister(self, memory: U8Array) -> None:
        """See ``WeightStore.unregister``."""
        self.inner.unregister(memory)
