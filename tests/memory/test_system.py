"""What the kernel says of memory: of a made-up machine, and of real cgroups where they can be made."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashd.memory import wake
from flashd.memory.cgroups import memory_limits
from flashd.memory.system import SYSTEM, SystemMemory, footprint_bytes, status_bytes
from flashd.tools.bench.token.limit import memory_group

MB = 1 << 20
V1 = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def machine(root: Path, mountinfo: str, cgroup: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/self/mountinfo": mountinfo, "proc/self/cgroup": cgroup, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def stat(prefix: str = "", **values: int) -> str:
    return "".join(f"{prefix}{name} {value}\n" for name, value in values.items())


def test_file_cache_counts_as_free_unless_it_must_be_written_first_v2(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a"
    files = {
        f"{base}/memory.max": f"{100 * MB}\n",
        f"{base}/memory.high": "max\n",
        f"{base}/memory.current": f"{90 * MB}\n",
        f"{base}/memory.stat": stat(
            inactive_file=30 * MB, active_file=20 * MB, file_dirty=7 * MB, file_writeback=3 * MB, shmem=MB
        ),
    }
    reading = SystemMemory(machine(tmp_path, V2, "0::/a\n", files)).read()
    assert (reading.available_bytes, reading.limit_bytes, reading.source) == (50 * MB, 100 * MB, "/a")


def test_file_cache_counts_as_free_unless_it_must_be_written_first_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/a"
    own = stat(cache=1, inactive_file=1, active_file=1, dirty=0, writeback=0)  # less than with those below
    below = stat("total_", inactive_file=30 * MB, active_file=20 * MB, dirty=7 * MB, writeback=3 * MB)
    files = {
        f"{base}/memory.limit_in_bytes": f"{100 * MB}\n",
        f"{base}/memory.usage_in_bytes": f"{90 * MB}\n",
        f"{base}/memory.stat": own + below,
    }
    reading = SystemMemory(machine(tmp_path, V1, "4:memory:/a\n", files)).read()
    assert (reading.available_bytes, reading.source) == (50 * MB, "/a")


def test_the_tightest_ancestor_wins(tmp_path: Path) -> None:
    """Ours says max, the one above it doesn't; where high is lower than max, it is what counts."""
    base = "sys/fs/cgroup"
    files = {
        f"{base}/a/b/memory.max": "max\n",
        f"{base}/a/b/memory.high": "max\n",
        f"{base}/a/b/memory.current": f"{5 * MB}\n",
        f"{base}/a/memory.max": f"{80 * MB}\n",
        f"{base}/a/memory.high": f"{60 * MB}\n",
        f"{base}/a/memory.current": f"{20 * MB}\n",
    }
    root = machine(tmp_path, V2, "0::/a/b\n", files)
    reading = SystemMemory(root).read()
    assert (reading.available_bytes, reading.limit_bytes, reading.source) == (40 * MB, 60 * MB, "/a")
    (root / f"{base}/a/b/memory.max").write_text(f"{30 * MB}\n")
    reading = SystemMemory(root).read()
    assert (reading.available_bytes, reading.source) == (25 * MB, "/a/b")


def test_a_group_over_its_limit_has_nothing(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.high": f"{10 * MB}\n",
        "sys/fs/cgroup/a/memory.current": f"{12 * MB}\n",
        "sys/fs/cgroup/a/memory.stat": "not a statistic\n",
    }
    assert SystemMemory(machine(tmp_path, V2, "0::/a\n", files)).read().available_bytes == 0


def test_without_cgroups_it_is_the_machine(tmp_path: Path) -> None:
    for root in (tmp_path, machine(tmp_path / "x", V2, "0::/a\n", {})):
        reading = SystemMemory(root).read()
        memory = psutil.virtual_memory()
        assert (reading.source, reading.limit_bytes) == (SYSTEM, memory.total)
        assert abs(reading.available_bytes - memory.available) < 512 * MB
        assert reading.stalled is None


def test_waiting_for_memory_is_a_share_of_the_time(tmp_path: Path) -> None:
    now_s = 10.0
    root = machine(tmp_path, V2, "0::/a\n", {"proc/pressure/memory": pressure(1_000_000)})
    memory = SystemMemory(root, lambda: now_s)
    assert memory.read().stalled == 0.0
    now_s = 12.0
    (root / "proc/pressure/memory").write_text(pressure(1_500_000))
    assert memory.read().stalled == pytest.approx(0.25)
    # The group's own waits more than the machine's.
    group = root / "sys/fs/cgroup/a"
    group.mkdir(parents=True)
    (group / "memory.pressure").write_text(pressure(3_100_000))
    now_s = 14.0
    assert memory.read().stalled == pytest.approx(0.8)


