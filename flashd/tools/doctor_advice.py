"""What ``flashd doctor`` advises: from facts to sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from flashd.prefetch.stream import RING_BYTES
from flashd.tools.doctor_facts import NOT_WANTED, DoctorReport, EngineChoice

# A disk that turns takes that long for a random read, any other one less.
_SEEK_US = 2000.0
_IN_RAM = ("tmpfs", "ramfs")
_MEMLOCK = "`ulimit -l`, /etc/security/limits.conf (memlock) or systemd's LimitMEMLOCK="
_REINSTALL = "install flashd again where a C++ compiler is"


def warnings_of(report: DoctorReport) -> list[str]:
    """What is worth changing, and how. ``report.warnings`` is not looked at."""
    parts = (_failed, _engine, _locked_memory, _bundle, _device, _code)
    return [text for part in parts for text in part(report)]


def _failed(report: DoctorReport) -> Iterator[str]:
    says = {
        "bundle": "the bundle cannot be used",
        "engine": "no read engine works here",
        "curve": "the device's curve could not be measured",
    }
    for fact in report.failed:
        yield f"{says[fact]}: {report.unknown.get(fact, 'unknown why')}"


def _engine(report: DoctorReport) -> Iterator[str]:
    engine = report.engine
    if engine is None:
        return
    if not engine.direct:
        where = report.mount.file_system if report.mount else "this file system"
        remedy = f"put the bundle on a file system with O_DIRECT such as ext4 or xfs (here: {where})"
        if not report.kernels.native_reads:
            remedy = _REINSTALL
        why = _why(engine, "threads")
        yield f"reads go through the page cache, which takes RAM and CPU time ({why}); {remedy}"
    elif engine.chosen != "uring":
        yield (
            f"io_uring is not used ({_why(engine, 'uring')}): reads take more CPU time; "
            f"{_allow_io_uring(report, _why(engine, 'uring'))}"
        )


def _why(engine: EngineChoice, name: str) -> str:
    return next((c.reason for c in engine.candidates if c.name == name), "unknown why")


def _allow_io_uring(report: DoctorReport, why: str) -> str:
    if not report.kernels.native_reads:
        return _REINSTALL
    if "ulimit -l" in why:
        return f"raise the limit of locked memory with {_MEMLOCK}"
    if report.io_uring_disabled == 2:
        return "the sysctl kernel.io_uring_disabled is 2: set it to 0"
    if report.io_uring_disabled == 1:
        return (
            "the sysctl kernel.io_uring_disabled is 1: set it to 0, or put your user into the group of "
            "kernel.io_uring_group"
        )
    return "Linux 5.6 or newer has it; in a container, let its seccomp profile allow io_uring_setup"


def _locked_memory(report: DoctorReport) -> Iterator[str]:
    engine, limits = report.engine, report.locked_memory
    if engine is None or engine.chosen != "uring":
        return
    small = (
        limits is not None
        and not limits.unlimited_by_capability
        and limits.soft_bytes is not None
        and limits.soft_bytes < RING_BYTES
    )
    if engine.registered_buffers and not small:
        return
    reason = engine.registered_reason
    if small and limits is not None and limits.soft_bytes is not None:
        reason = (
            f"`ulimit -l` is {limits.soft_bytes >> 10} KiB, the stream buffers take {RING_BYTES >> 10} KiB"
        )
    yield (
        f"buffers stay unregistered ({reason}): reads work, with somewhat more CPU time; raise the limit "
        f"with {_MEMLOCK}"
    )


def _bundle(report: DoctorReport) -> Iterator[str]:
    bundle = report.bundle
    if bundle is None:
        return
    if bundle.through_scratch:
        yield (
            f"rows of {bundle.stride_bytes} bytes are read through scratch, with a copy, because this device "
            "wants another alignment; convert the model again on this file system"
        )
    if bundle.calibration_problem:
        yield f"the predictors can't be used: {bundle.calibration_problem}"
    room = [report.available_ram_bytes] if report.available_ram_bytes is not None else []
    for group in report.memory_limits or []:
        limit = group.limit_bytes if group.limit_bytes is not None else group.high_bytes
        room += [] if limit is None else [limit]
    needed = bundle.resident_bytes + RING_BYTES
    if room and min(room) < needed:
        yield (
            f"the weights that stay in RAM and their buffers need {needed >> 20} MiB, only "
            f"{min(room) >> 20} MiB can be had; free some, or raise the cgroup's limit"
        )


def _device(report: DoctorReport) -> Iterator[str]:
    if report.mount is not None and report.mount.file_system in _IN_RAM:
        yield f"{report.mount.file_system} is RAM: a bundle here takes the memory that it should save"
    # What the kernel says of virtual disks is often wrong: the latency tells.
    points = report.curve.points if report.curve else []
    single_us = min((point.latency_us for point in points if point.depth == 1), default=0.0)
    if report.mount is not None and report.mount.rotational and single_us > _SEEK_US:
        yield f"{report.mount.disk} rotates: random reads take milliseconds each; use an SSD"
    if report.curve is not None and report.curve.not_kept not in ("", NOT_WANTED):
        yield (
            f"the device's curve is not kept ({report.curve.not_kept}): the daemon does not know which gaps "
            "between rows would be worth reading over"
        )


def _code(report: DoctorReport) -> Iterator[str]:
    if not report.kernels.native:
        yield f"the native kernels are not installed, computing is slow: {_REINSTALL}"
