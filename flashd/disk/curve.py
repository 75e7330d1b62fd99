"""What a device delivers at which size and depth: kept in the user's cache directory, one file for each
device and engine, and used to decide which gaps between wanted rows are read over.

Nothing here is needed for serving: a curve that is missing, damaged or of another device means that no
gap is read over.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashd.config import cache_dir
from flashd.disk.device import device_identity
from flashd.disk.probe import ENGINES
from flashd.layout.coalesce import MAX_CURVE_SIZES, break_even_gap_bytes

# A smaller file lies in the caches of many a device and says little about reads all over it.
MIN_FILE_BYTES = 64 << 20
_FORMAT = "flashd-device-curve"
_VERSION = 1
_MAX_FILE_BYTES = 1 << 20
# Many times what is ever measured: more would cost memory and time at each start of the daemon.
_MAX_POINTS = 1024
_LEAST, _MOST = 1e-12, 1 << 62  # beyond is no measurement, and might overflow


@dataclass(frozen=True)
class CurvePoint:
    """Random reads of one size with one number of them outstanding.

    Attributes:
        size_bytes: of each read.
        depth: reads that the kernel held at once.
        gb_per_s: 1e9 bytes a second.
        latency_us: mean time from submitting a read to its completion (Little's law).
    """

    size_bytes: int
    depth: int
    gb_per_s: float
    latency_us: float


@dataclass(frozen=True)
class DeviceCurve:
    """A measured device.

    Attributes:
        points: in the order measured, each size and depth once.
        engine: the read engine, ``uring``, ``threads`` or ``buffered``.
        direct: whether it went past the page cache; else the points are mostly about memory.
        kernel: release of the kernel.
        device: see ``device_identity``.
        measured_unix_s: when, in seconds since 1970.
        file_bytes: size of the file that was read.
    """

    points: tuple[CurvePoint, ...]
    engine: str
    direct: bool
    kernel: str
    device: str
    measured_unix_s: int
    file_bytes: int

    def fastest(self) -> dict[int, CurvePoint]:
        """For each size, ascending, the point of the depth that was fastest: the device kept busy.

        The fastest rather than the deepest, because whatever else runs can only slow a point down.
        """
        best: dict[int, CurvePoint] = {}
        for point in sorted(self.points, key=lambda point: (point.size_bytes, point.gb_per_s)):
            best[point.size_bytes] = point
        return best

    def break_even_bytes(self) -> int:
        """Longest gap between two wanted rows that is cheaper to read than to leave out; 0 for a page
        cache, where both are copies."""
        fastest = self.fastest()
        if not self.direct or not fastest:
            return 0
        return break_even_gap_bytes(
            list(fastest), [size / (point.gb_per_s * 1e9) for size, point in fastest.items()]
        )

    def save(self, directory: Path | None = None) -> str:
        """Keep this curve for its device and engine; readers see the old one or the new one.

        Args:
            directory: ``config.cache_dir()`` by default; made (0700) if missing.

        Returns:
            Nothing if it worked, else why not: serving works all the same.
        """
        if self.file_bytes < MIN_FILE_BYTES:
            return (
                f"measured on a file of {self.file_bytes / (1 << 20):.3g} MiB, too small to stand for the "
                f"device; measure on one of {MIN_FILE_BYTES >> 20} MiB or more"
            )
        try:
            path = _curve_path(directory, self.device, self.engine)
        except RuntimeError as exc:
            return str(exc)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(path, json.dumps({"format": _FORMAT, "format_version": _VERSION, **asdict(self)}))
        except OSError as exc:
            return f"{path.parent} cannot be written: {exc.strerror or exc}"
        return ""


# Name and type of each field, as its annotation says.
_POINT_TYPES = {item.name: str(item.type) for item in fields(CurvePoint)}
_CURVE_TYPES = {item.name: str(item.type).split("[")[0] for item in fields(DeviceCurve)}


def load_curve(
    path: str | os.PathLike[str], engine: str | None = None, directory: Path | None = None
) -> DeviceCurve | None:
    """The curve kept for the device that holds ``path``; takes less than a millisecond.

    Args:
        path: a file or directory.
        engine: whose curve; by default that of the fastest engine that has one.
        directory: ``config.cache_dir()`` by default.

    Returns:
        None if there is none that can be used. Never raises for what is found on the disk.
    """
    try:
        device = device_identity(path)
        names = ENGINES if engine is None else (engine,)
        files = [_curve_path(directory, device, name) for name in names]
    except (OSError, RuntimeError, ValueError):
        return None
    for name, file in zip(names, files, strict=True):
        curve = _read(file)
        if curve is not None and (curve.device, curve.engine) == (device, name):
            return curve
    return None


def _curve_path(directory: Path | None, device: str, engine: str) -> Path:
    name = hashlib.sha256(device.encode()).hexdigest()[:16]
    return (cache_dir() if directory is None else directory) / f"curve-{name}-{engine}.json"


def _replace(path: Path, text: str) -> None:
    """Write a file under its name at once or not at all."""
    fd, partial = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _read(path: Path) -> DeviceCurve | None:
    try:
        # A FIFO of this name must not stop the daemon from starting.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_FILE_BYTES:
                return None
            return _from_json(json.loads(file.read()))
    except (OSError, ValueError, RecursionError):
        return None


def _from_json(values: Any) -> DeviceCurve | None:
    """The curve that a file holds; None for anything that ``save`` did not write."""
    if not isinstance(values, dict) or (values.get("format"), values.get("format_version")) != (
        _FORMAT,
        _VERSION,
    ):
        return None
    raw = values.get("points")
    if not isinstance(raw, list) or not 0 < len(raw) <= _MAX_POINTS:
        return None
    if not all(_fits(_POINT_TYPES, point) for point in raw):
        return None
    if len({point["size_bytes"] for point in raw}) > MAX_CURVE_SIZES:
        return None
    points = tuple(CurvePoint(**{name: point[name] for name in _POINT_TYPES}) for point in raw)
    values = {**values, "points": points}
    if not _fits(_CURVE_TYPES, values):
        return None
    return DeviceCurve(**{name: values[name] for name in _CURVE_TYPES})


def _fits(types: Mapping[str, str], values: Any) -> bool:
    """Whether an object of JSON has the fields, with their types and sensible numbers."""
    if not isinstance(values, dict):
        return False
    for name, expected in types.items():
        value = values.get(name)
        if expected == "int":
            good = type(value) is int and 0 < value < _MOST
        elif expected == "float":
            good = isinstance(value, int | float) and type(value) is not bool and _LEAST < value < _MOST
        else:
            good = type(value).__name__ == expected
        if not good:
            return False
    return True
