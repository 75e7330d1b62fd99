"""Where a bundle grows: ``NAME.partial`` beside its final place, locked, resumable, renamed last.

NAME.partial/progress.json   what is durable, and of which conversion; gone before the rename
NAME.partial/...             the bundle's files
NAME                         appears whole, by one rename
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from flashd.disk.probe import probe_direct
from flashd.errors import BundleError, ConversionError, DiskReadError, OutOfSpaceError
from flashd.layout.geometry import LAYER_ALIGN_BYTES, MIN_STRIDE_ALIGN_BYTES
from flashd.layout.manifest import (
    BUNDLE,
    FORMAT,
    MANIFEST,
    RESIDENT,
    SUMS,
    TOKENIZER,
    ZARR,
    Manifest,
    from_json,
    to_json,
)
from flashd.tools.convert.files import sync_path, write_durably, write_errors

PROGRESS = "progress.json"
SUFFIX = ".partial"
FINGERPRINT = "fingerprint"  # provenance key: tells a finished partial directory from another's
ALREADY = "is there already, made by the same command; nothing to do (--overwrite makes it again)"
_OURS = {
    BUNDLE,
    MANIFEST,
    RESIDENT,
    SUMS,
    TOKENIZER,
    ZARR,
    PROGRESS,
    # Written by calibration, present when an old bundle was swapped out.
    "predictors.safetensors",
    "calibration.json",
    "calibration.md",
    "calibration.png",
    ".calibrate.partial",
}
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass
class Durable:
    """What an interrupted conversion has safely on disk.

    Attributes:
        fingerprint: source files, options and version this belongs to.
        resident_tensors: complete tensors at the front of ``resident.safetensors``.
        layers: complete FFN layers.
        sizes: file -> bytes at its front that are durable.
        zarr_files: name, size and SHA-256 of the files of those layers.
    """

    fingerprint: str
    resident_tensors: int = 0
    layers: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    zarr_files: list[tuple[str, int, str]] = field(default_factory=list)


class Destination:
    """Context manager around ``NAME.partial``. Leaves nothing behind but a whole bundle, or a
    partial directory from which the same command resumes.

    Args:
        dest: the bundle's final place.
        fingerprint: see ``Durable``.
        overwrite: whether a bundle there may be replaced.
        note: told when an unfinished conversion is given up.

    Raises:
        ConversionError: the place is taken, or another conversion is writing there.
    """

    def __init__(self, dest: Path, fingerprint: str, overwrite: bool, note: Callable[[str], None]) -> None:
        self.dest = Path(os.path.realpath(dest))
        self.root = self.dest.with_name(self.dest.name + SUFFIX)
        self._aside = _aside(self.dest)
        self._overwrite = overwrite
        self._note = note
        self.durable = Durable(fingerprint)
        self.finished: Manifest | None = None
        self._lock_fd = -1

    def __enter__(self) -> Destination:
        check_place(self.dest, self._overwrite)
        with write_errors(self.root):
            self.dest.parent.mkdir(parents=True, exist_ok=True)
            self._lock()
        try:
            check_place(self.dest, self._overwrite)
            self._resume()
        except BaseException:
            with suppress(OSError):
                self.root.rmdir()  # only if it is empty: then it was made by us just now
            self._unlock()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        try:
            # An error of the source will not go away by itself: what was made of it is useless.
            useless = kind is not None and issubclass(kind, ConversionError)
            useless = useless and not issubclass(kind or Exception, OutOfSpaceError)
            nothing = not (self.durable.resident_tensors or self.durable.layers or self.finished)
            if (useless or nothing) and self.root.is_dir():
                self._clear()
                self.root.rmdir()
        finally:
            self._unlock()

    def reserve(self, total_bytes: int) -> None:
        """Check that the bundle will fit, before anything is written.

        Raises:
            OutOfSpaceError: with both numbers.
        """
        with write_errors(self.root):
            have = sum(path.lstat().st_size for path in self.root.rglob("*") if path.is_file())
            status = os.statvfs(self.root)
        free = status.f_bavail * status.f_frsize
        need = max(0, total_bytes - have)
        if need > free:
            raise OutOfSpaceError(
                f"{self.dest}: needs {need / 1e9:.3f} GB more, the disk has {free / 1e9:.3f} GB free; free "
                "some space or convert to another disk"
            )

    def commit(self, durable: Durable) -> None:
        """Record what has been made durable. The data itself must have been synced before."""
        write_durably(self.root / PROGRESS, json.dumps(asdict(durable)).encode())
        self.durable = durable

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, sync, and give the directory its final name."""
        with write_errors(self.root):
            if self.finished is None:
                write_durably(self.root / MANIFEST, to_json(manifest).encode())
                self.finished = manifest
            (self.root / PROGRESS).unlink(missing_ok=True)
            sync_path(self.root)
            if self.dest.exists():
                self._replace()
            else:
                self.root.rename(self.dest)
            sync_path(self.dest.parent)
            self._remove_aside()

    def _replace(self) -> None:
        """Swap with the old bundle, in one step where the file system can."""
        check_place(self.dest, self._overwrite)
        self._remove_aside()
        if not _exchange(self.root, self.dest):
            self.dest.rename(self._aside)
            self.root.rename(self.dest)
        else:
            shutil.rmtree(self.root)

    def _remove_aside(self) -> None:
        """Remove the old bundle that was put aside, now or by a run that was killed then."""
        with suppress(ConversionError):
            if self._aside.is_dir():
                _check_replaceable(self._aside)
                shutil.rmtree(self._aside, ignore_errors=True)

    def _lock(self) -> None:
        """Lock the directory itself: a lock file would be left in the bundle, or be missed by a
        process that comes between its removal and the rename."""
        while True:
            self.root.mkdir(exist_ok=True)
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                self._lock_fd = os.open(self.root, flags)
            except FileNotFoundError:
                continue  # another process took it away in between
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                self._unlock()
                raise ConversionError(
                    f"{self.root}: another conversion is writing there; wait for it, or choose another place"
                ) from exc
            except OSError as exc:
                # Network file systems may not lock directories. Going on is what they did before.
                if exc.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            with suppress(FileNotFoundError):
                if self.root.stat().st_ino == os.fstat(self._lock_fd).st_ino:
                    return
            self._unlock()  # likewise: what is locked is not what has the name

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _resume(self) -> None:
        """Take over what an earlier run of the same conversion left, or start anew."""
        fingerprint = self.durable.fingerprint
        self.finished = made_already(self.root, fingerprint)
        if self.finished is not None:
            return
        try:
            state = json.loads((self.root / PROGRESS).read_bytes())
            state["zarr_files"] = [
                (str(name), int(size), str(sha)) for name, size, sha in state["zarr_files"]
            ]
            durable = Durable(**state)
            if durable.fingerprint == fingerprint and self._holds(durable):
                self.durable = durable
                return
        except (OSError, ValueError, TypeError, KeyError):
            pass  # no progress, or none that can be understood
        with write_errors(self.root):
            left = any(self.root.iterdir())
        self._clear()
        if left:
            self._note(
                f"{self.root}: what an earlier conversion left was made with other options or from other "
                "files, or is damaged; starting anew"
            )

    def _holds(self, durable: Durable) -> bool:
        """Whether the files are still as long as they were. Raises OSError if one is gone."""
        grown = all((self.root / name).stat().st_size >= size for name, size in durable.sizes.items())
        return grown and all(
            (self.root / name).stat().st_size == size for name, size, _ in durable.zarr_files
        )

    def _clear(self) -> None:
        """Remove our files. What we don't know stays, with an error: it is somebody's."""
        with write_errors(self.root):
            stranger = _stranger(self.root)
            if stranger is not None:
                raise ConversionError(
                    f"{self.root}: holds {stranger!r}, which is no file of a bundle; move it away"
                )
            for path in self.root.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def made_already(directory: Path, fingerprint: str) -> Manifest | None:
    """The manifest, if an earlier run of the same conversion had everything, but perhaps the rename."""
    path = directory / MANIFEST
    try:
        manifest = from_json(path.read_bytes(), str(path))
        sizes = all((directory / f.name).stat().st_size == f.size_bytes for f in manifest.files)
    except (OSError, BundleError):
        return None
    return manifest if sizes and manifest.provenance.get(FINGERPRINT) == fingerprint else None


