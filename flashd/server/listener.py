"""The Unix socket: bound privately, never stolen from a live daemon, removed at the end."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

from flashd.errors import SocketError

# sockaddr_un.sun_path holds 108 bytes, the last one is the terminating zero.
MAX_PATH_BYTES = 107
_LOCK_WAIT_S = 1.0


def lock_path(path: Path) -> Path:
    """The lock beside a socket; it holds the daemon's record as JSON."""
    return path.with_name(path.name + ".lock")


def check_path(path: Path) -> None:
    """Refuse a socket path that can't work, before anything is made.

    Raises:
        SocketError: the path is too long for the system, or its directory doesn't exist.
    """
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise SocketError(
            f"socket path of {size} bytes: the system allows {MAX_PATH_BYTES}; "
            f"give a shorter --socket than {path}"
        )
    if not path.parent.is_dir():
        raise SocketError(f"{path.parent}: no such directory; make it or give another --socket")


class Listener:
    """A listening socket with mode 0600 and the lock that says whose it is.

    The lock (flock, released by the kernel however the process ends) decides between a live
    daemon and what a killed one left behind; two daemons that start at once can't both win.

    Args:
        path: absolute path of the socket.
        record: facts about this daemon, kept in the lock file for ``flashd ps`` and ``stop``.

    Raises:
        SocketError: the path is too long, taken by a live daemon, or by something else.
    """

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path = path
        check_path(path)
        self._lock_fd = self._lock(record)
        try:
            self._remove_stale()
            self.socket = self._bind()
        except BaseException:
            self._unlock()
            raise
        self._inode = path.lstat().st_ino

    def close(self) -> None:
        """Close and remove the socket (only if it is still ours) and the lock."""
        self.socket.close()
        try:
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            pass
        self._unlock()

    def _lock(self, record: dict[str, Any]) -> int:
        path = lock_path(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            try:
                fd = os.open(path, flags, 0o600)
            except OSError as exc:
                raise SocketError(f"{path}: cannot make the lock file: {exc.strerror}") from exc
            try:
                self._lock_or_tell(fd)
            except SocketError:
                os.close(fd)
                raise
            if _is_file(path, fd):
                break
            os.close(fd)  # its owner removed it between our open and our lock
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(record).encode(), 0)
        return fd

    def _lock_or_tell(self, fd: int) -> None:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as exc:
                record = read_record(self.path)
                # Somebody who only looks (`ps`, `stop`) holds a shared lock for an instant.
                if record is not None or time.monotonic() > deadline:
                    raise taken(self.path, record) from exc
            time.sleep(0.01)

    def _unlock(self) -> None:
        lock_path(self.path).unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise SocketError(f"{self.path}: exists and is no socket; remove it or give another --socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
            except OSError as exc:
                raise SocketError(f"{self.path}: exists but cannot be probed: {exc.strerror}") from exc
        raise SocketError(f"{self.path}: another program listens there; give another --socket")

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The mode is right from the first moment: chmod after bind would leave a gap.
        previous = os.umask(0o177)
        try:
            listener.bind(str(self.path))
        except OSError as exc:
            listener.close()
            raise SocketError(f"{self.path}: cannot bind: {exc.strerror}; give another --socket") from exc
        finally:
            os.umask(previous)
        listener.listen(128)
        listener.setblocking(False)
        return listener


def _is_file(path: Path, fd: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def taken(path: Path, record: dict[str, Any] | None) -> SocketError:
    """The error of a socket that a live daemon serves."""
    whose = "another flashd"
    if record is not None:
        whose = f"pid {record.get('pid')}, {record.get('directory')} as {record.get('model')}"
    return SocketError(
        f"{path}: already served ({whose}); to change its model or settings stop it first "
        "(flashd stop), or give another --socket"
    )


def read_record(path: Path) -> dict[str, Any] | None:
    """The record of the daemon that holds a socket's lock, or ``None`` when nobody does."""
    try:
        fd = os.open(lock_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        try:
            record = json.loads(os.pread(fd, 65536, 0))
        except ValueError:
            return None  # its owner is writing it at this moment
        return record if isinstance(record, dict) and isinstance(record.get("pid"), int) else None
    else:
        return None
    finally:
        os.close(fd)
