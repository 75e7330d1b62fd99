"""``flashd doctor``: what flashd can use on this machine, and what keeps it from more.

A fact that cannot be had is ``None`` in the report, with the reason in ``unknown``; nothing here
fails because of it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from flashd import __version__, kernels
from flashd.config import cache_dir
from flashd.disk import native_engine
from flashd.disk.buffers import aligned_empty
from flashd.disk.curve import MIN_FILE_BYTES, DeviceCurve, load_curve
from flashd.disk.measure import measure_curve
from flashd.disk.pieces import MAX_ALIGNMENT_BYTES
from flashd.disk.probe import ENGINES, open_engine, probe_direct
from flashd.errors import ConfigError, FlashdError
from flashd.layout.manifest import BUNDLE, MANIFEST, RESIDENT, ZARR, Manifest
from flashd.memory import cgroups
from flashd.prefetch.stream import RING_BYTES
from flashd.store.open import open_manifest
from flashd.tools import host
from flashd.tools.calibrated import calibration_facts, calibration_text
from flashd.tools.doctor_advice import warnings_of
from flashd.tools.doctor_facts import (
    NOT_WANTED,
    Alignment,
    BundleFacts,
    Candidate,
    CurveFacts,
    DoctorReport,
    EngineChoice,
    KernelFacts,
)
from flashd.tools.reasons import why_not

T = TypeVar("T")

# Enough to find out what works, whatever the alignment.
_PROBE_BYTES = 2 * MAX_ALIGNMENT_BYTES
_WRITE_BYTES = 1 << 20
# A temporary file takes no more than this part of the free space.
_PART_OF_FREE = 4
_CURVE_LIMIT_S = 10.0
# How file systems say that they have no files without a name.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class _Facts:
    """Takes facts one by one and remembers why some cannot be had."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def ask(self, name: str, question: Callable[[], T]) -> T | None:
        """The answer, or None if it cannot be had."""
        try:
            return question()
        except (OSError, ValueError, LookupError, RuntimeError, FlashdError, psutil.Error) as exc:
            self.unknown[name] = _in_words(exc)
            return None


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class _Sample:
    """A file to read. ``made``: it is a temporary one, without a name."""

    path: Path
    made: bool

    def in_words(self, text: str) -> str:
        """``text`` without a path that says nothing to anybody."""
        return text.replace(str(self.path), "a temporary file") if self.made else text


@dataclass(frozen=True)
class _Place:
    """Where to find a file to read, or to make one.

    Attributes:
        directory: what doctor looks at.
        manifest: of the bundle there.
        write: whether a temporary file may be made at all.
        named: whether it may have a name for a moment, where the file system knows none without.
    """

    directory: Path
    manifest: Manifest | None
    write: bool
    named: bool


