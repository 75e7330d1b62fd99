"""What calibration keeps while it works: ``DIR/.calibrate.partial``, locked, resumable, removed at the end.

::

    state.json        what is durable, and of which calibration
    layer-000.rec     per token: FFN input (f16) and which neurons fired (bits)
    predictor-000.*   what is trained
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from flashd.errors import CalibrationError
from flashd.tools.calibrate.write import SCRATCH
from flashd.tools.convert.files import write_durably
from flashd.types import BoolArray, F32Array, FFNGeometry, WeightArray

_STATE = "state.json"
_FACTS = "facts"
_COMMIT_S = 5.0
_MAX_F16 = 65504.0


@dataclass
class State:
    """What a killed calibration goes on from.

    Attributes:
        fingerprint: of bundle, texts and options.
        probed: sequences run to find thresholds and what they cost.
        thresholds: found from them; None as long as they are not.
        recorded: sequences whose records are durable.
        nll: per way of running the model, summed negative log-likelihood and number of tokens of the
            test part.
    """

    fingerprint: str
    probed: int = 0
    thresholds: list[float] | None = None
    recorded: int = 0
    nll: dict[str, tuple[float, int]] = field(default_factory=dict)


@contextmanager
def system_errors(where: Path) -> Iterator[None]:
    """Translate what the system says while calibrating.

    Raises:
        CalibrationError: for an ``OSError``.
    """
    try:
        yield
    except OSError as exc:
        raise CalibrationError(
            f"{exc.filename or where}: {exc.strerror or exc}; the same command goes on from what is done"
        ) from exc


class Scratch:
    """Context manager around the directory. An error leaves it for the next run.

    Args:
        directory: the bundle.
        geometry: of its rows.
        fingerprint: see ``State``.
        note: told when what an earlier run left is of no use.

    Raises:
        CalibrationError: it cannot be made, or another calibration works there.
    """

    def __init__(
        self, directory: Path, geometry: FFNGeometry, fingerprint: str, note: Callable[[str], None]
    ) -> None:
        self.root = directory / SCRATCH
        self.state = State(fingerprint)
        self._geometry = geometry
        self._note = note
        self._lock_fd = -1
        self._files: list[Any] = []
        self._committed_s = time.monotonic()
        self.record_dtype = np.dtype(
            [("x", "<f2", (geometry.d_model,)), ("mask", "u1", (-(-geometry.n_neurons // 8),))]
        )

    def __enter__(self) -> Scratch:
        with system_errors(self.root):
            self.root.mkdir(exist_ok=True)
            self._lock_fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                os.close(self._lock_fd)
                raise CalibrationError(f"{self.root}: another calibration works there; wait for it") from exc
            self._resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self.close_records()
        if kind is None:
            shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._lock_fd)

    def _resume(self) -> None:
        try:
            raw = json.loads((self.root / _STATE).read_bytes())
            raw["nll"] = {name: (float(total), int(count)) for name, (total, count) in raw["nll"].items()}
            state = State(**raw)
            if state.fingerprint == self.state.fingerprint:
                self.state = state
                return
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass  # none, or none that can be understood
        left = [path for path in self.root.iterdir() if path.is_file()]
        if left:
            self._note(f"{self.root}: of another calibration, or damaged; starting anew")
        for path in left:
            path.unlink()

    def commit(self, *, now: bool = False) -> None:
        """Make records and state durable, if it is time."""
        if now or time.monotonic() - self._committed_s >= _COMMIT_S:
            for file in self._files:
                file.flush()
                os.fdatasync(file.fileno())
            write_durably(self.root / _STATE, json.dumps(asdict(self.state)).encode())
            self._committed_s = time.monotonic()

    def reserve(self, tokens: int) -> None:
        """Check that the records of so many tokens will fit.

        Raises:
            CalibrationError: with both numbers.
        """
        have = sum(path.stat().st_size for path in self.root.glob("*.rec"))
        need = tokens * self.record_dtype.itemsize * self._geometry.n_layers - have
        free = shutil.disk_usage(self.root).free
        if need > free:
            raise CalibrationError(
                f"{self.root}: {tokens} tokens need {need / 1e9:.3f} GB for some time, the disk has "
                f"{free / 1e9:.3f} GB free; free some space, or take fewer (--samples)"
            )

    def open_records(self, tokens: int) -> None:
        """Open the records to append to, cut to what is durable.

        Raises:
            CalibrationError: they are shorter than that.
        """
        self.close_records()
        nbytes = tokens * self.record_dtype.itemsize
        for layer in range(self._geometry.n_layers):
            file = self._record_path(layer).open("ab")
            self._files.append(file)
            if file.tell() < nbytes:
                raise CalibrationError(f"{file.name}: shorter than it was; remove {self.root} and start anew")
            file.truncate(nbytes)

    def close_records(self) -> None:
        """Idempotent."""
        for file in self._files:
            file.close()
        self._files.clear()

    def append(self, layer: int, x: F32Array, fired: BoolArray) -> None:
        """Record some tokens of one layer: ``x [tokens, d]``, ``fired [tokens, n]``."""
        records = np.empty(len(x), self.record_dtype)
        np.clip(x, -_MAX_F16, _MAX_F16, out=records["x"], casting="unsafe")
        records["mask"] = np.packbits(fired, axis=1)
        self._files[layer].write(records.data)

    def records(self, layer: int, tokens: int) -> Any:
        """The first tokens' records of a layer, a memory map ``[tokens]`` of ``record_dtype``."""
        return np.memmap(self._record_path(layer), self.record_dtype, "r", shape=(tokens,))

    def _record_path(self, layer: int) -> Path:
        return self.root / f"layer-{layer:03}.rec"

    def save(self, name: str, facts: Mapping[str, Any], arrays: Mapping[str, WeightArray]) -> None:
        """Keep a result, durably and whole."""
        temporary = self.root / f"{name}.npz.tmp"
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **{_FACTS: np.array(json.dumps(facts)), **arrays})
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.root / f"{name}.npz")

    def load(self, name: str) -> tuple[dict[str, Any], dict[str, WeightArray]] | None:
        """A result that was kept; None if there is none."""
        path = self.root / f"{name}.npz"
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        return json.loads(str(arrays.pop(_FACTS))), arrays