def stride_alignment(dest: Path) -> int:
    """What reads that bypass the page cache need of an offset on the disk that ``dest`` will be
    on: a power of two from 512 to 4096 bytes, asked of a nameless file there."""
    parent = next(path for path in Path(os.path.realpath(dest)).parents if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            alignment, _ = probe_direct(f"/proc/self/fd/{file.fileno()}")
    except (OSError, DiskReadError):
        alignment = None
    return min(max(alignment or 0, MIN_STRIDE_ALIGN_BYTES), LAYER_ALIGN_BYTES)


def check_place(dest: Path, overwrite: bool) -> None:
    """Whether a bundle may be put there.

    Raises:
        ConversionError: something is there that must not be replaced.
    """
    if dest.name.endswith(SUFFIX):
        raise ConversionError(f"{dest}: names that end in {SUFFIX} mark unfinished bundles; choose another")
    if not dest.exists() and not dest.is_symlink():
        return
    if not overwrite:
        raise ConversionError(f"{dest}: exists; choose another place, or replace it with --overwrite")
    # What an interrupted replacement put aside goes together with the bundle.
    for path in (dest, _aside(dest)):
        if path.exists() or path.is_symlink():
            _check_replaceable(path)


def _check_replaceable(path: Path) -> None:
    if not path.is_dir() or (any(path.iterdir()) and not _is_bundle(path)):
        raise ConversionError(f"{path}: exists and is no flashd bundle, so it is not replaced; move it away")
    stranger = _stranger(path)
    if stranger is not None:
        raise ConversionError(
            f"{path}: holds {stranger!r}, which is no file of a bundle, so it is not replaced; move that away"
        )


def _aside(dest: Path) -> Path:
    """Where an old bundle waits where two directories cannot be swapped."""
    return dest.with_name(f".{dest.name}.replaced")


def _stranger(root: Path) -> str | None:
    """A file in a bundle's directory, finished or not, that no conversion wrote."""
    for path in root.iterdir():
        if path.name.removesuffix(".tmp") not in _OURS:
            return path.name
    listed = _listed_files(root)  # none while the bundle is unfinished: zarr has names of its own then
    for path in (root / ZARR).rglob("*") if listed else ():
        name = path.relative_to(root).as_posix()
        if name not in listed and (path.is_symlink() or not path.is_dir()):
            return name
    return None


def _listed_files(root: Path) -> set[str]:
    """Files that a bundle's manifest names, of any version; empty where it cannot be read."""
    try:
        files = json.loads((root / MANIFEST).read_bytes())["files"]
        return {file["name"] for file in files if isinstance(file["name"], str)}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def _is_bundle(path: Path) -> bool:
    """A bundle of any version."""
    try:
        head = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically (Linux ``renameat2``); False if the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))
