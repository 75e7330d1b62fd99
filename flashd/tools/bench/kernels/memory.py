"""Cold memory: so much of it that whatever is read next has left the caches since it was read last.

One arena serves all cases, one after the other: each sees it as weights of its own shape and type. A
position moves through it, and everybody who is measured takes what comes next. A call that reads all of
its piece finds nothing again before everything else was read, by whomever. One that reads a part of it
(listed rows) takes other parts of the piece in turn: see ``ffn``.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from flashd.disk.buffers import PAGE_BYTES, aligned_empty
from flashd.errors import FlashdError
from flashd.layout.geometry import round_up
from flashd.types import NUMPY_DTYPE, U8Array

MIN_BYTES = 512 << 20
MAX_BYTES = 2 << 30
QUICK_BYTES = 64 << 20
# Of the L3 caches together; an arena of that size leaves them as good as no hits.
L3_TIMES = 4
# Of what is available: the rest is for torch, its copies, and everybody else on the machine.
_SHARE = 4
_ROOT = Path("/")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TILE_ELEMENTS = 1 << 20
# Weights of a real model have about this spread: sums over thousands stay far from f16's limits.
_SPREAD = 0.05


class Arena:
    """Touched memory in huge pages, as the daemon holds weights, and the position in it.

    Attributes:
        memory: ``[nbytes]`` uint8.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = aligned_empty(nbytes, huge_pages=True)
        self._dtype = ""
        self._position = 0

    def fill(self, dtype: str) -> None:
        """Make weights of it: normally distributed ones of ``dtype``, the same every time.

        Args:
            dtype: ``f32``, ``f16`` or ``bf16``; ``u8`` takes what is there.
        """
        if dtype == self._dtype or (dtype == "u8" and self._dtype):
            return
        values = np.random.default_rng(0).standard_normal(_TILE_ELEMENTS, np.float32) * np.float32(_SPREAD)
        if dtype == "bf16":
            tile = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
        else:
            tile = values.astype(NUMPY_DTYPE.get(dtype, NUMPY_DTYPE["f32"])).view(np.uint8)
        for start in range(0, self.memory.size, tile.size):
            part = self.memory[start : start + tile.size]
            part[:] = tile[: part.size]
        self._dtype = dtype

    def parts(self, nbytes: int) -> list[U8Array]:
        """As many pieces of ``nbytes`` as there are, each on a page of its own."""
        stride = _stride(nbytes)
        count = self.memory.size // stride
        return [self.memory[i * stride : i * stride + nbytes] for i in range(count)]

    def take(self, nbytes: int, count: int) -> list[int]:
        """Numbers of the next ``count`` of ``parts(nbytes)``; the position moves behind them.

        Without bytes there is one part, and nothing moves.
        """
        if not nbytes:
            return [0] * count
        stride = _stride(nbytes)
        total = self.memory.size // stride
        first = -(-self._position // stride)
        self._position = (first + count) % total * stride
        return [(first + i) % total for i in range(count)]


def _stride(nbytes: int) -> int:
    return round_up(nbytes, PAGE_BYTES)


def arena_bytes(largest: int, quick: bool, l3: int | None, available: int) -> int:
    """Size of the arena: 512 MiB or four times the L3, at most 2 GiB and a quarter of what is available.

    Args:
        largest: bytes that the largest case reads at once.
        quick: take 64 MiB, whatever the caches are.
        l3: bytes of the L3 caches; None if unknown.
        available: bytes that can be had.

    Raises:
        FlashdError: a quarter of what is available does not hold the largest case.
    """
    wanted = QUICK_BYTES if quick else min(max(MIN_BYTES, L3_TIMES * (l3 or 0)), MAX_BYTES)
    nbytes = min(wanted, available // _SHARE) // PAGE_BYTES * PAGE_BYTES
    needed = _stride(largest)
    if nbytes < needed:
        raise FlashdError(
            f"{available >> 20} MiB of memory are available, expected at least {_SHARE * needed >> 20} MiB; "
            "free some, or choose smaller cases with --verb, --dtype or --quick"
        )
    return nbytes


def l3_bytes(root: Path = _ROOT) -> int | None:
    """Bytes of all L3 caches of the CPUs in the affinity mask, as the kernel says; None without any."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        for cache in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
            try:
                level, size, shared = (
                    (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            if level == "3" and size[:-1].isdecimal() and size[-1] in _UNITS:
                found[shared] = int(size[:-1]) * _UNITS[size[-1]]
    return sum(found.values()) or None


def cpu_model(root: Path = _ROOT) -> str:
    """What the CPU calls itself; the architecture's name where it says nothing."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), os.uname().machine)
