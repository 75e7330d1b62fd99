"""What ``flashd doctor`` reports. ``dataclasses.asdict`` makes JSON of it."""

from __future__ import annotations

from dataclasses import dataclass

from flashd.disk.curve import CurvePoint
from flashd.memory.cgroups import MemoryLimit
from flashd.tools.host import LockedMemory, Mount

# ``CurveFacts.not_kept`` where that was the wish.
NOT_WANTED = "--no-write"


@dataclass(frozen=True)
class Candidate:
    """A read engine, and whether it works on this file.

    Attributes:
        name: ``uring``, ``threads`` or ``buffered``.
        works: whether a real read worked.
        reason: why it is as it is, in words.
    """

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class EngineChoice:
    """What ``auto`` takes.

    Attributes:
        chosen: its name.
        reason: why.
        direct: whether it reads past the page cache.
        depth: reads that the kernel holds at once.
        candidates: all engines, fastest first.
        registered_buffers: whether the chosen engine can register as much memory as the daemon would.
        registered_reason: why not; empty if it does.
    """

    chosen: str
    reason: str
    direct: bool
    depth: int
    candidates: list[Candidate]
    registered_buffers: bool
    registered_reason: str


@dataclass(frozen=True)
class Alignment:
    """What O_DIRECT reads need here.

    Attributes:
        bytes: offsets, lengths and addresses are multiples of it; None if there are no such reads.
        how: how that is known.
    """

    bytes: int | None
    how: str


@dataclass(frozen=True)
class BundleFacts:
    """The bundle that the directory is.

    Attributes:
        store: ``file`` or ``zarr``.
        stride_bytes: distance of neuron rows.
        layout_note: how rows of this stride are read here.
        through_scratch: whether they take a copy, because the stride is no multiple of the alignment;
            None if the alignment is unknown.
        resident_bytes: weights that must fit in RAM.
        calibration: what ``flashd calibrate`` found out, in words.
        calibration_problem: why that can't be used; empty if it can, or there is none.
    """

    store: str
    stride_bytes: int
    layout_note: str
    through_scratch: bool | None
    resident_bytes: int
    calibration: str = ""
    calibration_problem: str = ""


@dataclass(frozen=True)
class KernelFacts:
    """What computes.

    Attributes:
        native: whether the native kernels are installed.
        native_reads: whether the native read engines are.
        simd: level in use; ``numpy`` without native kernels.
        available_simd: levels that this CPU has.
        threads: of the kernels.
    """

    native: bool
    native_reads: bool
    simd: str
    available_simd: list[str]
    threads: int


@dataclass(frozen=True)
class CurveFacts:
    """The device's measured curve.

    Attributes:
        stored_in: directory where curves are kept.
        measured_now: whether this call measured it.
        engine: who read.
        kernel: release that it was measured on.
        measured_unix_s: when.
        break_even_bytes: a gap up to this size is cheaper to read than to leave out.
        points: see ``CurvePoint``.
        not_kept: why it was not stored; empty if it was.
    """

    stored_in: str
    measured_now: bool
    engine: str
    kernel: str
    measured_unix_s: int
    break_even_bytes: int
    points: list[CurvePoint]
    not_kept: str


@dataclass(frozen=True)
class DoctorReport:
    """All facts. The keys stay from release to release; new ones may come.

    Attributes:
        flashd, python, kernel: versions.
        directory: what was looked at.
        probed_file: the file that was read to find out; None for a temporary one.
        mount: file system and disk below the directory.
        free_bytes: for an unprivileged user.
        engine: the read engines.
        alignment: of reads past the page cache.
        io_uring_disabled: the sysctl.
        locked_memory: limits of pinned memory.
        memory_limits: cgroups that limit memory, the process's own first; empty if none does.
        total_ram_bytes, available_ram_bytes: of the machine, cgroups apart.
        transparent_hugepages: ``always``, ``madvise`` or ``never``.
        kernels: the native code in use.
        bundle: None where the directory is no bundle.
        curve: the device's measured curve.
        unknown: why a fact that is None cannot be had, by field.
        warnings: what is worth changing, in plain words.
        failed: what makes the command end with 1: ``bundle``, if it cannot be used; ``engine``, if none
            works; ``curve``, if measuring it was asked for and failed.
    """

    flashd: str
    python: str
    kernel: str
    directory: str
    probed_file: str | None
    mount: Mount | None
    free_bytes: int | None
    engine: EngineChoice | None
    alignment: Alignment | None
    io_uring_disabled: int | None
    locked_memory: LockedMemory | None
    memory_limits: list[MemoryLimit] | None
    total_ram_bytes: int | None
    available_ram_bytes: int | None
    transparent_hugepages: str | None
    kernels: KernelFacts
    bundle: BundleFacts | None
    curve: CurveFacts | None
    unknown: dict[str, str]
    warnings: list[str]
    failed: list[str]
