"""Which daemons of this user run: small records in the runtime directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from flashd.config import runtime_dir, runtime_dirs
from flashd.errors import DaemonError
from flashd.server.listener import read_record

_POLL_S = 0.02
_DAEMONS = "daemons"
_MAX_OLD_LOG_BYTES = 1 << 20


def log_file(path: Path) -> Path:
    """Where the background daemon of the socket ``path`` writes its log."""
    mark = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return runtime_dir() / "logs" / f"{path.stem}-{mark}.log"


def open_log(path: Path) -> int:
    """File descriptor for appending; what an older daemon left is kept up to a megabyte."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
    except OSError as exc:
        raise DaemonError(f"{path}: cannot write the log: {exc.strerror}") from exc
    if os.fstat(fd).st_size > _MAX_OLD_LOG_BYTES:
        os.ftruncate(fd, 0)
    return fd


class Registration:
    """This process's entry in ``flashd ps``: its socket; the facts are in the socket's lock."""

    def __init__(self, path: Path) -> None:
        directory = runtime_dir() / _DAEMONS
        directory.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / f"{os.getpid()}.json"
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"socket": str(path)}))
        partial.rename(self._path)

    def close(self) -> None:
        """Remove the entry."""
        self._path.unlink(missing_ok=True)


def running() -> list[dict[str, Any]]:
    """Records of the daemons that live, oldest first; what dead ones left is removed."""
    found = {}
    for directory in runtime_dirs():
        for path in (directory / _DAEMONS).glob("*.json"):
            try:
                entry = json.loads(path.read_text())
                record = read_record(Path(entry["socket"]))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                record = None
            if record is not None and path.stem == str(record["pid"]):
                found[record["pid"]] = record
            elif not Path("/proc", path.stem).exists():  # one whose lock was removed still lives
                with contextlib.suppress(OSError):  # a directory, or somebody was faster
                    path.unlink()
    return sorted(found.values(), key=lambda record: float(record["started_unix_s"]))


def _server_pid(path: Path) -> int | None:
    """The daemon that serves a socket; never a program that only happens to listen there.

    The lock names it and the kernel confirms it. Without one of them (a socket or a lock that
    somebody has removed) the other suffices, the listener then being one of our registered daemons.
    """
    record, listener = read_record(path), _listener_pid(path)
    if record is not None and listener in (None, record["pid"]):
        return int(record["pid"]) if record["pid"] > 0 else None
    if listener is not None and any((d / _DAEMONS / f"{listener}.json").is_file() for d in runtime_dirs()):
        return listener
    return None


def _listener_pid(path: Path) -> int | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
            # struct ucred: pid, uid, gid
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return None
    return int.from_bytes(credentials[:4], sys.byteorder)


def stop(path: Path, timeout_s: float) -> int:
    """End the daemon behind a socket and wait until it is gone.

    Returns:
        Its process id.

    Raises:
        DaemonError: nobody serves the socket, or the daemon didn't end in time.
    """
    pid = _server_pid(path)
    if pid is None:
        raise DaemonError(f"{path}: no daemon serves this socket; see `flashd ps`")
    try:
        process = psutil.Process(pid)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            # A parent that doesn't reap leaves a zombie, which is as gone as can be.
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return pid
            time.sleep(_POLL_S)
    except psutil.NoSuchProcess:
        return pid
    except psutil.AccessDenied as exc:
        raise DaemonError(f"pid {pid} belongs to somebody else: not stopped") from exc
    raise DaemonError(
        f"pid {pid} has not ended after {timeout_s:.0f} s; its log: {log_file(path)}; "
        f"`kill -9 {pid}` ends it without ceremony"
    )
