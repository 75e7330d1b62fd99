"""The engines in processes that may do less: no locked memory, no io_uring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashd.testing.engine_suite import random_file

# Gives up all capabilities, as a process of an ordinary user has none: root's exceed the limits.
_NO_CAPABILITIES = """
import ctypes, resource, struct
libc = ctypes.CDLL(None, use_errno=True)
header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
assert libc.capset(header, ctypes.create_string_buffer(24)) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (NBYTES, NBYTES))
"""

# As container runtimes do it: the three system calls of io_uring fail with EPERM.
_NO_IO_URING = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
load, equal, ret = 0x20, 0x15, 0x06
code = [(load, 0, 0, 0), *((equal, 3 - i, 0, 425 + i) for i in range(3)), (ret, 0, 0, 0x7FFF0000),
        (ret, 0, 0, 0x00050000 | 1)]
raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(raw)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""

_READ = """
import asyncio, sys
import numpy as np
from flashd.disk.probe import open_engine
from flashd.disk.slabs import SlabBuffer
from flashd.disk.engine import ReadBatch

async def main():
    engine = await open_engine(sys.argv[1])
    print(engine.name, "|", engine.reason)
    buffer = SlabBuffer(1 << 20, engine, 1 << 14)
    buffer.resize(1 << 20)
    print(buffer.why_unregistered)
    at = np.arange(256) * 4096
    await engine.read(ReadBatch(at, np.full(256, 4096), buffer.memory, at))
    assert buffer.memory.tobytes() == open(sys.argv[1], "rb").read()
    print(engine.stats.registered_reads)
    await engine.close()

asyncio.run(main())
"""


def run(restriction: str, path: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", restriction + _READ, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random_file(tmp_path / "f", 1 << 20)
    return tmp_path / "f"


def test_a_small_limit_of_locked_memory(path: Path) -> None:
    """The ring works, and as much is registered as the limit allows."""
    engine, why, registered = run(_NO_CAPABILITIES.replace("NBYTES", str(64 << 10)), path)
    assert engine.startswith("uring |")
    assert "ulimit -l" in why
    # Newer kernels count the ring itself, too.
    assert 0 < int(registered) <= 16


def test_no_locked_memory_at_all(path: Path) -> None:
    """Kernels that count the ring as locked memory refuse it: threads read, and it is said why."""
    engine, why, registered = run(_NO_CAPABILITIES.replace("NBYTES", "0"), path)
    assert registered == "0"
    if engine.startswith("uring |"):
        assert "ulimit -l" in why
    else:
        assert engine.startswith("threads |")
        assert "ulimit -l" in engine


def test_enough_locked_memory_without_privileges(path: Path) -> None:
    engine, why, registered = run(_NO_CAPABILITIES.replace("NBYTES", str(2 << 20)), path)
    assert engine.startswith("uring |")
    assert why == ""
    assert int(registered) == 256


def test_a_container_that_blocks_io_uring(path: Path) -> None:
    engine, why, registered = run(_NO_IO_URING, path)
    assert engine.startswith("threads |")
    assert "uring: Operation not permitted" in engine
    assert "no registered memory" in why
    assert registered == "0"
