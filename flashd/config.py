"""Settings: resolved once, frozen, and the only file that reads the environment (but for
``FLASHD_SIMD``, which forces a level of the kernels wherever they are used).

Order of precedence: flag, ``FLASHD_*`` environment variable, TOML file, default. The TOML file is
``$FLASHD_CONFIG``, else ``$XDG_CONFIG_HOME/flashd/config.toml`` when it exists.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashd.errors import ConfigError

BACKENDS = ("auto", "uring", "threads", "buffered", "memory")
VERIFY = ("auto", "reads")
PREDICTORS = ("auto", "none", "oracle")
EVICTION = ("frequency", "lru", "window")
PREFETCH = ("auto", "on", "off")
KV_DTYPES = ("f16", "f32")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_BATCH = 16  # the kernels' limit: one step reads each weight once for so many sequences
MAX_THREADS = 256  # of the kernels
ENV_PREFIX = "FLASHD_"
_MEMORY = re.compile(r"auto|\d+(\.\d+)? *(%|[kmgt]?i?b?)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class DaemonConfig:
    """Everything ``flashd start`` can be told.

    Attributes:
        model: bundle directory.
        socket: path of the Unix socket; empty means the default one.
        name: model id that ``/v1/models`` shows; empty means the directory's name.
        backend: how the FFN rows are read: ``auto``, ``uring``, ``threads``, ``buffered`` or ``memory``.
        verify: which FFN rows are compared with their checksums when they are read: ``auto`` (each
            the first time, later as many as take 2 % of the time) or ``reads`` (every time).
        memory: what the process may take: ``auto`` (what is free, as that changes), a size such as ``4GiB``
            for everything, or a share of all weights such as ``55%`` for weights, predictors, the window
            and stream buffers; the process itself and a short KV cache come on top of a share.
        predictor: which neurons are computed: ``auto`` (what the bundle was calibrated with, if it was),
            ``none`` (all) or ``oracle`` (the true ones, with all rows in RAM beside the rest: for tests).
        eviction: which neurons leave RAM first: ``frequency``, ``lru`` or ``window`` (the
            paper's).
        window: steps whose neurons stay in RAM; 0: as many as fit.
        prefetch: whether rows are read ahead on a guess: ``auto`` (as long as it pays), ``on`` or ``off``.
        kv_dtype: element type of the KV cache.
        max_sessions: sequences decoded together (1..16).
        max_queue: requests that may wait; more are answered 429.
        threads: kernel threads; 0 means all CPUs that the process may use, and no more are ever taken.
        drain_ms: how long running answers may go on after SIGTERM.
        log_level: debug, info, warning or error.
    """

    model: str
    socket: str = ""
    name: str = ""
    backend: str = "auto"
    verify: str = "auto"
    memory: str = "auto"
    predictor: str = "auto"
    eviction: str = "frequency"
    window: int = 0
    prefetch: str = "auto"
    kv_dtype: str = "f16"
    max_sessions: int = 4
    max_queue: int = 64
    threads: int = 0
    drain_ms: int = 1000
    log_level: str = "info"

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("verify", self.verify, VERIFY)
        _one_of("predictor", self.predictor, PREDICTORS)
        _one_of("eviction", self.eviction, EVICTION)
        _one_of("prefetch", self.prefetch, PREFETCH)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _between("max_sessions", self.max_sessions, 1, MAX_BATCH)
        _between("window", self.window, 0, 1 << 20)
        if not _MEMORY.fullmatch(self.memory.strip()):
            raise ConfigError(
                f"memory is {self.memory!r}, expected auto, a size such as 4GiB, or a share such as 55%"
            )
        _between("max_queue", self.max_queue, 0, 100_000)
        _between("threads", self.threads, 0, 1024)
        _between("drain_ms", self.drain_ms, 0, 3_600_000)

    @property
    def model_dir(self) -> Path:
        """The bundle directory as an absolute path without links."""
        return Path(self.model).expanduser().resolve()

    @property
    def socket_path(self) -> Path:
        """The Unix socket as an absolute path."""
        return Path(self.socket).expanduser().absolute() if self.socket else default_socket()

    def settings(self) -> dict[str, Any]:
        """All settings with paths resolved: equal for daemons that do the same."""
        paths = {"model": str(self.model_dir), "socket": str(self.socket_path)}
        return {**asdict(self), **paths, "name": self.served_name}

    @property
    def served_name(self) -> str:
        """Model id in the API."""
        return self.name or self.model_dir.name


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, expected one of: {', '.join(known)}")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}, expected {low} to {high}")


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> DaemonConfig:
    """Merge flags, environment and TOML file into one frozen configuration.

    Args:
        flags: values given on the command line; ``None`` means not given.
        environ: the environment; the process's own by default.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, or no model.
    """
    environ = os.environ if environ is None else environ
    known = {item.name: item.type for item in fields(DaemonConfig)}
    values: dict[str, Any] = {}
    values.update(_toml(environ))
    for key, kind in known.items():
        text = environ.get(ENV_PREFIX + key.upper())
        if text:
            values[key] = _from_text(key, text, kind)
    values.update({key: value for key, value in flags.items() if value is not None})
    if not values.get("model"):
        raise ConfigError("no model: give --model DIR (a directory made by `flashd convert`)")
    return DaemonConfig(**values)


def _from_text(key: str, text: str, kind: Any) -> Any:
    """Value of an environment variable."""
    if kind != "int":
        return text
    try:
        return int(text)
    except ValueError as exc:
        name = ENV_PREFIX + key.upper()
        raise ConfigError(f"{name} is {text!r}, expected a whole number") from exc


def _toml(environ: Mapping[str, str]) -> dict[str, Any]:
    """The configuration file's values; relative paths in it are relative to the file."""
    explicit = environ.get("FLASHD_CONFIG")
    base = environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    path = Path(explicit) if explicit else Path(base) / "flashd" / "config.toml"
    if not explicit and not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{path}: cannot read the configuration: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    known = {item.name: item.type for item in fields(DaemonConfig)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; known: {', '.join(known)}")
        expected = int if known[key] == "int" else str
        if type(value) is not expected:
            what = "a whole number" if expected is int else "a text in quotes"
            raise ConfigError(f"{path}: {key} is {value!r}, expected {what}")
        if key in ("model", "socket") and value:
            values[key] = str(path.parent / Path(str(value)).expanduser())
    return values


def runtime_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Directory of sockets, logs and records of this user's daemons; made (0700) if missing.

    ``$XDG_RUNTIME_DIR/flashd``, or a directory of this user's in ``/tmp`` where there is none.

    Raises:
        ConfigError: it can't be made, belongs to somebody else, or others may write to it.
    """
    environ = os.environ if environ is None else environ
    path = runtime_dirs(environ)[0]
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError as exc:
        raise ConfigError(
            f"{path}: cannot make the runtime directory: {exc.strerror}; "
            "set XDG_RUNTIME_DIR to a directory of yours, or unset it"
        ) from exc
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise ConfigError(f"{path}: not a private directory of this user; remove it or set XDG_RUNTIME_DIR")
    return path


def runtime_dirs(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Where this user's daemons may be, the first one being where new ones go. Makes nothing."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_RUNTIME_DIR")
    fallback = Path(f"/tmp/flashd-{os.getuid()}")
    return [Path(base) / "flashd", fallback] if base else [fallback]


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where facts measured on this machine are kept: ``$XDG_CACHE_HOME/flashd``, else
    ``~/.cache/flashd``. Makes nothing.

    Raises:
        RuntimeError: this user has no home directory.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "flashd"


def default_socket() -> Path:
    """Where the daemon listens and clients look when nobody says otherwise.

    ``$FLASHD_SOCKET``, else ``socket`` of the configuration file, else in the runtime directory.
    """
    given = os.environ.get("FLASHD_SOCKET") or _toml(os.environ).get("socket")
    return Path(given).expanduser().absolute() if given else runtime_dir() / "flashd.sock"


def traceback_wanted() -> bool:
    """Whether internal errors of a command shall show their traceback."""
    return bool(os.environ.get("FLASHD_TRACEBACK"))
