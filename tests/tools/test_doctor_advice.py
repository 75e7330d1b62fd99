"""What ``doctor`` says about facts, and the facts as kernels write them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flashd.cli.doctor_report import doctor_rows
from flashd.disk.curve import CurvePoint
from flashd.errors import ConfigError
from flashd.memory import cgroups
from flashd.tools import host
from flashd.tools.doctor_advice import warnings_of
from flashd.tools.doctor_facts import (
    Alignment,
    BundleFacts,
    Candidate,
    CurveFacts,
    DoctorReport,
    EngineChoice,
    KernelFacts,
)
from flashd.tools.reasons import why_not

GIB = 1 << 30


HEALTHY = DoctorReport(
    flashd="0.1.0",
    python="3.11.2",
    kernel="Linux 6.6.0 x86_64",
    directory="model",
    probed_file="model/ffn.bundle",
    mount=host.Mount("ext4", "/dev/nvme0n1p2", "nvme0n1", "A disk", False),
    free_bytes=100 * GIB,
    engine=EngineChoice(
        "uring",
        "O_DIRECT",
        True,
        64,
        [Candidate("uring", True, "O_DIRECT"), Candidate("threads", True, "O_DIRECT")],
        True,
        "",
    ),
    alignment=Alignment(512, "stated by statx"),
    io_uring_disabled=0,
    locked_memory=host.LockedMemory(64 << 20, 64 << 20, False),
    memory_limits=[],
    total_ram_bytes=16 * GIB,
    available_ram_bytes=12 * GIB,
    transparent_hugepages="madvise",
    kernels=KernelFacts(True, True, "avx2", ["avx2", "portable"], 8),
    bundle=BundleFacts("file", 16384, "in place", False, 2 * GIB),
    curve=CurveFacts(
        "cache", False, "uring", os.uname().release, 1, 8192, [CurvePoint(4096, 1, 0.05, 80.0)], ""
    ),
    unknown={},
    warnings=[],
    failed=[],
)
assert HEALTHY.engine is not None
THREADS = replace(
    HEALTHY.engine,
    chosen="threads",
    candidates=[Candidate("uring", False, "Operation not permitted"), Candidate("threads", True, "O_DIRECT")],
)
PAGE_CACHE = replace(
    HEALTHY.engine,
    chosen="buffered",
    direct=False,
    candidates=[Candidate("uring", False, "no"), Candidate("threads", False, "open with O_DIRECT: no")],
)


def test_a_healthy_machine_gets_no_advice() -> None:
    assert warnings_of(HEALTHY) == []


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"engine": THREADS}, "Operation not permitted", "seccomp"),
        ({"engine": THREADS, "io_uring_disabled": 2}, "io_uring is not used", "set it to 0"),
        ({"engine": THREADS, "io_uring_disabled": 1}, "io_uring is not used", "io_uring_group"),
        (
            {"engine": replace(THREADS, candidates=[Candidate("uring", False, "no memory (ulimit -l)")])},
            "no memory",
            "LimitMEMLOCK=",
        ),
        ({"engine": PAGE_CACHE}, "open with O_DIRECT: no", "ext4 or xfs"),
        (
            {"engine": PAGE_CACHE, "kernels": KernelFacts(True, False, "avx2", ["avx2"], 8)},
            "page cache",
            "C++ compiler",
        ),
        ({"locked_memory": host.LockedMemory(65536, 65536, False)}, "`ulimit -l` is 64 KiB", "LimitMEMLOCK="),
        (
            {"engine": replace(HEALTHY.engine, registered_buffers=False, registered_reason="old kernel")},
            "old kernel",
            "ulimit -l",
        ),
        ({"bundle": BundleFacts("file", 512, "", True, 1)}, "512 bytes", "convert the model again"),
        ({"bundle": BundleFacts("file", 512, "", False, 1, "", "x.json: bad")}, "predictors", "x.json: bad"),
        ({"available_ram_bytes": GIB}, "only 1024 MiB", "free some"),
        ({"memory_limits": [cgroups.MemoryLimit("/a", 2, GIB, None, 5)]}, "only 1024 MiB", "cgroup"),
        ({"memory_limits": [cgroups.MemoryLimit("/a", 2, None, GIB, 5)]}, "only 1024 MiB", "cgroup"),
        ({"mount": host.Mount("tmpfs", "tmpfs", "", "", None)}, "tmpfs is RAM", "memory"),
        (
            {
                "mount": host.Mount("ext4", "/dev/sda1", "sda", "", True),
                "curve": replace(HEALTHY.curve, points=[CurvePoint(4096, 1, 0.0005, 8000.0)]),
            },
            "sda rotates",
            "SSD",
        ),
        ({"curve": replace(HEALTHY.curve, not_kept="no space")}, "no space", "worth reading over"),
        ({"kernels": KernelFacts(False, True, "numpy", ["numpy"], 8)}, "native kernels", "C++ compiler"),
    ],
)  # fmt: skip
def test_advice_names_reason_and_remedy(changes: dict[str, object], reason: str, remedy: str) -> None:
    (text,) = warnings_of(replace(HEALTHY, **changes))  # type: ignore[arg-type]  # by field
    assert reason in text
    assert remedy in text


def test_what_is_unknown_gives_no_advice() -> None:
    blank = replace(
        HEALTHY,
        **dict.fromkeys(
            ("mount", "free_bytes", "engine", "alignment", "io_uring_disabled", "locked_memory",
             "memory_limits", "total_ram_bytes", "available_ram_bytes", "transparent_hugepages", "bundle",
             "curve"),
        ),  # type: ignore[arg-type]  # all of them may be None
        unknown={"mount": "no /proc"},
    )  # fmt: skip
    assert warnings_of(blank) == []
    assert ("file system", "unknown: no /proc") in doctor_rows(blank)
    assert json.loads(json.dumps(asdict(blank)))["engine"] is None


def test_a_virtual_disk_that_says_it_rotates_is_not_believed() -> None:
    lies = replace(HEALTHY, mount=host.Mount("ext4", "/dev/vda", "vda", "", True))
    assert warnings_of(lies) == []
    assert "rotates" not in dict(doctor_rows(lies))["file system"]


def test_a_curve_of_another_kernel_is_told() -> None:
    assert HEALTHY.curve is not None
    weeks_ago_s = int(time.time()) - 22 * 86400
    old = replace(HEALTHY, curve=replace(HEALTHY.curve, measured_unix_s=weeks_ago_s, kernel="4.4.0"))
    text = dict(doctor_rows(old))["device curve"]
    assert "3 weeks ago on another kernel (4.4.0)" in text
    odd = replace(HEALTHY, curve=replace(HEALTHY.curve, measured_unix_s=1 << 61))
    assert "measured in the future with" in dict(doctor_rows(odd))["device curve"]
    assert "--measure repeats it" in text
    assert "another kernel" not in dict(doctor_rows(HEALTHY))["device curve"]


def test_reasons_leave_out_what_only_another_caller_can_do() -> None:
    refused = ConfigError("/a: b/c.bundle: backend uring: Cannot allocate memory; why; use backend auto")
    assert why_not(refused) == "Cannot allocate memory; why"
    assert why_not(ConfigError("something else")) == "something else"


# --- the machine, from files as kernels write them


def machine(root: Path, mountinfo: str, cgroup: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mountinfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def test_every_ancestor_that_limits_memory_v2(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    files = {
        f"{base}/a/b/c/memory.max": "max\n",
        f"{base}/a/b/c/memory.high": "1000000\n",
        f"{base}/a/b/c/memory.current": "5\n",
        f"{base}/a/b/memory.max": "max\n",
        f"{base}/a/b/memory.high": "max\n",
        f"{base}/a/memory.max": "2000000\n",
        f"{base}/a/memory.high": "max\n",
        f"{base}/a/memory.current": "77\n",
    }
    root = machine(tmp_path, V2, "0::/a/b/c\n", **files)
    assert cgroups.memory_limits(root) == [
        cgroups.MemoryLimit("/a/b/c", 2, None, 1_000_000, 5),
        cgroups.MemoryLimit("/a", 2, 2_000_000, None, 77),
    ]


def test_every_ancestor_that_limits_memory_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    files = {
        f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{base}/docker/memory.limit_in_bytes": "3000000\n",
        f"{base}/docker/memory.usage_in_bytes": "123\n",
        f"{base}/docker/x/memory.limit_in_bytes": "9223372036854771712\n",
    }
    root = machine(tmp_path, V1, "4:memory:/docker/x\n2:cpu:/\n0::/\n", **files)
    assert cgroups.memory_limits(root) == [cgroups.MemoryLimit("/docker", 1, 3_000_000, None, 123)]


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000\n"}
    root = machine(tmp_path, V1, "4:memory:/docker/0123\n", **files)
    assert cgroups.memory_limits(root) == [cgroups.MemoryLimit("/", 1, 4_000_000, None, 0)]


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cgroups.memory_limits(machine(tmp_path, "", "")) == []
    with pytest.raises(FileNotFoundError):
        cgroups.memory_limits(tmp_path / "nowhere")


def test_small_facts_of_the_kernel(tmp_path: Path) -> None:
    files = {
        "proc/sys/kernel/io_uring_disabled": "2\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n",
    }
    root = machine(tmp_path, "", "", **files)
    assert host.io_uring_disabled(root) == 2
    assert host.transparent_hugepages(root) == "madvise"
    assert host.locked_memory(root).unlimited_by_capability
    (root / "proc/self/status").write_text("CapEff:\t0000000000003fff\n")
    assert not host.locked_memory(root).unlimited_by_capability
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("never\n")
    with pytest.raises(ValueError, match="never"):
        host.transparent_hugepages(root)
    with pytest.raises(FileNotFoundError):
        host.io_uring_disabled(tmp_path / "nowhere")
