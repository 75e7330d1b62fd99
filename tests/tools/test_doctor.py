from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from support import flashd_command, flashd_env

from flashd.cli.disk import curve_table, doctor_rows
from flashd.disk.curve import CurvePoint
from flashd.errors import ConfigError
from flashd.testing.bundles import make_bundle
from flashd.tools import host
from flashd.tools.doctor import bundle_facts, doctor
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

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def flashd(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        flashd_command(*args), env=flashd_env(folder), capture_output=True, text=True, timeout=60, cwd=folder
    )


def test_the_command_in_a_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle")
    done = flashd(tmp_path / "bundle", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {item.name for item in fields(DoctorReport)}
    assert report["probed_file"] == "ffn.bundle"
    names = [candidate["name"] for candidate in report["engine"]["candidates"]]
    assert names == ["uring", "threads", "buffered"]
    works = [candidate["name"] for candidate in report["engine"]["candidates"] if candidate["works"]]
    assert report["engine"]["chosen"] == works[0]
    assert all(candidate["reason"] for candidate in report["engine"]["candidates"])
    assert report["bundle"]["store"] == "file"
    assert report["mount"]["file_system"]
    assert report["free_bytes"] > 0
    assert report["kernels"]["simd"] in [*report["kernels"]["available_simd"], "numpy"]
    # Without a directory nothing is measured unless asked.
    assert report["curve"] is None
    assert "flashd doctor DIR" in report["unknown"]["curve"]
    assert not (tmp_path / "cache").exists()


def test_the_command_for_people(tmp_path: Path) -> None:
    done = flashd(tmp_path, "doctor")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    assert facts["bundle"] == "none here"
    assert facts["device curve"].startswith("unknown: not measured")
    assert facts["kernel"] == host.kernel()
    assert facts["  buffered"].startswith("works: ")
    assert all(facts.values())
    assert not list(tmp_path.glob(".flashd*"))
    gone = flashd(tmp_path, "doctor", "nowhere")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "no such directory" in gone.stderr


def test_the_curve_is_measured_once_and_kept(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    said: list[str] = []
    first = doctor(place, curve_limit_s=0.4, note=said.append)
    assert first.curve is not None, first.unknown
    assert first.curve.measured_now
    assert first.curve.not_kept == ""
    assert len(said) == 1
    assert list(Path(first.curve.stored_in).glob("*.json"))
    assert not list(place.iterdir()), "the temporary file is still there"
    headers, rows = curve_table(first)
    assert len(rows) == len({point.size_bytes for point in first.curve.points})
    assert all(len(row) == len(headers) for row in rows)

    again = doctor(place, note=said.append)
    assert again.curve is not None
    assert (again.curve.measured_now, again.curve.points) == (False, first.curve.points)
    assert len(said) == 1
    shown = dict(doctor_rows(again))["device curve"]
    assert str(tmp_path / "cache") in shown

    anew = doctor(place, measure=True, curve=False, curve_limit_s=0.4)
    assert anew.curve is not None
    assert anew.curve.measured_now
    assert anew.curve.points != first.curve.points


def test_nothing_is_written_where_it_must_not_be(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    report = doctor(place, write=False)
    assert (report.engine, report.alignment, report.curve, report.probed_file) == (None, None, None, None)
    for fact in ("engine", "alignment", "curve"):
        assert "none may be written" in report.unknown[fact]
    assert not list(place.iterdir())
    assert dict(doctor_rows(report))["read engine"].startswith("unknown: no file of")
    # A file that is there is read instead.
    (place / "file").write_bytes(os.urandom(1 << 20))
    found = doctor(place, write=False, curve=False)
    assert found.engine is not None
    assert found.probed_file == str(place / "file")
    assert (found.alignment is not None) == ("alignment" not in found.unknown)


def test_a_directory_that_cannot_be_written_fails_nothing() -> None:
    report = doctor(Path("/sys"))
    assert report.engine is None
    assert report.unknown["engine"]
    assert report.unknown["curve"]
    assert report.mount is not None
    assert report.mount.file_system == "sysfs"
    assert report.mount.disk == ""


def test_a_damaged_bundle_is_told(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "bundle")
    (made.directory / "ffn.bundle").write_bytes(b"short")
    report = doctor(made.directory, curve=False)
    assert report.bundle is None
    assert "ffn.bundle" in report.unknown["bundle"]
    assert any("the bundle cannot be used" in text for text in report.warnings)
    assert report.engine is not None


def test_a_zarr_bundle(tmp_path: Path) -> None:
    made = make_bundle(tmp_path / "bundle", store="zarr")
    report = doctor(made.directory, curve=False)
    assert report.bundle is not None
    assert report.bundle.store == "zarr"
    assert report.probed_file is not None
    assert "ffn.zarr" in report.probed_file


def test_a_stride_that_does_not_fit_the_device(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path / "bundle").manifest
    for alignment, scratch, word in (
        (Alignment(512, "stated"), False, "in place"),
        (Alignment(4096, "stated"), True, "through scratch"),
        (Alignment(None, "tmpfs"), False, "page cache"),
        (None, None, "unknown"),
    ):
        facts = bundle_facts(manifest, alignment)
        assert facts.through_scratch is scratch
        assert word in facts.layout_note


# --- advice


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
    curve=CurveFacts("cache", False, "uring", 1, 8192, [CurvePoint(4096, 1, 0.05, 80.0)], ""),
    unknown={},
    warnings=[],
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
        ({"available_ram_bytes": GIB}, "only 1024 MiB", "free some"),
        ({"memory_limits": [host.MemoryLimit("/a", 2, GIB, None, 5)]}, "only 1024 MiB", "cgroup"),
        ({"memory_limits": [host.MemoryLimit("/a", 2, None, GIB, 5)]}, "only 1024 MiB", "cgroup"),
        ({"mount": host.Mount("tmpfs", "tmpfs", "", "", None)}, "tmpfs is RAM", "memory"),
        (
            {
                "mount": host.Mount("ext4", "/dev/sda1", "sda", "", True),
                "curve": replace(HEALTHY.curve, points=[CurvePoint(4096, 1, 0.0005, 8000.0)]),
            },
            "sda rotates",
            "SSD",
        ),
        ({"curve": replace(HEALTHY.curve, not_kept="no space")}, "no space", "not read over"),
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
    assert "says it rotates" in dict(doctor_rows(lies))["file system"]


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
    assert host.memory_limits(root) == [
        host.MemoryLimit("/a/b/c", 2, None, 1_000_000, 5),
        host.MemoryLimit("/a", 2, 2_000_000, None, 77),
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
    assert host.memory_limits(root) == [host.MemoryLimit("/docker", 1, 3_000_000, None, 123)]


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000\n"}
    root = machine(tmp_path, V1, "4:memory:/docker/0123\n", **files)
    assert host.memory_limits(root) == [host.MemoryLimit("/", 1, 4_000_000, None, 0)]


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert host.memory_limits(machine(tmp_path, "", "")) == []
    with pytest.raises(FileNotFoundError):
        host.memory_limits(tmp_path / "nowhere")


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


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        doctor(tmp_path / "nowhere")