def doctor(
    directory: Path,
    *,
    curve: bool = True,
    measure: bool = False,
    write: bool = True,
    curve_limit_s: float = _CURVE_LIMIT_S,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DoctorReport:
    """Look at the machine and at the device below a directory.

    Args:
        directory: a bundle, or any directory.
        curve: measure the device's curve if none is kept.
        measure: measure it even so.
        write: whether anything may be written: a temporary file where there is none to read, and the
            curve. Without it the curve is measured only for ``measure``, and shown.
        curve_limit_s: time for measuring.
        note: told before something takes long.
        progress: told how many points of the curve are measured.

    Raises:
        ConfigError: there is no such directory.
    """
    _check_directory(directory)
    facts = _Facts()
    manifest = facts.ask("bundle", lambda: _manifest(directory))
    place = _Place(directory, manifest, write, named=curve or measure)
    engine, alignment, probed, tried = _probe(place, facts)

    def the_curve() -> CurveFacts:
        kept = None if measure else load_curve(directory, None if engine is None else engine.chosen)
        if kept is not None:
            return _curve_facts(kept, measured_now=False, not_kept="")
        if measure or (curve and write):
            note(f"measuring the device with random reads, some {curve_limit_s:.0f} s")
            return _measured(place, curve_limit_s, progress)
        how = "`flashd doctor DIR` measures it" if write else "--measure does, and does not keep it"
        raise ConfigError(f"not measured; {how}")

    the_facts = facts.ask("curve", the_curve)
    asked = {"bundle": True, "engine": tried, "curve": measure}
    report = DoctorReport(
        flashd=__version__,
        python=platform.python_version(),
        kernel=host.kernel(),
        directory=str(directory),
        probed_file=probed,
        mount=facts.ask("mount", lambda: host.mount_of(directory)),
        free_bytes=facts.ask("free_bytes", lambda: shutil.disk_usage(directory).free),
        engine=engine,
        alignment=alignment,
        io_uring_disabled=facts.ask("io_uring_disabled", _io_uring_disabled),
        locked_memory=facts.ask("locked_memory", host.locked_memory),
        memory_limits=facts.ask("memory_limits", cgroups.memory_limits),
        total_ram_bytes=facts.ask("total_ram_bytes", lambda: psutil.virtual_memory().total),
        available_ram_bytes=facts.ask("available_ram_bytes", lambda: psutil.virtual_memory().available),
        transparent_hugepages=facts.ask("transparent_hugepages", host.transparent_hugepages),
        kernels=_kernels(),
        bundle=None if manifest is None else _with_calibration(directory, manifest, alignment),
        curve=the_facts,
        unknown=facts.unknown,
        warnings=[],
        failed=[fact for fact in asked if asked[fact] and fact in facts.unknown],
    )
    return replace(report, warnings=warnings_of(report))


def _check_directory(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; give its directory: flashd doctor {directory.parent}")
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give a bundle, or any directory on the device")


def _manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None if it doesn't look like a bundle."""
    return open_manifest(directory) if (directory / MANIFEST).exists() else None


def _io_uring_disabled() -> int:
    try:
        return host.io_uring_disabled()
    except FileNotFoundError as exc:
        raise LookupError("this kernel has no such setting (Linux 6.6 has)") from exc


def _probe(place: _Place, facts: _Facts) -> tuple[EngineChoice | None, Alignment | None, str | None, bool]:
    """Engine, alignment, the file read for them if it stays, and whether there was one to read."""
    try:
        # Any file of a bundle tells what works; elsewhere an empty one would not.
        enough = 1 if place.manifest else _PROBE_BYTES
        with _file_to_read(place, enough, _WRITE_BYTES) as sample:
            path = sample.path
            alignment = facts.ask("alignment", lambda: Alignment(*probe_direct(str(path))))
            engine = facts.ask("engine", lambda: asyncio.run(_engine(path)))
            for fact in {"alignment", "engine"} & facts.unknown.keys():
                facts.unknown[fact] = sample.in_words(facts.unknown[fact])
            return engine, alignment, None if sample.made else str(path), True
    except (OSError, FlashdError) as exc:
        facts.unknown |= dict.fromkeys(("engine", "alignment"), _in_words(exc))
        return None, None, None, False


@contextmanager
def _file_to_read(place: _Place, enough_bytes: int, made_bytes: int) -> Iterator[_Sample]:
    """A file with data on the place's device: the bundle's rows or the directory's largest file, if
    it has ``enough_bytes``, else a temporary one of ``made_bytes`` or what there is space for.

    Raises:
        ConfigError: there is none, and none can be made.
        OSError: the directory cannot be listed, or the file not be written.
    """
    size, path = max(_candidates(place.directory, place.manifest), default=(0, place.directory))
    if size >= enough_bytes:
        yield _Sample(path, made=False)
        return
    elsewhere = "give a bundle, or a directory that you may write to"
    missing = f"no file of {_size(enough_bytes)} to read in {place.directory}"
    if not place.write:
        raise ConfigError(f"{missing}, and none may be written")
    nbytes = min(made_bytes, shutil.disk_usage(place.directory).free // _PART_OF_FREE)
    if nbytes < _WRITE_BYTES:
        raise ConfigError(f"{missing}, and no space to make one; {elsewhere}")
    try:
        fd = _nameless_file(place)
    except OSError as exc:
        raise ConfigError(f"{missing}, and none can be made ({exc.strerror}); {elsewhere}") from exc
    with os.fdopen(fd, "wb") as file:
        rng = np.random.default_rng()  # what compresses would be read too fast
        for _ in range(nbytes // _WRITE_BYTES):
            file.write(rng.bytes(_WRITE_BYTES))
        file.flush()
        os.fsync(fd)
        # Opening that opens the same file again, with flags of its own.
        yield _Sample(Path(f"/proc/self/fd/{fd}"), made=True)


def _nameless_file(place: _Place) -> int:
    """Descriptor of a new file that nobody has to remove, however this process ends.

    Raises:
        OSError: none can be made.
    """
    try:
        return os.open(place.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in _NO_TMPFILE or not place.named:
            raise
    fd, name = tempfile.mkstemp(dir=place.directory, prefix=".flashd-doctor-")
    os.unlink(name)
    return fd


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{-(-nbytes >> 10)} KiB"


def _candidates(directory: Path, manifest: Manifest | None) -> Iterator[tuple[int, Path]]:
    """(size, path) of files that might be read."""
    if manifest is not None:
        rows = [e for e in manifest.files if e.name == BUNDLE or e.name.startswith(f"{ZARR}/")]
        yield from ((entry.size_bytes, directory / entry.name) for entry in rows)
        return
    for path in directory.iterdir():
        if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK):
            info = path.stat()
            if info.st_blocks * 512 >= info.st_size:  # holes are on no device
                yield info.st_size, path


async def _engine(path: Path) -> EngineChoice:
    """Try every engine on a file, then let ``auto`` choose."""
    candidates = []
    for name in ENGINES:
        try:
            engine = await open_engine(path, name)
        except ConfigError as exc:
            candidates.append(Candidate(name, False, why_not(exc)))
            continue
        candidates.append(Candidate(name, True, engine.reason))
        await engine.close()
    engine = await open_engine(path)
    try:
        # What the daemon pins.
        memory = aligned_empty(RING_BYTES)
        why = engine.register(memory)
        engine.unregister(memory)
        return EngineChoice(engine.name, engine.reason, engine.direct, engine.depth, candidates, not why, why)
    finally:
        await engine.close()


def _measured(place: _Place, limit_s: float, progress: Callable[[int, int], None]) -> CurveFacts:
    with _file_to_read(place, MIN_FILE_BYTES, 2 * MIN_FILE_BYTES) as sample:
        try:
            found = asyncio.run(measure_curve(sample.path, limit_s=limit_s, progress=progress))
        except FlashdError as exc:
            raise ConfigError(f"not measured: {sample.in_words(_in_words(exc))}") from exc
    not_kept = found.save() if place.write else NOT_WANTED
    return _curve_facts(found, measured_now=True, not_kept=not_kept)


def _curve_facts(curve: DeviceCurve, *, measured_now: bool, not_kept: str) -> CurveFacts:
    return CurveFacts(
        stored_in=str(cache_dir()),
        measured_now=measured_now,
        engine=curve.engine,
        kernel=curve.kernel,
        measured_unix_s=curve.measured_unix_s,
        break_even_bytes=curve.break_even_bytes(),
        points=list(curve.points),
        not_kept=not_kept,
    )


def bundle_facts(manifest: Manifest, alignment: Alignment | None) -> BundleFacts:
    """How a bundle's rows are read on a device of this alignment; None if it is unknown."""
    stride = manifest.ffn.stride_bytes
    resident_bytes = manifest.file(RESIDENT).size_bytes
    if alignment is None:
        return BundleFacts(manifest.store, stride, "unknown: the alignment is", None, resident_bytes)
    if alignment.bytes is None:
        how, scratch = "through the page cache, with a copy", False
    elif stride % alignment.bytes:
        how = f"through scratch, with a copy: the stride is no multiple of the alignment {alignment.bytes}"
        scratch = True
    else:
        how, scratch = "in place, without a copy", False
    return BundleFacts(manifest.store, stride, how, scratch, resident_bytes)


def _with_calibration(directory: Path, manifest: Manifest, alignment: Alignment | None) -> BundleFacts:
    facts, problem = calibration_facts(directory, manifest)
    text = calibration_text(facts, problem, manifest.ffn.n_layers)
    return replace(bundle_facts(manifest, alignment), calibration=text, calibration_problem=problem)


def _kernels() -> KernelFacts:
    return KernelFacts(
        native=kernels.NATIVE,
        native_reads=native_engine.AVAILABLE,
        simd=kernels.simd_level(),
        available_simd=list(kernels.available_simd()),
        threads=kernels.threads(),
    )
