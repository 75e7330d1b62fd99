"""How many threads NumPy's matrix product has. NumPy itself has no say in it, its OpenBLAS does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np  # noqa: F401  # brings its OpenBLAS into the process

_MAPS = Path("/proc/self/maps")
# As NumPy's wheels name it since 1.26, and as distributions do.
_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


@contextmanager
def blas_threads(count: int, maps: Path = _MAPS) -> Iterator[bool]:
    """A block in which OpenBLAS takes ``count`` threads.

    Args:
        count: at least 1.
        maps: where the process's libraries are listed.

    Returns:
        Whether there is an OpenBLAS; another library keeps the threads that it has.
    """
    found = [(library, name) for library in _libraries(maps) for name in _NAMES if _has(library, name)]
    before = [getattr(library, name.format("get"))() for library, name in found]
    for library, name in found:
        getattr(library, name.format("set"))(count)
    try:
        yield bool(found)
    finally:
        for (library, name), threads in zip(found, before, strict=True):
            getattr(library, name.format("set"))(threads)


def _libraries(maps: Path) -> Iterator[ctypes.CDLL]:
    paths = (line.split(maxsplit=5)[5:] for line in maps.read_text().splitlines())
    for path in dict.fromkeys(path[0] for path in paths if path and "openblas" in path[0].lower()):
        yield ctypes.CDLL(path)


def _has(library: ctypes.CDLL, name: str) -> bool:
    return all(hasattr(library, name.format(verb)) for verb in ("get", "set"))
