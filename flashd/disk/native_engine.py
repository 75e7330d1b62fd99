"""Backends ``uring`` and ``threads``: O_DIRECT reads by native code, without the GIL.

A batch is one call into ``_native`` and one wake-up of the event loop (an eventfd). The native side
keeps its queue full across batches, continues short reads and retries EIO; see ``native/core.hpp``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashd.disk.blocking import read_failed, truncated
from flashd.disk.engine import FOREVER_S, Checked, ReadBatch, ReadEngine, ReadTicket, RowBatch
from flashd.disk.files import FileTable
from flashd.disk.pieces import SCRATCH_PIECE_BYTES, Pieces, plan_pieces
from flashd.errors import DiskReadError
from flashd.stats import ReadStats
from flashd.types import I64Array, U8Array

if TYPE_CHECKING:
    from flashd.disk._native import Core, Uring

try:
    from flashd.disk import _native

    AVAILABLE = True
except ImportError:  # FLASHD_NO_NATIVE=1 at installation
    AVAILABLE = False

# What the kernel holds at once. A deeper queue is little faster for the device, and a demand read waits
# longer in it; but what does not fit waits until the reading thread gets a CPU, which kernels keep busy
# meanwhile: a layer's guess (some 80 rows of an OPT 1.3B, 300 of a 6.7B) shall nearly fit.
# One fewer than a power of two: the ring has an entry more, and twice the locked memory from 256 on.
DEFAULT_DEPTH = {"uring": 255, "threads": 32}


_MAX_REGISTERED_BYTES = 1 << 30
_POLL_S = 0.002
_FIRST_FILE: I64Array = np.zeros(1, np.int64)


def scratch_bytes(alignment_bytes: int) -> int:
    """Size of a scratch buffer: a piece and its aligned surroundings."""
    return SCRATCH_PIECE_BYTES + 2 * alignment_bytes


class NativeEngine(ReadEngine):
    """A native core with its files, on an event loop.

    Args:
        name: the backend.
        core: the native side; ended by ``close``.
        paths: the files.
        alignment_bytes: what they need.
        depth: reads in flight.
        reason: why this backend.
        flags: to open the files with.

    Raises:
        DiskReadError: a file cannot be opened.
    """

    direct = True

    def __init__(
        self,
        name: str,
        core: Core,
        paths: Sequence[str],
        alignment_bytes: int,
        depth: int,
        reason: str,
        flags: int = os.O_DIRECT,
    ) -> None:
        self.name = name
        self.paths = tuple(paths)
        self.has_tickets = len(self.paths) == 1  # a single file is always open
        self.alignment_bytes = alignment_bytes
        self.depth = depth
        self.reason = reason
        self._core = core
        self._waiting: dict[int, tuple[asyncio.Future[None], list[int]]] = {}
        self._entering = 0  # reads that wait for their files to be opened
        self._idle = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Future[None] | None = None
        self._last_dest: Callable[[], U8Array | None] = lambda: None
        self._last_address = 0
        try:
            self._files = FileTable(paths, flags, core.set_file)
        except BaseException:
            core.close()
            raise

    @property
    def stats(self) -> ReadStats:
        """See ``ReadEngine.stats``."""
        return ReadStats(**self._core.stats())

    async def read(self, batch: ReadBatch, *, prefetch: bool = False) -> None:
        """See ``ReadEngine.read``."""
        if self._closing is not None:
            raise ValueError(f"{self.paths[0]}: the read engine is closed")
        pieces = plan_pieces(batch, self.alignment_bytes)
        if len(pieces):
            submit = partial(self._submit_pieces, pieces, batch.dest, prefetch)
            await self._run(pieces.file, submit)

    async def read_rows(self, batch: RowBatch, *, prefetch: bool = False) -> None:
        """See ``ReadEngine.read_rows``. What is aligned is planned by native code, which makes the same
        reads in a tenth of the time."""
        if not self._in_place(batch) or self._closing is not None:
            await super().read_rows(batch, prefetch=prefetch)
            return
        await self._run(_FIRST_FILE, partial(self._submit_rows, batch, prefetch))

    @property
    def busy_ns(self) -> int:
        """See ``ReadEngine.busy_ns``."""
        return self._core.busy_ns()

    def start(self, batch: ReadBatch, *, prefetch: bool = False) -> ReadTicket:
        """See ``ReadEngine.start``."""
        self._check_tickets()
        pieces = plan_pieces(batch, self.alignment_bytes)
        if not len(pieces):
            return _Nothing()
        return _Ticket(self, self._submit_pieces(pieces, batch.dest, prefetch, ticket=True))

    def start_rows(self, batch: RowBatch, *, prefetch: bool = False) -> ReadTicket:
        """See ``ReadEngine.start_rows``."""
        if not self._in_place(batch):
            return super().start_rows(batch, prefetch=prefetch)
        if self._closing is not None or not self.has_tickets:
            self._check_tickets()
        return _Ticket(self, self._submit_rows(batch, prefetch, ticket=True), batch.check is not None)

    def _check_tickets(self) -> None:
        if self._closing is not None:
            raise ValueError(f"{self.paths[0]}: the read engine is closed")
        if not self.has_tickets:
            raise ValueError(f"{self.paths[0]}: one of several files, whose reads have no tickets")

    def _in_place(self, batch: RowBatch) -> bool:
        if self._last_dest() is not batch.dest:  # asking NumPy for an address takes long
            self._last_address = batch.dest.ctypes.data
            self._last_dest = weakref.ref(batch.dest)
        misaligned = batch.offset_bytes | batch.dest.shape[1] | self._last_address
        return not misaligned % self.alignment_bytes

    def _submit_rows(self, batch: RowBatch, prefetch: bool, ticket: bool = False) -> int:
        check = batch.check
        checks = () if check is None else (check.sums, check.trusted, check.start, check.count)
        return self._core.submit_rows(
            0,
            batch.offset_bytes,
            batch.dest.shape[1],
            batch.ids,
            batch.rows,
            batch.dest,
            batch.n_rows,
            batch.max_gap_rows,
            batch.max_run_rows,
            prefetch,
            ticket,
            *checks,
        )

    def _submit_pieces(self, pieces: Pieces, dest: U8Array, prefetch: bool, ticket: bool = False) -> int:
        return self._core.submit(
            pieces.file,
            pieces.offset_bytes,
            pieces.first,
            pieces.length_bytes,
            pieces.dest_offset_bytes,
            pieces.in_place,
            dest,
            prefetch,
            ticket,
        )

    async def _run(self, file: I64Array, submit: Callable[[], int]) -> None:
        """Hand a batch to the core, with its files open, and wait for its end."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise ValueError(f"{self.paths[0]}: the read engine belongs to another event loop")
        self._entering += 1
        try:
            files = await self._files.hold(file)
            number, future = self._submit(submit, files)
        finally:
            self._entering -= 1
            self._settle()
        try:
            await future
        except asyncio.CancelledError:
            self._core.cancel(number)
            raise

    def _submit(self, submit: Callable[[], int], files: list[int]) -> tuple[int, asyncio.Future[None]]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._core.fileno(), self._completed)
        try:
            number = submit()
        except BaseException:
            self._files.release(files)
            raise
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[number] = (future, files)
        return number, future

    def _completed(self) -> None:
        """The eventfd says that batches have ended."""
        for number, end, error, file, offset, length in self._core.completed():
            future, files = self._waiting.pop(number)
            if future.done():  # cancelled
                pass
            elif end == "ok":
                future.set_result(None)
            elif end == "dropped":
                future.cancel()
            else:
                future.set_exception(self.error(file, offset, length, error))
            self._files.release(files)
        self._settle()

    def error(self, file: int, offset: int, length: int, error: int) -> Exception:
        """What went wrong with one read of a file that is held; ``error`` is 0 where the file ended."""
        path = self.paths[file]
        if error:
            failed = read_failed(path, length, offset, os.strerror(error))
            failed.__cause__ = OSError(error, os.strerror(error))
            return failed
        size = self.file_bytes(file)
        if size >= offset + length:
            return read_failed(path, length, offset, f"nothing came, though the file has {size} bytes")
        return truncated(path, size, offset + length)

    def file_bytes(self, file: int) -> int:
        """Size now of a file that is open, whatever its path names by now."""
        return os.fstat(self._files.fd(file)).st_size

    def unregister(self, memory: U8Array) -> None:
        """See ``ReadEngine.unregister``."""
        if self._core.touches(memory):
            raise ValueError("a read into this memory is in flight")

    def _settle(self) -> None:
        if not self._waiting and not self._entering:
            self._idle.set()

    async def close(self) -> None:
        """See ``ReadEngine.close``."""
        if self._closing is None:
            if self._loop not in (None, asyncio.get_running_loop()):
                self._close_elsewhere()
                return
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def _close_elsewhere(self) -> None:
        """On another loop than the one that read: that one must be over. Its reads are waited for
        without it, which may take a moment of this one."""
        assert self._loop is not None
        if not self._loop.is_closed():
            raise ValueError(f"{self.paths[0]}: close the read engine on its own event loop")
        self._core.close()
        self._files.close()
        self._closing = asyncio.get_running_loop().create_future()
        self._closing.set_result(None)

    async def _close(self) -> None:
        self._idle.clear()
        self._settle()
        await self._idle.wait()
        while self._core.tickets():  # noqa: ASYNC110 - the loop is not told when these end
            await asyncio.sleep(_POLL_S)
        if self._loop is not None:
            self._loop.remove_reader(self._core.fileno())
        self._core.close()
        self._files.close()
        self._forget_memory()

    def _forget_memory(self) -> None:
        """Nothing is registered any more."""


