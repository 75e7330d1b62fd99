"""The contract of every read engine: one batch of reads in, one completion out.

An engine is bound to files that are open. Rooms above describe what they want as arrays, so that a
backend can hand thousands of reads to the kernel without a Python call for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashd.layout.coalesce import plan_rows
from flashd.stats import ReadStats
from flashd.types import BoolArray, I64Array, U8Array, U32Array

# A destination that does not exist: its bytes are read, because that is cheaper than not reading
# them, and thrown away.
SKIP = -1
# Longer than anybody waits, and short enough for every clock.
FOREVER_S = 1e8
# Linux takes 1024 (IOV_MAX) destinations in one read.
MAX_DESTINATIONS = 1024


@dataclass(frozen=True)
class ReadBatch:
    """Reads of an engine's files, each into one or more places of one destination.

    Attributes:
        offset_bytes: ``[n]`` int64, where each read starts in its file.
        length_bytes: ``[m]`` int64, how much goes to each place; 0 is allowed.
        dest: ``[nbytes]`` uint8, C-contiguous, writeable. Bytes outside the reads stay as they are.
        dest_offset_bytes: ``[m]`` int64, where in ``dest`` each part lands, or ``SKIP``. Parts that
            overlap there leave undefined bytes.
        first: ``[n]`` int64, ascending from 0: index of each read's first place; a read goes on
            through its places without a gap in the file. None: one place a read, ``m == n``.
        file: ``[n]`` int64, index into the engine's ``paths``; None: all from the first.

    Raises:
        ValueError: arrays of the wrong type or shape, or a read that leaves ``dest``.
    """

    offset_bytes: I64Array
    length_bytes: I64Array
    dest: U8Array
    dest_offset_bytes: I64Array
    first: I64Array | None = None
    file: I64Array | None = None

    def __post_init__(self) -> None:
        n, m = len(self.offset_bytes), len(self.length_bytes)
        sizes = {"offset_bytes": n, "length_bytes": m, "dest_offset_bytes": m, "first": n, "file": n}
        for name, size in sizes.items():
            column = getattr(self, name)
            if column is not None and (column.dtype != np.int64 or column.shape != (size,)):
                raise ValueError(f"{name} is {column.dtype}{list(column.shape)}, expected int64[{size}]")
        dest = self.dest
        if dest.dtype != np.uint8 or dest.ndim != 1:
            raise ValueError(f"dest is {dest.dtype}{list(dest.shape)}, expected uint8[nbytes]")
        if not dest.flags.c_contiguous or not dest.flags.writeable:
            raise ValueError("dest must be C-contiguous and writeable")
        self._check_places(n, m)
        if not n:
            return
        if self.file is not None and int(self.file.min()) < 0:
            raise ValueError("a read has a negative file index")
        if int(self.offset_bytes.min()) < 0 or int(self.length_bytes.min()) < 0:
            raise ValueError("a read has a negative offset or length")
        # Subtracting, because a sum of two huge int64 would wrap around.
        if (self.dest_offset_bytes < SKIP).any() or (
            (self.dest_offset_bytes > dest.size - self.length_bytes) & (self.dest_offset_bytes != SKIP)
        ).any():
            raise ValueError(f"a read leaves its destination of {dest.size} bytes")

    def _check_places(self, n: int, m: int) -> None:
        if self.first is None:
            if n != m:
                raise ValueError(f"{n} reads into {m} places need `first`")
            return
        places = np.diff(self.first, append=m)
        if (n == 0) != (m == 0) or (n and (self.first[0] != 0 or int(places.min()) < 1)):
            raise ValueError("first must ascend from 0, with at least one place for each read")
        if n and int(places.max()) > MAX_DESTINATIONS:
            raise ValueError(f"a read has {int(places.max())} places, at most {MAX_DESTINATIONS} are allowed")

    @property
    def nbytes(self) -> int:
        """Bytes that the batch asks for, those to skip included."""
        return int(self.length_bytes.sum())


@dataclass(slots=True)
class RowCheck:
    """Which rows of a batch to compare with their checksums as they arrive.

    Attributes:
        sums: ``[n_rows]`` uint32, CRC32C of every row of the file.
        trusted: ``[n_rows]`` bool, rows that need not be checked. Whoever checks keeps it up to date:
            True where a row was right, False where it was wrong.
        start: of the batch's rows by ascending id, the first to check in any case.
        count: so many rows to check from there on, going on at 0 behind the last one.
    """

    sums: U32Array
    trusted: BoolArray
    start: int
    count: int


class Checked(NamedTuple):
    """What has come of a ``RowCheck``.

    Attributes:
        n_rows: compared.
        n_untrusted: of them, those that were not trusted.
        n_wrong: of them, those whose bytes differ from their checksum.
        first_wrong: the least of these; -1 without any.
        time_ns: CPU time of the thread that compared.
    """

    n_rows: int
    n_untrusted: int
    n_wrong: int
    first_wrong: int
    time_ns: int


@dataclass(slots=True)
class RowBatch:
    """Rows of one size that lie behind each other in a file, to be read into rows of a matrix.

    Attributes:
        offset_bytes: of row 0 in the engine's first file.
        ids: ``[m]`` int64, at least one, rows of the file >= 0, any order, repeats allowed.
        rows: ``[m]`` int64, row of ``dest`` for each, all different.
        dest: ``[n, stride_bytes]`` uint8, C-contiguous, writeable.
        max_gap_rows: longest gap between two wanted rows to read over.
        max_run_rows: longest read, 1 to ``MAX_DESTINATIONS`` rows.
        n_rows: of the file: ids are less.
        check: rows to check, by engines that can (``ReadTicket.checked``); None: none.
    """

    offset_bytes: int
    ids: I64Array
    rows: I64Array
    dest: U8Array
    max_gap_rows: int
    max_run_rows: int
    n_rows: int = 1 << 48
    check: RowCheck | None = None

    def plan(self) -> ReadBatch:
        """The reads that it takes, as ``layout.coalesce`` plans them."""
        stride = self.dest.shape[1]
        if int(self.ids.max()) >= self.n_rows:
            raise ValueError(f"row {int(self.ids.max())} of a file of {self.n_rows} rows")
        plan = plan_rows(
            self.ids, self.rows, max_gap_neurons=self.max_gap_rows, max_run_neurons=self.max_run_rows
        )
        # A read with one place each needs no list of places.
        first = None if len(plan.first) == len(plan.row) else plan.first
        return ReadBatch(
            self.offset_bytes + plan.neuron * stride,
            plan.count * stride,
            self.dest.reshape(-1),
            np.maximum(plan.row * stride, SKIP),  # of GAP, which is negative, too
            first,
        )


class ReadTicket(ABC):
    """A read on its way, for a thread that waits for it by itself instead of an event loop. That thread
    alone uses it, and waits for it until it has ended: until then the read's memory is kept.

    Attributes:
        checked: what came of the batch's check, once the read has ended well; None where it had none or
            the engine does not check.
    """

    __slots__ = ()
    checked: Checked | None = None

    @abstractmethod
    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """Block, without the GIL, until the read has ended. 0 only asks whether it has.

        Returns:
            False where it has not in that time. True, once: afterwards the ticket is used up, and so it
            is where this raises.

        Raises:
            What the awaited read raises.
        """


class ReadEngine(ABC):
    """Reads open files. Several batches may be outstanding; use it from one event loop.

    Attributes:
        name: the backend, as ``flashd doctor``, logs and metrics call it.
        paths: the files, as ``ReadBatch.file`` counts them.
        direct: whether reads go past the page cache.
        alignment_bytes: a read whose offset, lengths and destination addresses are all multiples
            of it needs no scratch copy (1: anything goes).
        depth: reads that the kernel holds at once, at most.
        reason: why this backend was chosen.
        has_tickets: whether ``start`` and ``start_rows`` work.
    """

    has_tickets = False
    name: str
    paths: tuple[str, ...]
    direct: bool
    alignment_bytes: int
    depth: int
    reason: str

    @property
    @abstractmethod
    def stats(self) -> ReadStats:
        """Counters since the engine was opened; a snapshot."""

    @abstractmethod
    async def read(self, batch: ReadBatch, *, prefetch: bool = False) -> None:
        """Read every part of ``batch`` into its destination.

        Short reads are continued, EIO is retried once. Cancelling the await drops what was not
        yet submitted; reads in flight complete into ``batch.dest``, which they keep alive: a
        caller that reuses its memory shields the read and waits for it.

        Args:
            batch: what to read.
            prefetch: give way: as long as reads of other batches wait to be submitted, none of
                this one is.

        Raises:
            BundleCorruptError: a file ends before the batch does.
            DiskReadError: the device or file system failed; names file and offset.
            ValueError: the engine is closed (our own bug).
        """

    async def read_rows(self, batch: RowBatch, *, prefetch: bool = False) -> None:
        """Read rows; as ``read`` of ``batch.plan()``, for callers that do it very often."""
        await self.read(batch.plan(), prefetch=prefetch)

    @property
    def busy_ns(self) -> int | None:
        """Time so far with at least one batch on its way; None where nobody measures it."""
        return None

    def start(self, batch: ReadBatch, *, prefetch: bool = False) -> ReadTicket:
        """Begin what ``read`` does, from any one thread, which waits for it by itself.

        Raises:
            ValueError: the engine is closed, or has no tickets (our own bug).
        """
        raise ValueError(f"{self.name} reads have no tickets")

    def start_rows(self, batch: RowBatch, *, prefetch: bool = False) -> ReadTicket:
        """As ``start`` of ``batch.plan()``."""
        return self.start(batch.plan(), prefetch=prefetch)

    def register(self, memory: U8Array) -> str:
        """Pin ``memory`` so that the kernel need not do it for every read into it.

        Its pages must not be given back (``madvise``) before ``unregister``: the kernel would go on
        writing into pages that nobody sees any more.

        Returns:
            Nothing if it worked, else why not: reads work all the same.
        """
        return f"{self.name} reads need no registered memory"

    def unregister(self, memory: U8Array) -> None:
        """Undo ``register``; does nothing for memory that is not registered.

        Raises:
            ValueError: a read into it is in flight.
            DiskReadError: the kernel refuses; the memory stays registered.
        """
        return

    @abstractmethod
    async def close(self) -> None:
        """Wait for reads in flight, then release files and threads. Idempotent."""
