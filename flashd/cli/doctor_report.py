"""What ``flashd doctor`` found, for people."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from flashd.cli.render import human_bytes, paragraph, table

if TYPE_CHECKING:
    from flashd.memory.cgroups import MemoryLimit
    from flashd.tools.doctor_facts import Alignment, BundleFacts, Candidate, CurveFacts, DoctorReport
    from flashd.tools.host import LockedMemory, Mount

T = TypeVar("T")

_UNKNOWN = "unknown: "
_DAY_S = 86400.0


def print_doctor(report: DoctorReport) -> None:
    """Facts, the device's curve, and what is worth changing."""
    table(("FACT", "VALUE"), doctor_rows(report))
    if report.curve is not None:
        print()
        table(*curve_table(report))
        print("GB/s of random reads: size downwards, reads in flight across")
    print()
    for warning in report.warnings:
        paragraph(f"warning: {warning}")
    if not report.warnings:
        print("nothing to improve here" if report.engine else "nothing to improve in what could be found out")


def doctor_rows(report: DoctorReport) -> list[tuple[str, str]]:
    """What ``doctor`` found, as a table for people; the curve's points apart."""
    engine, kernels = report.engine, report.kernels
    rows = [
        ("flashd", f"{report.flashd}, Python {report.python}"),
        ("kernel", report.kernel),
        ("directory", report.directory),
        ("file system", _or_why(report, "mount", report.mount, _mount_text)),
        ("free space", _or_why(report, "free_bytes", report.free_bytes, human_bytes)),
        ("read engine", _or_why(report, "engine", engine, lambda e: f"{e.chosen}, {e.depth} reads at once")),
    ]
    if engine is not None:
        rows += [(f"  {candidate.name}", _candidate_text(candidate)) for candidate in engine.candidates]
    rows += [
        ("registered buffers", _or_why(report, "engine", engine, lambda e: e.registered_reason or "work")),
        ("alignment", _or_why(report, "alignment", report.alignment, _alignment_text)),
        ("io_uring allowed", _io_uring_text(report)),
        ("locked memory", _or_why(report, "locked_memory", report.locked_memory, _locked_text)),
        ("RAM", _or_why(report, "total_ram_bytes", report.total_ram_bytes, human_bytes)),
        ("RAM available", _or_why(report, "available_ram_bytes", report.available_ram_bytes, human_bytes)),
        ("cgroup memory limits", _or_why(report, "memory_limits", report.memory_limits, _limits_text)),
        (
            "transparent huge pages",
            _or_why(report, "transparent_hugepages", report.transparent_hugepages, str),
        ),
        (
            "kernels",
            f"{'native' if kernels.native else 'NumPy'}, {kernels.simd} "
            f"(of {', '.join(kernels.available_simd)}), {kernels.threads} threads",
        ),
        ("native reads", "installed" if kernels.native_reads else "not installed"),
        ("bundle", _or_why(report, "bundle", report.bundle, _bundle_text, "none here")),
        ("calibrated", report.bundle.calibration if report.bundle else "no bundle here"),
        ("device curve", _or_why(report, "curve", report.curve, _curve_text)),
    ]
    return _each_once(rows)


def _each_once(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One reason often keeps several facts away."""
    seen: set[str] = set()
    out = []
    for name, text in rows:
        out.append((name, "unknown, as above" if text in seen else text))
        if text.startswith(_UNKNOWN):
            seen.add(text)
    return out


def _mount_text(mount: Mount) -> str:
    disk = " ".join(filter(None, (mount.disk, mount.model))) or "no disk"
    return f"{mount.file_system} on {mount.source} ({disk})"


def _candidate_text(candidate: Candidate) -> str:
    # Why one works is the alignment, which has a row of its own.
    return "works" if candidate.works else f"does not work: {candidate.reason}"


def _alignment_text(alignment: Alignment) -> str:
    return alignment.how if alignment.bytes is not None else f"none: {alignment.how}"


def _io_uring_text(report: DoctorReport) -> str:
    works = [c.works for c in (report.engine.candidates if report.engine else []) if c.name == "uring"]
    if any(works):
        return "yes"
    switch = "kernel.io_uring_disabled is"
    said = {0: "yes", 1: f"to a group and privileged users only: {switch} 1", 2: f"no: {switch} 2"}
    disabled = report.io_uring_disabled
    return _or_why(report, "io_uring_disabled", disabled, lambda n: said.get(n, f"{switch} {n}"))


def _curve_text(curve: CurveFacts) -> str:
    when = "now" if curve.measured_now else _ago(time.time() - curve.measured_unix_s)
    kept = f"not kept: {curve.not_kept}" if curve.not_kept else f"kept in {curve.stored_in}"
    another = "" if curve.kernel == _release() else f" on another kernel ({curve.kernel})"
    advice = "; --measure repeats it" if another else ""
    verb = "would be" if curve.not_kept else "are"
    gaps = f"gaps up to {human_bytes(curve.break_even_bytes)} {verb} read over"
    return f"measured {when}{another} with {curve.engine}, {kept}; {gaps}{advice}"


def _release() -> str:
    return os.uname().release


def _ago(seconds: float) -> str:
    if seconds < -60:  # a clock that was put back, or a damaged file
        return "in the future"
    for name, unit_s in (("week", 7 * _DAY_S), ("day", _DAY_S), ("hour", 3600.0), ("minute", 60.0)):
        count = int(seconds // unit_s)
        if count:
            return f"{count} {name}{'s' * (count > 1)} ago"
    return "just now"


def _or_why(
    report: DoctorReport, fact: str, value: T | None, text: Callable[[T], str], absent: str = ""
) -> str:
    if value is not None:
        return text(value)
    if fact in report.failed:
        return "see the warning below"
    return f"{_UNKNOWN}{report.unknown[fact]}" if fact in report.unknown else absent


def _locked_text(limits: LockedMemory) -> str:
    soft, hard = (
        "unlimited" if n is None else human_bytes(n) for n in (limits.soft_bytes, limits.hard_bytes)
    )
    return f"{soft} (at most {hard})" + (", but CAP_IPC_LOCK lifts it" * limits.unlimited_by_capability)


def _limits_text(groups: list[MemoryLimit]) -> str:
    texts = []
    for group in groups:
        limits = (("limit", group.limit_bytes), ("throttled from", group.high_bytes))
        said = ", ".join(f"{name} {human_bytes(n)}" for name, n in limits if n is not None)
        texts.append(f"{group.path} (v{group.version}): {said}, {human_bytes(group.usage_bytes)} used")
    return "; ".join(texts) or "none"


def _bundle_text(bundle: BundleFacts) -> str:
    return f"{bundle.store} store, rows {bundle.stride_bytes} bytes apart, read {bundle.layout_note}"


def curve_table(report: DoctorReport) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the curve in GB/s: sizes downwards, depths across."""
    assert report.curve is not None
    speed = {(point.size_bytes, point.depth): point.gb_per_s for point in report.curve.points}
    sizes, depths = sorted({size for size, _ in speed}), sorted({depth for _, depth in speed})
    headers = ["GB/s", *map(str, depths)]
    rows = []
    for size in sizes:
        cells = [f"{speed[size, depth]:.3f}" if (size, depth) in speed else "" for depth in depths]
        rows.append([human_bytes(size), *cells])
    return headers, rows
