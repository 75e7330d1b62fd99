"""``flashd doctor``: what flashd can use on this machine, and what keeps it from more.

A fact that cannot be had is ``None`` in the report, with the reason in ``unknown``; nothing here
fails because of it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from flashd.disk.probe import ENGINES, open_engine, probe_direct
from flashd.errors import ConfigError, FlashdError
from flashd.layout.manifest import BUNDLE, MANIFEST, RESIDENT, ZARR, Manifest
from flashd.store.open import open_manifest
from flashd.tools import host
from flashd.tools.doctor_advice import warnings_of
from flashd.tools.doctor_facts import (
    Alignment,
    BundleFacts,
    Candidate,
    CurveFacts,
    DoctorReport,
    EngineChoice,
    KernelFacts,
)

T = TypeVar("T")

_REGISTERED_BYTES = 64 << 10
# Enough to find out what works.
_PROBE_BYTES = 1 << 20
# A temporary file takes no more than this part of the free space.
_PART_OF_FREE = 4
_CURVE_LIMIT_S = 10.0


class _Facts:
    """Takes facts one by one and remembers why some cannot be had."""

    def __init__(self) -> None:
        self.unknown: dict[str, str] = {}

    def ask(self, name: str, question: Callable[[], T]) -> T | None:
        """The answer, or None if it cannot be had."""
        try:
            return question()
        except (OSError, ValueError, LookupError, RuntimeError, FlashdError, psutil.Error) as exc:
            self.unknown[name] = " ".join(str(exc).split()) or type(exc).__name__
            return None


def doctor(
    directory: Path,
    *,
    curve: bool = True,
    measure: bool = False,
    write: bool = True,
    curve_limit_s: float = _CURVE_LIMIT_S,
    note: Callable[[str], None] = lambda text: None,
) -> DoctorReport:
    """Look at the machine and at the device below a directory.

    Args:
        directory: a bundle, or any directory.
        curve: measure the device's curve if none is kept.
        measure: measure it even so.
        write: whether a temporary file may be made where there is none to read.
        curve_limit_s: time for measuring.
        note: told before something takes long.

    Raises:
        ConfigError: there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give a bundle, or any directory on the device")
    facts = _Facts()
    manifest = facts.ask("bundle", lambda: _manifest(directory))
    engine, alignment, probed = None, None, None
    try:
        # Any file of a bundle tells what works; elsewhere an empty one would not.
        enough = 1 if manifest else _PROBE_BYTES
        with _file_to_read(directory, manifest, write, enough, _PROBE_BYTES) as path:
            probed = str(path)
            alignment = facts.ask("alignment", lambda: Alignment(*probe_direct(str(path))))
            engine = facts.ask("engine", lambda: asyncio.run(_engine(path)))
    except (OSError, FlashdError) as exc:
        facts.unknown |= dict.fromkeys(("engine", "alignment", "probed_file"), str(exc))

    def the_curve() -> CurveFacts:
        kept = None if measure else load_curve(directory, None if engine is None else engine.chosen)
        if kept is None and (curve or measure):
            return _measured(directory, manifest, write, curve_limit_s, note)
        if kept is None:
            raise ConfigError("not measured; `flashd doctor DIR` measures it")
        return _curve_facts(kept, measured_now=False, not_kept="")

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
        io_uring_disabled=facts.ask("io_uring_disabled", host.io_uring_disabled),
        locked_memory=facts.ask("locked_memory", host.locked_memory),
        memory_limits=facts.ask("memory_limits", host.memory_limits),
        total_ram_bytes=facts.ask("total_ram_bytes", lambda: psutil.virtual_memory().total),
        available_ram_bytes=facts.ask("available_ram_bytes", lambda: psutil.virtual_memory().available),
        transparent_hugepages=facts.ask("transparent_hugepages", host.transparent_hugepages),
        kernels=_kernels(),
        bundle=None if manifest is None else bundle_facts(manifest, alignment),
        curve=facts.ask("curve", the_curve),
        unknown=facts.unknown,
        warnings=[],
    )
    return replace(report, warnings=warnings_of(report))


def _manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None if it doesn't look like a bundle."""
    return open_manifest(directory) if (directory / MANIFEST).exists() else None


@contextmanager
def _file_to_read(
    directory: Path, manifest: Manifest | None, write: bool, enough_bytes: int, made_bytes: int
) -> Iterator[Path]:
    """A file with data on the directory's device: the bundle's rows or the directory's largest file, if
    it has ``enough_bytes``, else a temporary one of ``made_bytes`` or what there is space for.

    Raises:
        ConfigError: there is none, and none may be made.
        OSError: none can be made.
    """
    size, path = max(_candidates(directory, manifest), default=(0, directory))
    if size >= enough_bytes:
        yield path
        return
    if not write:
        raise ConfigError(f"no file of {enough_bytes} bytes to read in {directory}, and none may be written")
    nbytes = min(made_bytes, shutil.disk_usage(directory).free // _PART_OF_FREE)
    if nbytes < _PROBE_BYTES:
        raise ConfigError(f"no file of {enough_bytes} bytes to read in {directory}, and no space to make one")
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".flashd-doctor-") as file:
        rng = np.random.default_rng()  # what compresses would be read too fast
        for _ in range(nbytes // _PROBE_BYTES):
            file.write(rng.bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


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
            candidates.append(Candidate(name, False, str(exc).removeprefix(f"{path}: backend {name}: ")))
            continue
        candidates.append(Candidate(name, True, engine.reason))
        await engine.close()
    engine = await open_engine(path)
    try:
        memory = aligned_empty(_REGISTERED_BYTES, _REGISTERED_BYTES)
        why = engine.register(memory)
        engine.unregister(memory)
        return EngineChoice(engine.name, engine.reason, engine.direct, engine.depth, candidates, not why, why)
    finally:
        await engine.close()


def _measured(
    directory: Path, manifest: Manifest | None, write: bool, limit_s: float, note: Callable[[str], None]
) -> CurveFacts:
    try:
        with _file_to_read(directory, manifest, write, MIN_FILE_BYTES, 2 * MIN_FILE_BYTES) as path:
            note(f"measuring the device with reads of {path}: some {limit_s:.0f} s, once")
            found = asyncio.run(measure_curve(path, limit_s=limit_s))
    except OSError as exc:
        raise ConfigError(f"not measured: no file can be made in {directory}: {exc.strerror}") from exc
    return _curve_facts(found, measured_now=True, not_kept=found.save())


def _curve_facts(curve: DeviceCurve, *, measured_now: bool, not_kept: str) -> CurveFacts:
    return CurveFacts(
        stored_in=str(cache_dir()),
        measured_now=measured_now,
        engine=curve.engine,
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


def _kernels() -> KernelFacts:
    return KernelFacts(
        native=kernels.NATIVE,
        native_reads=native_engine.AVAILABLE,
        simd=kernels.simd_level(),
        available_simd=list(kernels.available_simd()),
        threads=kernels.threads(),
    )
