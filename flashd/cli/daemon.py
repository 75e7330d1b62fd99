"""``flashd start``, ``ps`` and ``stop``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import psutil
import typer

from flashd.cli.render import human_bytes, human_duration, note, print_json, table
from flashd.config import (
    BACKENDS,
    EVICTION,
    KV_DTYPES,
    LOG_LEVELS,
    PREDICTORS,
    PREFETCH,
    VERIFY,
    DaemonConfig,
    default_socket,
    resolve,
)
from flashd.errors import DaemonError, FlashdError
from flashd.server.registry import log_file, open_log

_READY_FD = "FLASHD_READY_FD"
_STOP_TIMEOUT_S = 15.0

SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        help="Unix socket [default: flashd/flashd.sock in $XDG_RUNTIME_DIR; env: FLASHD_SOCKET].",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]


def _about(key: str, text: str) -> str:
    """Help text of a setting, with its default and environment variable."""
    default = DaemonConfig.__dataclass_fields__[key].default
    return f"{text} [default: {default}; env: FLASHD_{key.upper()}]"


BackendOption = Annotated[
    str | None, typer.Option(help=_about("backend", f"How FFN rows are read: {', '.join(BACKENDS)}"))
]
VerifyOption = Annotated[
    str | None,
    typer.Option(
        help=_about(
            "verify",
            f"FFN rows checked when read: {', '.join(VERIFY)} "
            "(auto: the first time, later as many as take 2 % of the time; reads: every time)",
        )
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help=_about(
            "memory",
            "What the daemon may take: auto (what is free, as that changes), a size (4GiB) for everything, "
            "or a share of all weights (55%) for weights and window",
        )
    ),
]
PredictorOption = Annotated[
    str | None,
    typer.Option(
        help=_about(
            "predictor",
            f"Neurons to compute: {', '.join(PREDICTORS)} (auto: what the bundle was calibrated with; "
            "none: all)",
        )
    ),
]
EvictionOption = Annotated[
    str | None,
    typer.Option(help=_about("eviction", f"Neurons that leave RAM first: {', '.join(EVICTION)}")),
]
WindowOption = Annotated[
    int | None,
    typer.Option(help=_about("window", "Steps whose neurons stay in RAM; 0 is as many as fit")),
]
PrefetchOption = Annotated[
    str | None,
    typer.Option(
        help=_about("prefetch", f"Reading ahead on a guess: {', '.join(PREFETCH)} (auto: while it pays)")
    ),
]
KvOption = Annotated[str | None, typer.Option(help=_about("kv_dtype", f"KV cache: {', '.join(KV_DTYPES)}"))]


def start(
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="Bundle directory [env: FLASHD_MODEL].", show_default=False),
    ] = None,
    socket: SocketOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay attached and log to stderr.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(help="Model id in the API [default: the directory's name; env: FLASHD_NAME]."),
    ] = None,
    backend: BackendOption = None,
    verify: VerifyOption = None,
    memory: MemoryOption = None,
    predictor: PredictorOption = None,
    eviction: EvictionOption = None,
    window: WindowOption = None,
    prefetch: PrefetchOption = None,
    kv_dtype: KvOption = None,
    max_sessions: Annotated[
        int | None, typer.Option(help=_about("max_sessions", "Sequences decoded together, 1 to 16"))
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help=_about("max_queue", "Requests that may wait"))] = None,
    threads: Annotated[
        int | None,
        typer.Option(help=_about("threads", "Kernel threads; 0 is all usable CPUs, and no more are taken")),
    ] = None,
    drain_ms: Annotated[
        int | None, typer.Option(help=_about("drain_ms", "How long answers may go on after SIGTERM"))
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help=_about("log_level", f"One of {', '.join(LOG_LEVELS)}"))
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a model over a Unix socket; returns when it is ready."""
    flags = {
        "model": None if model is None else str(model),
        "socket": None if socket is None else str(socket),
        "name": name,
        "backend": backend,
        "verify": verify,
        "memory": memory,
        "predictor": predictor,
        "eviction": eviction,
        "window": window,
        "prefetch": prefetch,
        "kv_dtype": kv_dtype,
        "max_sessions": max_sessions,
        "max_queue": max_queue,
        "threads": threads,
        "drain_ms": drain_ms,
        "log_level": log_level,
    }
    config = resolve(flags)
    if foreground:
        _serve(config, as_json)
        return
    record = _running(config)
    word, record = ("already running", record) if record else _spawn(config)
    _announce(record, as_json, word)
    if word == "ready" and not as_json:
        _say_what_is_missing(config)


