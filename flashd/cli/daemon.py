"""``flashd start``, ``ps`` and ``stop``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from flashd.cli.render import print_json, table
from flashd.config import BACKENDS, KV_DTYPES, LOG_LEVELS, DaemonConfig, default_socket, resolve
from flashd.errors import DaemonError

_READY_FD = "FLASHD_READY_FD"
_STOP_TIMEOUT_S = 15.0

SocketOption = Annotated[
    Path | None, typer.Option("--socket", help="Unix socket [env: FLASHD_SOCKET].", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]


def start(
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Bundle directory.", show_default=False)
    ] = None,
    socket: SocketOption = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay attached; log here.")] = False,
    name: Annotated[str | None, typer.Option(help="Model id in the API.", show_default=False)] = None,
    backend: Annotated[str | None, typer.Option(help=f"Read path: {', '.join(BACKENDS)}.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=f"KV cache: {', '.join(KV_DTYPES)}.")] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Sequences decoded together.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait.")] = None,
    threads: Annotated[int | None, typer.Option(help="Kernel threads; 0: all cores.")] = None,
    drain_ms: Annotated[int | None, typer.Option(help="Time for answers after SIGTERM.")] = None,
    log_level: Annotated[str | None, typer.Option(help=f"{', '.join(LOG_LEVELS)}.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model over a Unix socket; returns when it is ready."""
    flags = {
        "model": None if model is None else str(model),
        "socket": None if socket is None else str(socket),
        "name": name,
        "backend": backend,
        "kv_dtype": kv_dtype,
        "max_sessions": max_sessions,
        "max_queue": max_queue,
        "threads": threads,
        "drain_ms": drain_ms,
        "log_level": log_level,
    }
    config = resolve(flags)
    if foreground:
        from flashd.server.lifecycle import serve

        serve(config, _announcer(as_json))
        return
    running = _same_daemon(config)
    if running is None:
        running = _spawn(config)
        _announce(running, as_json, "ready")
    else:
        _announce(running, as_json, "already running")


def _announce(record: dict[str, Any], as_json: bool, word: str) -> None:
    if as_json:
        print_json({"status": word, **record})
    else:
        print(f"flashd {word}: {record['model']} on {record['socket']} (pid {record['pid']})", flush=True)


def _announcer(as_json: bool) -> Callable[[dict[str, Any]], None]:
    """What the foreground daemon does when it is ready: tell its parent, or print."""
    fd_text = os.environ.pop(_READY_FD, None)

    def ready(record: dict[str, Any]) -> None:
        if fd_text is None:
            _announce(record, as_json, "ready")
        else:
            with os.fdopen(int(fd_text), "w") as pipe:
                json.dump(record, pipe)

    return ready


def _same_daemon(config: DaemonConfig) -> dict[str, Any] | None:
    """The running daemon that already does what is asked: same socket, same model."""
    from flashd.server.listener import read_record

    record = read_record(config.socket_path)
    wanted = (str(config.model_dir), config.served_name)
    if record is None or (record.get("directory"), record.get("model")) != wanted:
        return None
    return record


def _spawn(config: DaemonConfig) -> dict[str, Any]:
    """Start a daemon in the background and wait until it is ready or has failed."""
    from flashd.server.lifecycle import default_log
    from flashd.server.listener import check_path

    check_path(config.socket_path)
    log_path = default_log(config.socket_path)
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise DaemonError(f"{log_path}: cannot write the log: {exc.strerror}") from exc
    reader, writer = os.pipe()
    environ = dict(os.environ)
    environ[_READY_FD] = str(writer)
    for key in DaemonConfig.__dataclass_fields__:
        environ[f"FLASHD_{key.upper()}"] = str(getattr(config, key))
    environ["FLASHD_MODEL"] = str(config.model_dir)
    environ["FLASHD_SOCKET"] = str(config.socket_path)
    # -P: the current directory must not shadow the installed package.
    command = [sys.executable, "-P", "-m", "flashd", "start", "--foreground"]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(writer,),
            start_new_session=True,
            env=environ,
            cwd="/",
        )
    finally:
        os.close(log)
        os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    if answer:
        record: dict[str, Any] = json.loads(answer)
        return record
    code = child.wait()
    raise DaemonError(f"{_last_line(log_path) or f'exit code {code}'} (log: {log_path})")


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("flashd: ").removeprefix("error: ") if lines else ""


def ps(as_json: JsonOption = False) -> None:
    """List the daemons that run."""
    from flashd.server.registry import running

    rows = []
    for record in running():
        try:
            rss_bytes = psutil.Process(record["pid"]).memory_info().rss
        except psutil.Error:
            continue
        rows.append({**record, "uptime_s": time.time() - record["started_unix_s"], "rss_bytes": rss_bytes})
    if as_json:
        print_json(rows)
        return
    table(
        ("PID", "MODEL", "SOCKET", "UPTIME", "RSS"),
        [
            (
                str(row["pid"]),
                row["model"],
                row["socket"],
                f"{row['uptime_s']:.0f} s",
                f"{row['rss_bytes'] / 1e6:.0f} MB",
            )
            for row in rows
        ],
    )


def stop(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Stop the daemon behind a socket; running answers get a moment to finish."""
    from flashd.server import registry

    path = default_socket() if socket is None else socket.expanduser().absolute()
    pid = registry.stop(path, _STOP_TIMEOUT_S)
    if as_json:
        print_json({"status": "stopped", "pid": pid, "socket": str(path)})
    else:
        print(f"flashd stopped: pid {pid}")