class _Ticket(ReadTicket):
    """Of a batch of the core's."""

    __slots__ = ("_checks", "_engine", "_number", "checked")

    def __init__(self, engine: NativeEngine, number: int, checks: bool = False) -> None:
        self._engine = engine
        self._number = number
        self._checks = checks
        self.checked = None

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """See ``ReadTicket.wait``."""
        told = self._engine._core.wait(self._number, timeout_s)
        if told is None:
            return False
        (_, end, error, file, offset, length), checked = told
        if end == "dropped":
            raise ValueError(f"{self._engine.paths[0]}: the read engine was closed")
        if end != "ok":
            raise self._engine.error(file, offset, length, error)
        if self._checks:
            self.checked = Checked(*checked)
        return True


class _Nothing(ReadTicket):
    """Of a batch that reads nothing."""

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """See ``ReadTicket.wait``."""
        return True


class UringEngine(NativeEngine):
    """The native engine on a ring, which can register memory."""

    _core: Uring

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._registered: dict[int, U8Array] = {}

    def _forget_memory(self) -> None:
        self._registered.clear()

    def register(self, memory: U8Array) -> str:
        """See ``ReadEngine.register``. At most 1 GiB at once."""
        if memory.nbytes > _MAX_REGISTERED_BYTES:
            return f"at most 1 GiB can be registered at once, not {memory.nbytes / 2**30:.4g}"
        error = self._core.register_memory(memory)
        if error == errno.ESHUTDOWN:
            return "the engine is closed"
        if not error:
            # Else the address might be given to somebody else, and reads into that go astray.
            self._registered[memory.ctypes.data] = memory
        if error in (errno.ENOMEM, errno.EPERM):
            return f"the limit of locked memory (ulimit -l) does not allow {memory.nbytes / 2**20:.4g} MiB"
        return os.strerror(error) if error else ""

    def unregister(self, memory: U8Array) -> None:
        """See ``ReadEngine.unregister``."""
        super().unregister(memory)
        error = self._core.unregister_memory(memory)
        if error and error != errno.ESHUTDOWN:  # a ring that is gone holds nothing
            raise DiskReadError(f"memory cannot be unregistered: {os.strerror(error)}; it stays in use")
        known = self._registered.get(memory.ctypes.data)
        if known is not None and known.size == memory.size:
            del self._registered[memory.ctypes.data]


def open_native(
    name: str,
    paths: Sequence[str],
    alignment_bytes: int,
    reason: str,
    depth: int | None = None,
    flags: int = os.O_DIRECT,
) -> NativeEngine:
    """Open files with backend ``uring`` or ``threads``. Without O_DIRECT in ``flags`` they read
    through the page cache.

    Raises:
        OSError: the kernel, a container or a limit forbids it.
        DiskReadError: a file cannot be opened.
    """
    depth = DEFAULT_DEPTH[name] if depth is None else depth
    sizes = (alignment_bytes, len(paths), scratch_bytes(alignment_bytes), depth)
    if name == "uring":
        return UringEngine(name, _native.Uring(*sizes), paths, alignment_bytes, depth, reason, flags)
    return NativeEngine(name, _native.Threads(*sizes), paths, alignment_bytes, depth, reason, flags)