def _say_what_is_missing(config: DaemonConfig) -> None:
    """Tell whose model would be faster with predictors how to get them."""
    from flashd.layout.calibration import CALIBRATION
    from flashd.store.open import read_manifest

    sparse = read_manifest(config.model_dir).model.activation in ("relu", "relu2")
    if sparse and config.predictor == "auto" and not (config.model_dir / CALIBRATION).exists():
        note(
            f"{config.model_dir} is not calibrated: all neurons are computed for every token, and read where "
            f"they don't fit; flashd calibrate {config.model_dir} --text FILE finds out which fire"
        )


def _serve(config: DaemonConfig, as_json: bool) -> None:
    """Be the daemon. One that was started in the background tells its parent how it went."""
    # Until the server has handlers of its own; importing it takes half a second. Nothing is made yet
    # that would be left behind, and an exception inside an import may be caught or translated there.
    _on_end(lambda *_: os._exit(0))
    from flashd.server.lifecycle import serve

    _on_end(lambda *_: sys.exit(0))  # from here on the socket must be taken away
    parent = os.environ.pop(_READY_FD, None)
    if parent is None:
        serve(config, lambda record: _announce(record, as_json, "ready"))
        return
    with os.fdopen(int(parent), "w") as pipe:

        def tell(answer: dict[str, Any]) -> None:
            json.dump(answer, pipe)
            pipe.close()

        try:
            serve(config, tell)
        except FlashdError as exc:
            if not pipe.closed:
                tell({"error": str(exc)})
            raise


def _on_end(handler: Callable[[int, FrameType | None], Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)


def _announce(record: dict[str, Any], as_json: bool, word: str) -> None:
    if as_json:
        print_json({"status": word, **record})
    else:
        print(f"flashd {word}: {record['model']} on {record['socket']} (pid {record['pid']})", flush=True)


def _running(config: DaemonConfig) -> dict[str, Any] | None:
    """The daemon that already does what is asked: same socket, same model, same settings.

    Raises:
        SocketError: the socket is served, but not like that.
    """
    from flashd.server.listener import read_record, taken

    record = read_record(config.socket_path)
    if record is None:
        return None
    if record.get("settings") != config.settings():
        raise taken(config.socket_path, record)
    if not config.socket_path.is_socket():
        raise DaemonError(
            f"pid {record['pid']} serves {config.socket_path}, but somebody has removed the socket; "
            "end it with `flashd stop` and start again"
        )
    return record


def _spawn(config: DaemonConfig) -> tuple[str, dict[str, Any]]:
    """Start a daemon in the background and wait until it is ready or has failed.

    Returns:
        What to say, and the record of the daemon that serves now.

    Raises:
        FlashdError: what the daemon said, or that it died.
    """
    from flashd.server.listener import check_path
    from flashd.store.open import read_manifest

    # What can be known here is told here, before anything is made.
    check_path(config.socket_path)
    read_manifest(config.model_dir)
    log_path = log_file(config.socket_path)
    log = open_log(log_path)
    reader, writer = os.pipe()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASHD_") or k == "FLASHD_SIMD"}
    environ |= {f"FLASHD_{key.upper()}": str(value) for key, value in config.settings().items()}
    environ[_READY_FD] = str(writer)
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
    if not answer:
        raise DaemonError(f"the daemon died with exit code {child.wait()}; its log: {log_path}")
    record: dict[str, Any] = json.loads(answer)
    if "error" not in record:
        return "ready", record
    child.wait()
    # Another `start` of the same model may have been faster.
    running = _running(config)
    if running is None:
        raise DaemonError(record["error"])
    return "already running", running


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
    elif not rows:
        note("no daemon runs; start one with: flashd start --model DIR")
    else:
        cells = [
            (
                row["pid"],
                row["model"],
                row["socket"],
                human_duration(row["uptime_s"]),
                human_bytes(row["rss_bytes"]),
            )
            for row in rows
        ]
        table(("PID", "MODEL", "SOCKET", "UPTIME", "RSS"), cells)


def stop(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Stop the daemon behind a socket; running answers get a moment to finish."""
    from flashd.server import registry

    path = default_socket() if socket is None else socket.expanduser().absolute()
    pid = registry.stop(path, _STOP_TIMEOUT_S)
    if as_json:
        print_json({"status": "stopped", "pid": pid, "socket": str(path)})
    else:
        print(f"flashd stopped: pid {pid}")
