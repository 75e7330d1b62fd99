"""Memory that O_DIRECT can read into."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from flashd.types import U8Array

PAGE_BYTES = mmap.PAGESIZE
# The usual size of a huge page; elsewhere nothing is lost but their help.
HUGE_PAGE_BYTES = 2 << 20


def aligned_empty(nbytes: int, alignment: int = 4096, *, huge_pages: bool = False) -> U8Array:
    """Zeroed anonymous memory that starts on a multiple of ``alignment``.

    Pages become resident when first touched; they go back to the kernel when the last array over
    them is garbage collected. Private, so it counts as RssAnon.

    Args:
        nbytes: size in bytes; 0 gives an empty array.
        alignment: a power of two.
        huge_pages: ask for them, for memory that will be used as a whole. Reads into it are faster: the
            kernel pins one page instead of many, and the device gets one piece of memory a read. The
            kernel may refuse silently.

    Returns:
        ``[nbytes]`` uint8, writeable.
    """
    if nbytes < 0 or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{nbytes} bytes aligned to {alignment}: want >= 0 bytes and a power of two")
    if huge_pages:
        alignment = max(alignment, HUGE_PAGE_BYTES)
    slack = alignment if alignment > PAGE_BYTES else 0
    # mmap's default is MAP_SHARED, which would count as shared memory and survive a fork.
    pages = mmap.mmap(-1, max(nbytes + slack, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages:
        want_huge_pages(pages)
    whole = np.frombuffer(pages, dtype=np.uint8)
    skip = -whole.ctypes.data % alignment if slack else 0
    return whole[skip : skip + nbytes]


def want_huge_pages(pages: mmap.mmap) -> None:
    """Ask for huge pages; a kernel without them is no error."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
