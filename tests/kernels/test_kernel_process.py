"""The kernels in a process: import, fork, exit, signals, threads of the caller, environment."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from flashd import kernels
from flashd.kernels import twin

PRELUDE = """
import os, sys, threading, time
import numpy as np
def os_threads(): return len(os.listdir('/proc/self/task'))
bare = os_threads()
"""
# Python 3.12 warns of a fork with threads, which is what is tested here.
WORK = """
import warnings
from flashd import kernels
warnings.simplefilter("ignore", DeprecationWarning)
w = np.ones((4096, 512), np.float32); x = np.ones((1, 512), np.float32); out = np.empty((1, 4096), np.float32)
def work():
    out[:] = 0
    kernels.gemv(w, x, out)
    assert (out == 512).all()
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def succeed(code: str, **environment: str) -> str:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_native_module_is_built() -> None:
    """The rest of the suite would silently test the twins alone."""
    assert kernels.NATIVE or os.environ.get("FLASHD_NO_NATIVE")


def test_import_is_fast_and_starts_no_thread() -> None:
    """CPU time, so that a busy machine does not count, and the best of some: files may be cold."""
    spent = [
        float(
            succeed(
                "start = time.process_time()\nfrom flashd import kernels\n"
                "spent = time.process_time() - start\n"
                "assert os_threads() == bare, os_threads()\nprint(spent)"
            )
        )
        for _ in range(3)
    ]
    assert min(spent) < 0.05, spent


def test_the_pool_starts_on_first_use_and_shrinks() -> None:
    succeed(
        WORK + "kernels.set_threads(4)\nassert os_threads() == bare\n"
        "work()\nassert os_threads() == bare + 3 * kernels.NATIVE, os_threads()\n"
        "kernels.set_threads(2)\nwork()\nassert os_threads() == bare + kernels.NATIVE\n"
        "kernels.set_threads(1)\nwork()\n"
    )


