"""The number of threads: affinity mask and CPU quotas, on cgroup trees as kernels lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashd.kernels.cpus import default_threads


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "10000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/../outside\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {}, 8),
        ("0::/a\n", {"a/cpu.max": "garbage"}, 8),
        ("0::/a\n", {"a/cpu.max": "1600000 100000\n"}, 8),
        (
            "4:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        ("1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 8),
        (
            "2:cpuacct:/\n1:cpu:/x/y\n",
            {"cpu/x/cpu.cfs_quota_us": "500000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            5,
        ),
        ("1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "0\n"}, 8),
        ("2:cpuset:/\n0::/u\n", {"unified/u/cpu.max": "200000 100000\n"}, 2),
    ],
)
def test_quota(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert default_threads(tree(tmp_path, cgroup, files), affinity=8) == expected


def test_without_proc_the_mask_decides(tmp_path: Path) -> None:
    assert default_threads(tmp_path, affinity=5) == 5


def test_this_machine() -> None:
    assert default_threads() >= 1
