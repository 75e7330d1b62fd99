"""Which daemons of this user run: small records in the runtime directory."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from flashd.config import runtime_dir
from flashd.errors import DaemonError
from flashd.server.listener import read_record

_POLL_S = 0.02


def _directory() -> Path:
    path = runtime_dir() / "daemons"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


class Registration:
    """This process's entry in ``flashd ps``."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._path = _directory() / f"{os.getpid()}.json"
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(record))
        partial.rename(self._path)

    def close(self) -> None:
        """Remove the entry."""
        self._path.unlink(missing_ok=True)


def running() -> list[dict[str, Any]]:
    """Records of the daemons that live, oldest first; what dead ones left is removed."""
    found = []
    for path in _directory().glob("*.json"):
        try:
            record = json.loads(path.read_text())
            holder = read_record(Path(record["socket"]))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            holder = None
        if holder is None or holder.get("pid") != record.get("pid"):
            path.unlink(missing_ok=True)
            continue
        found.append(record)
    return sorted(found, key=lambda record: float(record.get("started_unix_s", 0)))


def stop(socket: Path, timeout_s: float) -> int:
    """End the daemon behind a socket and wait until it is gone.

    Returns:
        Its process id.

    Raises:
        DaemonError: nobody serves the socket, or the daemon didn't end in time.
    """
    record = read_record(socket)
    if record is None:
        raise DaemonError(f"{socket}: no daemon serves this socket; see `flashd ps`")
    pid = int(record["pid"])
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
    raise DaemonError(f"pid {pid} has not ended after {timeout_s:.0f} s; look at its log or kill it")