def test_a_child_has_its_own_pool() -> None:
    succeed(
        WORK + "kernels.set_threads(3)\nwork()\n"
        "for _ in range(20):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        work(); os._exit(7)\n"
        "    work()\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )


def test_a_fork_during_a_kernel() -> None:
    succeed(
        WORK + "kernels.set_threads(3)\n"
        "stop = False\n"
        "def loop():\n    mine = np.empty_like(out)\n    while not stop: kernels.gemv(w, x, mine)\n"
        "thread = threading.Thread(target=loop); thread.start()\n"
        "for _ in range(20):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        work(); os._exit(7)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "stop = True; thread.join()\n"
    )


def test_exit_while_workers_wait() -> None:
    for _ in range(3):
        succeed(WORK + "kernels.set_threads(4)\nwork()\n")


def test_exit_while_another_thread_computes() -> None:
    succeed(
        "from concurrent.futures import ThreadPoolExecutor\n" + WORK + "kernels.set_threads(4)\n"
        "pool = ThreadPoolExecutor(1)\n[pool.submit(work) for _ in range(50)]\n"
    )


def test_exit_while_a_daemon_thread_computes() -> None:
    """Python unwinds a thread that comes back from a kernel then; through a destructor that would abort.

    The sleep lets the thread get into a kernel; the exit comes at another moment of it each time.
    """
    for _ in range(3):
        succeed(
            "from flashd import kernels\n"
            "w, x, out = (np.ones(shape, np.float32) for shape in ((2000, 2000), (300, 2000), (300, 2000)))\n"
            "def loop():\n    while True: kernels.gemm(w, x, out)\n"
            "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.05)\n"
        )


def test_an_index_that_changes_meanwhile_leads_nowhere_else() -> None:
    succeed(
        "from flashd import kernels\n"
        "n, d = 4096, 512\n"
        "rows = np.zeros((n, 8 * d), np.uint8); x = np.ones((16, d), np.float32)\n"
        "out = np.empty((16, n), np.float32); numbers = np.arange(n); stop = False\n"
        "def change():\n    while not stop: numbers[-1] = 10**12; numbers[-1] = n - 1\n"
        "thread = threading.Thread(target=change); thread.start()\n"
        "for i in range(600):\n"
        "    given = {'index': numbers} if i % 2 else {'slots': numbers}\n"
        "    try: kernels.ffn_dots(rows, 'f32', d, False, 'relu', x, out, **given)\n"
        "    except ValueError: pass\n"
        "stop = True; thread.join()\n"
    )


@pytest.mark.slow
def test_threads_round_as_their_caller_does() -> None:
    """Denormal numbers flushed by one thread and not by another would make results a matter of luck."""
    succeed(
        "import torch\nfrom flashd import kernels\n"
        "rng = np.random.default_rng(0)\n"
        "w = (rng.standard_normal((4000, 1024)) * 1e-20).astype(np.float32)\n"
        "x = (rng.standard_normal((1, 1024)) * 1e-20).astype(np.float32)\n"
        "out = np.empty((1, 4000), np.float32)\nkernels.set_threads(2); kernels.gemv(w, x, out)\n"
        "assert out.any()\n"
        "torch.set_flush_denormal(True)\nseen = set()\n"
        "for _ in range(60): kernels.gemv(w, x, out); seen.add(out.tobytes())\n"
        "assert len(seen) == 1\n"
    )


def test_signals_reach_python() -> None:
    succeed(
        "import signal\n" + WORK + "kernels.set_threads(4)\nwork()\n"
        "def blocked():\n"
        "    for name in os.listdir('/proc/self/task'):\n"
        "        status = open(f'/proc/self/task/{name}/status').read()\n"
        "        if 'flashd-kernel' in status: yield int(status.split('SigBlk:')[1].split()[0], 16)\n"
        "while len(list(blocked())) < 3 * kernels.NATIVE: time.sleep(0.01)\n"
        "assert all(mask >> (signal.SIGTERM - 1) & 1 for mask in blocked())\n"
    )


def test_several_threads_at_once() -> None:
    """One gets the pool, the others compute on their own: nobody waits, nobody gets wrong numbers."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((500, 300)).astype(np.float32)
    x = rng.standard_normal((8, 300)).astype(np.float32)
    expected = np.empty((8, 500), np.float32)
    kernels.gemv(w, x, expected)
    wrong: list[int] = []

    def loop(index: int) -> None:
        out = np.empty((1, 500), np.float32)
        for _ in range(200):
            kernels.gemv(w, x[index : index + 1], out)
            if not np.array_equal(out[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for count in (1, 3, 2, 5) * 5:
        kernels.set_threads(count)
    for thread in threads:
        thread.join()
    kernels.set_threads(kernels.default_threads())
    assert wrong == []


def test_kernels_let_other_threads_run() -> None:
    """The GIL is released: a Python thread counts while one long call computes."""
    w = np.ones((20_000, 2048), np.float16)
    x = np.ones((16, 2048), np.float32)
    out = np.empty((16, 20_000), np.float32)
    ticks, done = 0, threading.Event()

    def compute() -> None:
        kernels.gemv(w, x, out)
        done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    while not done.wait(0.0005):
        ticks += 1
    thread.join()
    assert ticks >= 3


@pytest.mark.parametrize("level", kernels.available_simd())
def test_environment_forces_a_level(level: str) -> None:
    assert (
        succeed("from flashd import kernels\nprint(kernels.simd_level())", FLASHD_SIMD=level).strip() == level
    )


def test_environment_with_an_unknown_level() -> None:
    done = python("from flashd import kernels", FLASHD_SIMD="sse9")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "flashd.errors.ConfigError: FLASHD_SIMD: SIMD level 'sse9' "
    )
    assert kernels.available_simd()[-1] in done.stderr.splitlines()[-1]


def test_the_stub_is_the_module() -> None:
    """``_native.pyi``, the twin and what the package exports agree, to every argument."""
    stub = ast.parse(Path(kernels.__file__).with_name("_native.pyi").read_text())
    signatures = {node.name: node.args for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert sorted(signatures) == sorted(twin.__all__)
    for name, arguments in signatures.items():
        source = ast.parse(inspect.getsource(getattr(twin, name))).body[0]
        assert isinstance(source, ast.FunctionDef)
        for node in ast.walk(source.args):  # names of the same types
            if isinstance(node, ast.Name) and node.id == "BoolArray":
                node.id = "npt.NDArray[np.bool_]"
        assert ast.unparse(source.args) == ast.unparse(arguments), name


@pytest.mark.skipif(not kernels.NATIVE, reason="the twins are what is exported")
def test_the_package_exports_the_native_verbs() -> None:
    from flashd.kernels import _native

    assert all(getattr(kernels, name) is getattr(_native, name) for name in twin.__all__)
    public = {name for name, value in vars(_native).items() if not name.startswith("_") and callable(value)}
    assert public == set(twin.__all__)
