"""Nothing outlives a benchmark, whatever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from flashd.memory import cgroups
from flashd.tools.bench.child import child
from flashd.tools.bench.token.limit import memory_group
from flashd.tools.synth import SynthOptions, synth

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 20.0) -> T:
    end_s = time.monotonic() + seconds
    while not (met := condition()):
        assert time.monotonic() < end_s, "it took too long"
        time.sleep(0.02)  # nobody tells of the end of a process that is not ours
    return met


def a_worker_of(number: int) -> psutil.Process | None:
    """One of a benchmark's workers, each of which lives for a second or so."""
    for process in psutil.Process(number).children():
        try:
            if "flashd.tools.bench.token.worker" in process.cmdline():
                return process
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def groups_of(number: int) -> list[Path]:
    """Cgroups of the benchmark that has or had this process number."""
    found = []
    for _, mount, path in cgroups.memory_cgroups():
        own = mount.joinpath(path.lstrip("/"))
        found += (own if own.is_dir() else mount).glob(f"flashd-bench-{number}")
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("child") / "tiny"
    synth(folder, SynthOptions("opt-tiny"))
    return folder


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_nothing_outlives_a_benchmark(bundle: Path, number: int, status: int) -> None:
    """Its worker ends with it; its cgroup does, or is removed by the next one."""
    command = [sys.executable, "-m", "flashd", "bench", "token", str(bundle), "--budget", "3MB"]
    process = subprocess.Popen(
        [*command, "--rounds", "500"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    worker = until(lambda: a_worker_of(process.pid))
    assert worker is not None
    process.send_signal(number)
    assert process.wait(20) == status
    until(lambda: gone(worker))
    if number == signal.SIGKILL:
        with memory_group(64 << 20):
            pass
    until(lambda: not groups_of(process.pid))
    assert [path.name for path in bundle.parent.iterdir()] == ["tiny"]


def test_what_a_child_has_started_ends_too() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with child([sys.executable, "-c", code]) as process:
        assert process.stdout is not None
        grandchild = psutil.Process(int(process.stdout.readline()))
        assert not gone(grandchild)
    until(lambda: gone(grandchild))
    assert process.returncode == -signal.SIGKILL
