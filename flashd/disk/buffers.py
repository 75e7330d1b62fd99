"""Memory that O_DIRECT can read into."""

from __future__ import annotations

import mmap

import numpy as np

from flashd.types import U8Array

PAGE_BYTES = mmap.PAGESIZE


def aligned_empty(nbytes: int, alignment: int = 4096) -> U8Array:
    """Zeroed anonymous memory that starts on a multiple of ``alignment``.

    Pages become resident when first touched; they go back to the kernel when the last array over
    them is garbage collected. Private, so it counts as RssAnon.

    Args:
        nbytes: size in bytes; 0 gives an empty array.
        alignment: a power of two.

    Returns:
        ``[nbytes]`` uint8, writeable.
    """
    if nbytes < 0 or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{nbytes} bytes aligned to {alignment}: want >= 0 bytes and a power of two")
    slack = alignment if alignment > PAGE_BYTES else 0
    # mmap's default is MAP_SHARED, which would count as shared memory and survive a fork.
    pages = mmap.mmap(-1, max(nbytes + slack, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(pages, dtype=np.uint8)
    skip = -whole.ctypes.data % alignment if slack else 0
    return whole[skip : skip + nbytes]
