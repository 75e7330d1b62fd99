"""What ``flashd bench io`` reports. ``dataclasses.asdict`` makes JSON of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IoRow:
    """One line of the result. ``dataclasses.asdict`` makes JSON of it.

    Attributes:
        bundle: name of its directory.
        engine: one of ``ENGINES``.
        store: ``file`` or ``zarr``.
        pattern: ``random`` or ``sequential``.
        size_bytes: of each read.
        depth: reads that the kernel holds at once.
        gb_per_s: median, 1e9 bytes a second.
        fio_gb_per_s: median of fio's io_uring at this size and depth on the same files, or None.
        fio_best_gb_per_s: the same with fio's buffers and files registered and its buffers on huge pages;
            None where it was not measured, as in a quick run.
        ratio: ``gb_per_s / fio_gb_per_s``; None without fio, and for ``buffered``, whose figures are
            partly about RAM.
        cpu_us_per_read: median; CPU time of all threads for each read.
        fio_cpu_us_per_read: the same of fio, or None.
        max_callback_cpu_ms: the most CPU time that one callback took on the event loop in a round, the
            median of the rounds: a virtual machine's clock counts what its host did meanwhile.
        max_callback_wall_ms: likewise the longest that one took by the clock.
        rounds_gb_per_s, fio_rounds_gb_per_s: what the medians are of.
        note: what one should know about the figure; often empty.
    """

    bundle: str
    engine: str
    store: str
    pattern: str
    size_bytes: int
    depth: int
    gb_per_s: float
    fio_gb_per_s: float | None
    fio_best_gb_per_s: float | None
    ratio: float | None
    cpu_us_per_read: float
    fio_cpu_us_per_read: float | None
    max_callback_cpu_ms: float
    max_callback_wall_ms: float
    rounds_gb_per_s: list[float]
    fio_rounds_gb_per_s: list[float]
    note: str


@dataclass(frozen=True)
class BytesCheck:
    """Whether the engines read what they say, by the kernel's count.

    Attributes:
        ok: None where it cannot be known.
        worst_percent: the largest difference of one row, of the row's bytes, less a MiB that the program
            itself may have read; None if unknown.
        detail: in words.
    """

    ok: bool | None
    worst_percent: float | None
    detail: str


@dataclass(frozen=True)
class IoReport:
    """The result of ``flashd bench io``.

    Attributes:
        rows: see ``IoRow``.
        directories: the bundles.
        device: kernel, file system and disk; empty texts where unknown.
        fio: its version; None if it took no part.
        max_callback_cpu_ms: over all rows.
        bytes_check: see ``BytesCheck``.
        notes: what was left out, and why.
    """

    rows: list[IoRow]
    directories: list[str]
    device: dict[str, str]
    fio: str | None
    max_callback_cpu_ms: float
    bytes_check: BytesCheck
    notes: list[str]

    def title(self) -> str:
        """Kernel, file system and disk in one line."""
        facts = dict(self.device)
        if facts.get("disk") and facts.get("source", "").endswith(facts["disk"]):
            del facts["disk"]  # said with its directory
        return ", ".join(filter(None, facts.values()))
