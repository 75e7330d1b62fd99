"""The contract of every read engine: one batch of reads in, one completion out.

An engine is bound to one open file. Rooms above describe what they want as arrays, so that a
backend can hand thousands of reads to the kernel without a Python call for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from flashd.types import I64Array, U8Array


@dataclass(frozen=True)
class ReadBatch:
    """Reads of one file into one destination.

    Attributes:
        offset_bytes: ``[n]`` int64, where each read starts in the file.
        length_bytes: ``[n]`` int64, how much it reads; 0 is allowed.
        dest: ``[nbytes]`` uint8, C-contiguous, writeable. Bytes outside the reads stay as they are.
        dest_offset_bytes: ``[n]`` int64, where in ``dest`` each read lands. Reads that overlap
            there leave undefined bytes.

    Raises:
        ValueError: arrays of the wrong type or shape, or a read that leaves ``dest``.
    """

    offset_bytes: I64Array
    length_bytes: I64Array
    dest: U8Array
    dest_offset_bytes: I64Array

    def __post_init__(self) -> None:
        columns = (self.offset_bytes, self.length_bytes, self.dest_offset_bytes)
        for column in columns:
            if column.dtype != np.int64 or column.shape != (len(self.offset_bytes),):
                raise ValueError(f"reads are {column.dtype}{column.shape}, expected int64[n], all of one n")
        dest = self.dest
        if dest.dtype != np.uint8 or dest.ndim != 1:
            raise ValueError(f"dest is {dest.dtype}{dest.shape}, expected uint8[nbytes]")
        if not dest.flags.c_contiguous or not dest.flags.writeable:
            raise ValueError("dest must be C-contiguous and writeable")
        if not len(self.offset_bytes):
            return
        if min(int(column.min()) for column in columns) < 0:
            raise ValueError("a read has a negative offset or length")
        # Subtracting, because a sum of two huge int64 would wrap around.
        if (self.dest_offset_bytes > dest.size - self.length_bytes).any():
            raise ValueError(f"a read leaves its destination of {dest.size} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes that the batch asks for."""
        return int(self.length_bytes.sum())


class ReadEngine(ABC):
    """Reads one open file. Several batches may be outstanding; use it from one event loop.

    Attributes:
        name: the backend, as ``flashd doctor``, logs and metrics call it.
        path: the file.
        direct: whether reads go past the page cache.
        alignment_bytes: a read whose offset, length and destination address are all multiples
            of it needs no scratch copy (1: anything goes).
        reason: why this backend was chosen.
        scratch_reads: reads that went through scratch, because they were not aligned.
    """

    name: str
    path: str
    direct: bool
    alignment_bytes: int
    reason: str
    scratch_reads: int

    @abstractmethod
    async def read(self, batch: ReadBatch) -> None:
        """Read every piece of ``batch`` into its destination.

        Short reads are continued, EIO is retried once. Cancelling the await drops what was not
        yet submitted; reads in flight complete into ``batch.dest``, which they keep alive: a
        caller that reuses its memory shields the read and waits for it.

        Raises:
            BundleCorruptError: the file ends before the batch does.
            DiskReadError: the device or file system failed; names file and offset.
            ValueError: the engine is closed (our own bug).
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait for reads in flight, then release the file and the threads. Idempotent."""
