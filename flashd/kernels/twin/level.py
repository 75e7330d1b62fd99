"""Threads and instruction sets, of which the twins have one each."""

from __future__ import annotations

from flashd.kernels import check


def set_threads(n: int) -> None:
    """NumPy's twins run on the calling thread; checks ``n`` and ignores it."""
    check.thread_count(n)


def threads() -> int:
    """Threads that the verbs use: 1."""
    return 1


def rest() -> None:
    """Let threads sleep that are looking out for the next verb: somebody else is about to need a CPU, and a
    thread that wakes up where all are busy takes the one of whoever has woken it."""


def simd_level() -> str:
    """Instruction set in use: ``numpy``."""
    return "numpy"


def available_simd() -> tuple[str, ...]:
    """Levels that ``set_simd`` takes here."""
    return ("numpy",)


def set_simd(level: str) -> None:
    """``ValueError`` unless ``level`` is ``numpy``, the only one without the native module."""
    if level != "numpy":
        raise ValueError(
            f"SIMD level '{level}' needs the native kernels, which are not installed; "
            "expected numpy, or install flashd with a C++ compiler"
        )
