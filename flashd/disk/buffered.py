"""Backend ``buffered``: reads through the page cache, with aiofiles, for file systems without
O_DIRECT."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiofiles
import aiofiles.os

from flashd.disk.pieces import cut_evenly
from flashd.disk.pooled import PooledEngine, Transfer
from flashd.errors import DiskReadError

# Cached reads are copies: a few threads saturate memory, and a cold cache reads ahead by itself.
N_THREADS = 8


class BufferedEngine(PooledEngine):
    """Reads through the page cache; open it with ``await BufferedEngine.open(path)``."""

    name = "buffered"
    direct = False

    def __init__(self, handle: Any, path: str, reason: str) -> None:
        super().__init__(handle.fileno(), path, 1, reason)
        self._handle = handle
        self._executor = ThreadPoolExecutor(N_THREADS, thread_name_prefix="flashd-buffered")
        self._read_run = aiofiles.os.wrap(self.read_run)

    @classmethod
    async def open(cls, path: str, reason: str = "asked for") -> BufferedEngine:
        """Open ``path``; ``DiskReadError`` if that fails."""
        try:
            handle = await aiofiles.open(path, "rb", buffering=0)
        except OSError as exc:
            raise DiskReadError(f"{path}: cannot be opened for reading: {exc.strerror}") from exc
        return cls(handle, path, reason)

    async def _run(self, transfer: Transfer) -> None:
        runs = cut_evenly(len(transfer.pieces), N_THREADS)
        results = await asyncio.gather(
            *(self._read_run(transfer, start, stop, executor=self._executor) for start, stop in runs),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _release(self) -> None:
        self._executor.shutdown()
        await self._handle.close()
