"""``bench io`` beside an fio that is broken in odd ways: a note, never a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import flashd_command, flashd_env

from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec
from flashd.tools.bench import fio as fio_module
from flashd.tools.bench.fio import Fio, FioError, FioHangs
from flashd.tools.bench.io import IoOptions, bench_io, io_options

SANE = {"read": {"total_ios": 9, "bw_bytes": 9, "runtime": 9}, "error": 0, "usr_cpu": 1, "sys_cpu": 1}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("bench") / "bundle", tiny_spec(d_ffn=400))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a shell script on PATH as fio: what it does for its version, and what else."""

    def write(version: str, run: str) -> None:
        program = tmp_path / "fio"
        program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\n{run}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


def sane_but(name: str, text: str) -> str:
    output = json.dumps({"jobs": [SANE]})
    return "echo '" + output.replace(f'"{name}": 9', f'"{name}": {text}') + "'"


ODD = {
    "not UTF-8": ("printf '\\377\\376{}'", "not UTF-8"),
    "deep": ("head -c 200000 /dev/zero | tr '\\0' '[' | sed 's/^/{\"a\":/'", "RecursionError"),
    "NaN": (sane_but("bw_bytes", "NaN"), "NaN is no number"),
    "Infinity": (sane_but("runtime", "Infinity"), "Infinity is no number"),
    "1e400": (sane_but("bw_bytes", "1e400"), "inf GB/s"),
    "1e400 reads": (sane_but("total_ios", "1e400"), "OverflowError"),
    "negative": (sane_but("bw_bytes", "-9"), "not understood"),
    "killed": ("kill -SEGV $$", "killed by SIGSEGV"),
}


@pytest.mark.parametrize(("run", "said"), ODD.values(), ids=ODD)
def test_odd_output_is_an_error_of_fio(
    install: Callable[[str, str], None], tmp_path: Path, run: str, said: str
) -> None:
    install("echo fio-9", run)
    fio = Fio.find()
    assert fio is not None
    with pytest.raises(FioError, match=said):
        fio.run("randread", tmp_path, ("x",), 512, 1, 0.01)


def test_sane_output(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("echo fio-9", sane_but("bw_bytes", "2000000000"))
    fio = Fio.find()
    assert fio is not None
    assert fio.run("randread", tmp_path, ("x",), 512, 1, 0.01).gb_per_s == 2.0


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("printf '\\377'", "not UTF-8"),
        ("printf 'fio\\033[2J'", "--version is not understood"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("sleep 600", "`fio --version` hangs"),
    ],
)
def test_an_odd_version_is_a_note(
    bundle: MadeBundle,
    install: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    said: str,
) -> None:
    monkeypatch.setattr(fio_module, "_VERSION_TIMEOUT_S", 0.3)
    install(version, "exit 1")
    report = bench_io([bundle.directory], _short(rounds=1))
    (text,) = report.notes
    assert said in text
    assert "not installed" not in text
    assert report.fio is None


def test_an_fio_that_hangs_is_asked_once_and_killed_with_its_children(
    bundle: MadeBundle, install: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fio_module, "_START_TIMEOUT_S", 0.3)
    pids = tmp_path / "pids"
    install("echo fio-9", f"sleep 600 & echo $$ $! >> {pids}; wait")
    report = bench_io([bundle.directory], _short(rounds=2))
    assert [text for text in report.notes if "fio hangs: killed after" in text] == report.notes != []
    (line,) = pids.read_text().splitlines()
    for pid in map(int, line.split()):
        _expect_gone(pid)
    fio = Fio.find()
    assert fio is not None
    with pytest.raises(FioHangs):
        fio.run("randread", tmp_path, ("x",), 512, 1, 0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_fio_does_not_outlive_the_command(
    bundle: MadeBundle, install: Callable[[str, str], None], tmp_path: Path, number: signal.Signals
) -> None:
    pid_file = tmp_path / "pid"
    install("echo fio-9", f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 600")
    command = flashd_command("bench", "io", str(bundle.directory), "--quick", "--engine", "buffered")
    with subprocess.Popen(
        command, env=flashd_env(tmp_path) | {"PATH": os.environ["PATH"]}, stderr=subprocess.PIPE
    ) as process:
        until_s = time.monotonic() + 60
        while not pid_file.exists():
            assert time.monotonic() < until_s
            assert process.poll() is None, "it ended before fio was started"
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode in (130, -number)
    _expect_gone(int(pid_file.read_text()))


def _short(rounds: int) -> IoOptions:
    options = {"sizes_bytes": (), "depths": (4,), "seconds": 0.02, "engines": ("buffered",), "rounds": rounds}
    return io_options(options, False, True)


def _expect_gone(pid: int) -> None:
    """Killed, though perhaps still to be waited for by whoever inherited it."""
    until_s = time.monotonic() + 10
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        assert time.monotonic() < until_s, f"process {pid} still runs"
        time.sleep(0.01)
