"""What the engines that read on threads share: batches in flight, cancelling, closing."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import abstractmethod

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.pieces import OpenFile, Pieces, plan_pieces, read_pieces, scratch_bytes
from flashd.errors import DiskReadError


class Transfer:
    """One batch on its way. Keeps the destination alive until the last piece is read."""

    def __init__(self, batch: ReadBatch, pieces: Pieces) -> None:
        self.pieces = pieces
        self.dest = batch.dest.data
        self.stopped = False  # cancelled, or a piece failed: what is left is dropped


class PooledEngine(ReadEngine):
    """Base of the engines that run ``read_pieces`` on worker threads."""

    def __init__(self, fd: int, path: str, alignment_bytes: int, reason: str) -> None:
        self.path = path
        self.alignment_bytes = alignment_bytes
        self.reason = reason
        self.scratch_reads = 0
        self._file = OpenFile(fd, path, alignment_bytes)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._thread_local = threading.local()
        self._closing: asyncio.Future[None] | None = None

    async def read(self, batch: ReadBatch) -> None:
        """See ``ReadEngine.read``."""
        if self._closing is not None:
            raise ValueError(f"{self.path}: the read engine is closed")
        pieces = plan_pieces(batch, self.alignment_bytes)
        if not len(pieces):
            return
        self.scratch_reads += pieces.scratch_reads
        transfer = Transfer(batch, pieces)
        task = asyncio.create_task(self._run(transfer))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            transfer.stopped = True
            raise

    async def close(self) -> None:
        """See ``ReadEngine.close``."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._in_flight:
            await asyncio.wait(set(self._in_flight))
        await self._release()

    def read_run(self, transfer: Transfer, start: int, stop: int) -> None:
        """Worker thread: read pieces ``start..stop-1``; a failure stops the whole transfer."""
        try:
            read_pieces(
                self._file,
                transfer.pieces,
                start,
                stop,
                transfer.dest,
                self._scratch,
                lambda: transfer.stopped,
            )
        except BaseException:
            transfer.stopped = True
            raise

    def _scratch(self) -> memoryview:
        view: memoryview | None = getattr(self._thread_local, "scratch", None)
        if view is None:
            alignment = max(self.alignment_bytes, 4096)
            view = aligned_empty(scratch_bytes(self.alignment_bytes), alignment).data
            self._thread_local.scratch = view
        return view

    @abstractmethod
    async def _run(self, transfer: Transfer) -> None:
        """Read all pieces of a transfer on worker threads; raises the first failure."""

    @abstractmethod
    async def _release(self) -> None:
        """Nothing is in flight any more: end the threads, close the file."""


def open_readonly(path: str, flags: int = 0) -> int:
    """File descriptor for reading; ``DiskReadError`` names the file that cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as exc:
        raise DiskReadError(f"{path}: cannot be opened for reading: {exc.strerror}") from exc
