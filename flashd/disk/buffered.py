"""Backend ``buffered``: reads through the page cache, with aiofiles. For file systems without
O_DIRECT, and for installations without the native module."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import aiofiles.os

from flashd.disk.blocking import OpenFile, read_exactly
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.files import FileTable
from flashd.disk.pieces import Pieces, cut_evenly, plan_pieces
from flashd.errors import DiskReadError
from flashd.stats import ReadStats
from flashd.types import I64Array, U8Array

# Cached reads are copies: a few threads saturate memory, and a cold cache reads ahead by itself.
N_THREADS = 8


class _Transfer:
    """One batch on its way. Keeps the destination alive until the last piece is read."""

    def __init__(self, batch: ReadBatch, pieces: Pieces) -> None:
        self.dest = batch.dest.data
        self.address = batch.dest.ctypes.data
        self.file: list[int] = pieces.file.tolist()
        self.offset: list[int] = pieces.offset_bytes.tolist()
        self.length: list[int] = pieces.length_bytes.tolist()
        self.at: list[int] = pieces.dest_offset_bytes.tolist()
        self.stopped = False  # cancelled, or a piece failed: what is left is dropped
        self.counted: list[ReadStats] = []  # by the threads, one entry a run


class BufferedEngine(ReadEngine):
    """Reads through the page cache.

    Demand reads and prefetch share the threads in the order they come: a page cache is fast where it
    hits, and reads ahead by itself where it doesn't.

    Args:
        paths: the files.
        reason: why this backend.
        depth: threads.

    Raises:
        DiskReadError: a file cannot be opened.
    """

    name = "buffered"
    direct = False
    alignment_bytes = 1

    def __init__(self, paths: Sequence[str], reason: str = "asked for", depth: int = N_THREADS) -> None:
        self.paths = tuple(paths)
        self.reason = reason
        self.depth = depth
        self._files = FileTable(paths)
        self._stats = ReadStats()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._transfers: set[_Transfer] = set()
        self._executor = ThreadPoolExecutor(depth, thread_name_prefix="flashd-buffered")
        self._read_run = aiofiles.os.wrap(self._read_some)
        self._closing: asyncio.Future[None] | None = None

    @property
    def stats(self) -> ReadStats:
        """See ``ReadEngine.stats``."""
        return ReadStats(**vars(self._stats))

    async def read(self, batch: ReadBatch, *, prefetch: bool = False) -> None:
        """See ``ReadEngine.read``."""
        if self._closing is not None:
            raise ValueError(f"{self.paths[0]}: the read engine is closed")
        pieces = plan_pieces(batch, 1, scatter=False)
        if not len(pieces):
            return
        transfer = _Transfer(batch, pieces)
        task = asyncio.create_task(self._run(transfer, pieces.file))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        self._transfers.add(transfer)
        task.add_done_callback(lambda done: self._transfers.discard(transfer))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            transfer.stopped = True
            raise

    async def _run(self, transfer: _Transfer, file: I64Array) -> None:
        files = await self._files.hold(file)
        runs = cut_evenly(len(transfer.offset), self.depth)
        results = await asyncio.gather(
            *(self._read_run(transfer, start, stop, executor=self._executor) for start, stop in runs),
            return_exceptions=True,
        )
        self._files.release(files)
        for counted in transfer.counted:
            self._stats.add(counted)
        for result in results:
            if isinstance(result, RuntimeError):  # of the executor
                raise DiskReadError(f"{self.paths[0]}: cannot be read: {result}") from result
            if isinstance(result, BaseException):
                raise result

    def _read_some(self, transfer: _Transfer, start: int, stop: int) -> None:
        """Worker thread: one Python call for a whole run of pieces; a failure stops them all."""
        done, stats = start, ReadStats()
        try:
            while done < stop and not transfer.stopped:
                index, at, length = transfer.file[done], transfer.at[done], transfer.length[done]
                file = OpenFile(self._files.fd(index), self.paths[index])
                more, again = read_exactly(file, transfer.dest[at : at + length], transfer.offset[done])
                stats.continued += more
                stats.retried += again
                stats.reads += 1 + more + again
                stats.bytes_read += length
                done += 1
        except BaseException:
            transfer.stopped = True
            raise
        finally:
            stats.dropped = stop - done
            transfer.counted.append(stats)

    def unregister(self, memory: U8Array) -> None:
        """See ``ReadEngine.unregister``."""
        start = memory.ctypes.data
        for transfer in self._transfers:
            base = start - transfer.address
            for at, length in zip(transfer.at, transfer.length, strict=True):
                if at < base + memory.size and base < at + length:
                    raise ValueError("a read into this memory is in flight")

    async def close(self) -> None:
        """See ``ReadEngine.close``."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._in_flight:
            await asyncio.wait(set(self._in_flight))
        self._executor.shutdown()
        self._files.close()