def pressure(total_us: int) -> str:
    averages = "avg10=0.00 avg60=0.00 avg300=0.00"
    return f"some {averages} total={total_us}\nfull {averages} total=5\n"


def test_the_footprint_is_what_is_ones_own() -> None:
    before, mapped = footprint_bytes(), status_bytes("RssFile")
    with open("/proc/self/maps") as file:  # mapped files don't count
        assert file.read()
    # Not the heap's: it may have what others have freed.
    with mmap.mmap(-1, 32 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mine:
        mine.write(b"1" * (32 * MB))
        assert 30 * MB < footprint_bytes() - before < 70 * MB
    assert status_bytes("RssFile") >= mapped // 2


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_group(64 * MB) as (folder, why):
        if folder is None:
            pytest.skip(f"no memory cgroup can be made here: {why}")
        yield folder
        for _ in range(50):  # its last process may be leaving
            if not (folder / "cgroup.procs").read_text():
                break
            time.sleep(0.1)


IN_GROUP = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
"""


def run_in(folder: Path, code: str) -> Any:
    command = [sys.executable, "-c", IN_GROUP + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_a_real_group_on_a_large_machine(group: Path, tmp_path: Path) -> None:
    """The group's limit counts, and its page cache does not, however full of it the group is."""
    big = tmp_path / "big"
    big.write_bytes(os.urandom(MB) * 100)
    with big.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = run_in(
        group,
        f"""
from flashd.memory.system import SystemMemory
before = SystemMemory().read()
with open({str(big)!r}, "rb") as file:
    while file.read(1 << 20):
        pass
after = SystemMemory().read()
held = b"x" * (20 << 20)
less = SystemMemory().read()
print(json.dumps([before.__dict__, after.__dict__, less.__dict__]))
""",
    )
    before, after, less = found
    assert before["source"].endswith(group.name)
    assert before["limit_bytes"] == 64 * MB
    assert abs(before["available_bytes"] - after["available_bytes"]) < 12 * MB
    assert 15 * MB < after["available_bytes"] - less["available_bytes"] < 30 * MB


def test_the_kernel_says_when_a_group_gets_full(group: Path) -> None:
    found = run_in(
        group,
        """
import asyncio
from flashd.memory.wake import MemoryWake
async def main():
    told, watch = asyncio.Event(), MemoryWake()
    watch.start(told.set)
    await asyncio.sleep(0.2)  # nothing is told before there is something to tell
    early = told.is_set()
    held = []
    for _ in range(54):
        held.append(b"x" * (1 << 20))
        await asyncio.sleep(0.01)  # for the loop to hear of it
        if told.is_set():
            break
    watch.stop()
    print(json.dumps({"early": early, "told": told.is_set(), "held": len(held)}))
asyncio.run(main())
""",
    )
    assert found["told"], found


@pytest.fixture
def unified() -> Iterator[tuple[Path, int]]:
    """A group of the unified hierarchy, and a process that may go there."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounts = [line.split()[4] for line in lines if " - cgroup2 " in line]
    if not mounts:
        pytest.skip("no unified hierarchy is mounted here")
    folder = Path(mounts[0]) / f"flashd-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as exc:
        pytest.skip(f"no cgroup can be made here: {exc}")
    with subprocess.Popen(["sleep", "60"]) as child:
        yield folder, child.pid
        child.kill()
    for _ in range(50):
        with suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.05)


async def test_a_file_of_events_that_changes_wakes_up(unified: tuple[Path, int]) -> None:
    """As ``memory.events`` does: this file tells changes in the same way."""
    folder, pid = unified
    watch, told, loop = wake.MemoryWake(), asyncio.Event(), asyncio.get_running_loop()
    fd = os.open(folder / "cgroup.events", os.O_RDONLY)
    watch._fds = [fd]
    watch._watch([fd], lambda: loop.call_soon_threadsafe(told.set))
    try:
        await asyncio.sleep(0.1)
        assert not told.is_set()
        (folder / "cgroup.procs").write_text(str(pid))
        async with asyncio.timeout(5):
            await told.wait()
    finally:
        watch.stop()


async def test_where_nothing_can_be_watched_nothing_fails(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": f"{100 * MB}\n",
        "sys/fs/cgroup/a/memory.current": "5\n",
    }
    for root in (tmp_path / "empty", machine(tmp_path / "v2", V2, "0::/a\n", files)):
        watch = wake.MemoryWake(root)
        watch.start(lambda: None)
        watch.stop()
    assert len(memory_limits(tmp_path / "v2")) == 1
