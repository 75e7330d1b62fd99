"""Where the daemon is, and what to say when it does not answer there."""

from __future__ import annotations

import os
import socket
import traceback
from dataclasses import dataclass
from pathlib import Path

import httpx

from flashd_client.errors import (
    ConnectionLost,
    DaemonNotRunning,
    FlashdClientError,
    InvalidResponse,
    RequestTimeout,
)

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_CONNECT_TIMEOUT_S = 5.0
DEFAULT_RETRIES = 2
# A local connection costs some 50 us; keeping one open costs a race with the daemon's idle timeout,
# after which a POST that cannot be repeated is lost.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def default_socket_path() -> Path:
    """The socket that ``flashd start`` and every client use unless told otherwise.

    ``$FLASHD_SOCKET``, else ``$XDG_RUNTIME_DIR/flashd/flashd.sock``, else a directory of this
    user under ``/tmp``. Empty variables count as unset.
    """
    if explicit := os.environ.get("FLASHD_SOCKET"):
        return Path(explicit).expanduser()
    if runtime_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_dir) / "flashd" / "flashd.sock"
    return Path(f"/tmp/flashd-{os.getuid()}") / "flashd.sock"


@dataclass(frozen=True)
class Target:
    """One daemon: a Unix socket, or (``socket`` is None) a TCP address."""

    socket: Path | None
    base_url: str

    @classmethod
    def resolve(cls, socket: str | os.PathLike[str] | None, base_url: str | None) -> Target:
        """The daemon that a client's arguments mean.

        Raises:
            ValueError: both are given, or ``base_url`` is no http address.
            DaemonNotRunning: the default directory belongs to someone else.
        """
        if base_url is not None:
            if socket is not None:
                raise ValueError("got both socket and base_url; pass one of them")
            if not base_url.startswith(("http://", "https://")):
                raise ValueError(f"base_url is {base_url!r}, expected http://HOST:PORT")
            return cls(None, base_url)
        if socket is not None:
            return cls(Path(socket), "http://flashd")
        default = default_socket_path()
        _check_owner(default)
        return cls(default, "http://flashd")

    def translate(self, exc: httpx.HTTPError) -> FlashdClientError:
        """This package's error for one of httpx."""
        if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
            _close_abandoned_sockets(exc)
            return self._not_running(exc)
        where = self.base_url if self.socket is None else str(self.socket)
        if isinstance(exc, httpx.TimeoutException):
            return RequestTimeout(
                f"flashd at {where} was silent for longer than timeout_s; raise it, or see the log"
            )
        if isinstance(exc, httpx.TransportError):
            return ConnectionLost(f"flashd at {where} closed the connection ({exc}); see the daemon's log")
        return InvalidResponse(f"not an answer of flashd at {where}: {exc}")

    def _not_running(self, exc: httpx.HTTPError) -> DaemonNotRunning:
        why = str(exc)
        hint = "start it with: flashd start --model DIR"
        if self.socket is None:
            return DaemonNotRunning(f"no flashd answers at {self.base_url} ({why}); {hint}")
        if self.socket != default_socket_path():
            hint += f" --socket {self.socket}"
        if "Permission denied" in why:
            why, hint = "permission denied", "only the user who runs the daemon may connect"
        elif "too long" in why:
            why = "a socket path holds at most 107 bytes"
            hint = "use a shorter one for daemon and client"
        elif not os.path.exists(self.socket):
            why = "there is no such socket"
        elif "refused" in why:
            why = "nobody listens there any more"
        return DaemonNotRunning(f"no flashd answers on {self.socket} ({why}); {hint}")


def _close_abandoned_sockets(exc: BaseException) -> None:
    """httpcore leaves the socket of a failed Unix connect to the garbage collector, which warns."""
    link: BaseException | None = exc
    while link is not None:
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if isinstance(abandoned := frame.f_locals.get("sock"), socket.socket):
                abandoned.close()
        link = link.__cause__ or link.__context__


def _check_owner(socket: Path) -> None:
    """Refuse a default directory that another user prepared.

    ``/tmp`` is open to all: without this, whoever creates the directory first reads every
    prompt. Root's and the user's own directories are fine; a missing one is not our concern.
    """
    try:
        owner = socket.parent.stat().st_uid
    except OSError:
        return
    if owner not in (0, os.getuid()):
        raise DaemonNotRunning(
            f"the directory {socket.parent} belongs to user id {owner}, not to you; pass the socket of "
            "a daemon that you trust by name"
        )
