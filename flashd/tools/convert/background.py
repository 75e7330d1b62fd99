"""One worker that writes blocks while the next ones are made: hashing and disk overlap reading,
converting and transposing. Two buffers in all, so memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import numpy as np

from flashd.types import U8Array

N_BUFFERS = 2


class BackgroundWriter:
    """Runs jobs in order on one thread. The first job that fails makes the next call raise.

    Args:
        on_done: called in the caller's thread with the size of every finished job.
    """

    def __init__(self, on_done: Callable[[int], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="flashd-convert")
        self._on_done = on_done
        self._pending: list[tuple[Future[None], int]] = []
        self._buffers: list[U8Array] = []
        self._turn = 0
        self._stopped = False

    def buffer(self, size_bytes: int) -> U8Array:
        """A buffer of exactly this size, content arbitrary, that no job holds any more. It is the
        caller's until it is handed to ``submit``."""
        self._wait(N_BUFFERS - 1)
        if not self._buffers or self._buffers[0].size < size_bytes:
            self._wait(0)
            self._buffers = [np.empty(size_bytes, np.uint8) for _ in range(N_BUFFERS)]
        self._turn = (self._turn + 1) % N_BUFFERS
        return self._buffers[self._turn][:size_bytes]

    def submit(self, size_bytes: int, job: Callable[..., None], *args: Any) -> None:
        """Queue a job; waits while another buffer's job is still to run."""
        self._wait(N_BUFFERS - 1)
        self._pending.append((self._pool.submit(self._run, job, *args), size_bytes))

    def drain(self) -> None:
        """Wait for all jobs."""
        self._wait(0)

    def stop(self) -> None:
        """Drop what hasn't started and wait for what has, so that files can be closed."""
        self._stopped = True
        for future, _ in self._pending:
            future.cancel()
        wait([future for future, _ in self._pending])

    def _run(self, job: Callable[..., None], *args: Any) -> None:
        # Behind a failed write nothing may run: a commit would vouch for bytes that aren't there.
        if self._stopped:
            return
        try:
            job(*args)
        except BaseException:
            self._stopped = True
            raise

    def _wait(self, allowed: int) -> None:
        while len(self._pending) > allowed:
            future, size_bytes = self._pending[0]
            future.result()
            self._pending.pop(0)
            self._on_done(size_bytes)

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if kind is not None:
            self.stop()
        self._pool.shutdown(wait=True)
