"""Address space whose pages come and go, and which may be registered with a read engine all the same.

A registered buffer keeps the pages that it had when it was registered. Giving pages back with
``madvise`` and touching the address again brings new ones, and the kernel goes on reading into the old,
where nobody looks. So memory is registered slab by slab, and a slab is unregistered before its pages go.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np

from flashd.disk.buffers import HUGE_PAGE_BYTES, want_huge_pages
from flashd.errors import DiskReadError
from flashd.types import U8Array

SLAB_BYTES = 4 << 20
# Reserved address space shall not count against an overcommit limit. Python names the flag from 3.12 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Registry(Protocol):
    """What pins memory for reads: a read engine, or a store with one."""

    def register(self, memory: U8Array) -> str:
        """See ``ReadEngine.register``."""
        ...

    def unregister(self, memory: U8Array) -> None:
        """See ``ReadEngine.unregister``."""
        ...


class SlabBuffer:
    """Memory that grows and shrinks at its end without moving.

    Args:
        capacity_bytes: address space to reserve; costs no memory by itself.
        engine: registers the slabs in use, where it can; None registers nothing.
        slab_bytes: how much comes and goes at once, a multiple of the page size.

    Attributes:
        memory: ``[capacity_bytes]`` uint8. Only the first ``size_bytes`` may be used.
        size_bytes: whole slabs in use.
        why_unregistered: why slabs are not registered; empty if they are, or if none was tried.
    """

    def __init__(
        self, capacity_bytes: int, engine: Registry | None = None, slab_bytes: int = SLAB_BYTES
    ) -> None:
        if slab_bytes < 1 or slab_bytes % mmap.PAGESIZE or capacity_bytes < 0:
            raise ValueError(
                f"{capacity_bytes} bytes in slabs of {slab_bytes}: want multiples of {mmap.PAGESIZE}"
            )
        self._slab_bytes = slab_bytes
        self._engine = engine
        whole_slabs = -(-capacity_bytes // slab_bytes) * slab_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._pages = mmap.mmap(-1, whole_slabs + HUGE_PAGE_BYTES, flags=flags)
        if slab_bytes % HUGE_PAGE_BYTES == 0:
            want_huge_pages(self._pages)
        mapped = np.frombuffer(self._pages, np.uint8)
        self._start = -mapped.ctypes.data % HUGE_PAGE_BYTES
        self._whole = mapped[self._start : self._start + whole_slabs]
        self.memory: U8Array = self._whole[:capacity_bytes]
        self.size_bytes = 0
        self.why_unregistered = ""

    def resize(self, nbytes: int) -> None:
        """Make the first ``nbytes`` usable, rounded up to whole slabs; what is behind goes back.

        New memory is zero. Bytes that stay keep their content and place.

        Raises:
            ValueError: more than the capacity, or a read into a slab that goes is in flight: nothing
                has gone then.
            DiskReadError: the kernel does not let go of a slab; nothing has gone then, either.
        """
        if not 0 <= nbytes <= self.memory.size:
            raise ValueError(f"{nbytes} bytes, the capacity is {self.memory.size}")
        size = -(-nbytes // self._slab_bytes) * self._slab_bytes
        if size > self.size_bytes:
            for start in range(self.size_bytes, size, self._slab_bytes):
                self._register(start)
        else:
            self._give_back(size)
        self.size_bytes = size

    def _slab(self, start: int) -> U8Array:
        return self._whole[start : start + self._slab_bytes]

    def _register(self, start: int) -> None:
        """The first refusal is the last try: a limit does not go away."""
        if self._engine is not None and not self.why_unregistered:
            self.why_unregistered = self._engine.register(self._slab(start))

    def _give_back(self, size: int) -> None:
        if size == self.size_bytes:
            return
        if self._engine is not None:
            gone = []
            try:
                for start in range(size, self.size_bytes, self._slab_bytes):
                    self._engine.unregister(self._slab(start))
                    gone.append(start)
            except (ValueError, DiskReadError):
                for start in gone:
                    self._register(start)
                raise
            # There is room again for what was refused.
            self.why_unregistered = ""
        self._pages.madvise(mmap.MADV_DONTNEED, self._start + size, self.size_bytes - size)

    def close(self) -> None:
        """Give everything back; the address space goes with the last array over it."""
        self.resize(0)
