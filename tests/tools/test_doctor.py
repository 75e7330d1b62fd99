from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest
from support import flashd_command, flashd_env

from flashd.cli.doctor_report import curve_table, doctor_rows
from flashd.errors import ConfigError
from flashd.testing.bundles import make_bundle
from flashd.tools import host
from flashd.tools.doctor import bundle_facts, doctor
from flashd.tools.doctor_facts import (
    Alignment,
    DoctorReport,
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
    facts = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    assert facts["bundle"] == "none here"
    assert facts["device curve"].startswith("unknown: not measured")
    assert facts["kernel"] == host.kernel()
    assert facts["  buffered"] == "works"
    last = done.stdout.splitlines()[-1]
    assert last.startswith(("warning: ", "nothing to improve"))
    assert "warning" not in done.stderr
    assert all(facts.values())
    assert not list(tmp_path.glob(".flashd*"))
    gone = flashd(tmp_path, "doctor", "nowhere")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "no such directory" in gone.stderr
    (tmp_path / "file").write_bytes(b"x")
    file = flashd(tmp_path, "doctor", "file")
    assert (file.returncode, file.stdout) == (2, "")
    assert "is a file; give its directory" in file.stderr


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
    for fact in ("engine", "alignment"):
        assert "none may be written" in report.unknown[fact]
    assert "--measure does, and does not keep it" in report.unknown["curve"]
    assert not list(place.iterdir())
    shown = dict(doctor_rows(report))
    assert shown["read engine"].startswith("unknown: no file of 128 KiB")
    assert shown["registered buffers"] == shown["alignment"] == "unknown, as above"
    assert report.failed == [], "nothing was asked for that failed"
    # A file that is there is read instead.
    (place / "file").write_bytes(os.urandom(1 << 20))
    found = doctor(place, write=False)
    assert found.curve is None
    assert found.engine is not None
    assert found.probed_file == str(place / "file")
    assert (found.alignment is not None) == ("alignment" not in found.unknown)


def test_without_writing_a_curve_is_measured_and_shown_only(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "file").write_bytes(os.urandom(64 << 20))
    report = doctor(place, write=False, measure=True, curve_limit_s=0.4)
    assert report.curve is not None, report.unknown
    assert report.curve.not_kept == "--no-write"
    assert "not kept: --no-write" in dict(doctor_rows(report))["device curve"]
    assert "would be read over" in dict(doctor_rows(report))["device curve"]
    assert not any("not kept" in text for text in report.warnings), "that was the wish"
    assert [path.name for path in place.iterdir()] == ["file"]
    assert not (tmp_path / "cache").exists()


def test_a_measurement_that_was_asked_for_and_failed_is_a_failure(tmp_path: Path) -> None:
    done = flashd(tmp_path, "doctor", "--measure", "--no-write", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["failed"] == ["curve"]
    assert any(
        "could not be measured" in text and "none may be written" in text for text in report["warnings"]
    )


def test_killed_while_measuring_it_leaves_no_file(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = flashd_command("doctor", "place")
    with subprocess.Popen(command, env=flashd_env(tmp_path), cwd=tmp_path, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"measuring" in process.stderr.readline()
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s and process.poll() is None and not _reads(process.pid):
            time.sleep(0.01)
        assert process.poll() is None
        assert not list(place.iterdir()), "the temporary file has a name"
        process.kill()
    assert not list(place.iterdir())


def _reads(pid: int) -> bool:
    """Whether a process has a temporary file open."""
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any("(deleted)" in link and "place" in link for link in links)


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **more)

    monkeypatch.setattr("flashd.tools.doctor.os.open", refuse)
    report = doctor(tmp_path, curve_limit_s=0.2)
    assert report.engine is not None
    assert report.probed_file is None
    assert not list(tmp_path.glob(".flashd*"))
    # The current directory, where nobody asked for anything to be written.
    report = doctor(tmp_path, curve=False)
    assert report.engine is None
    assert "Operation not supported" in report.unknown["engine"]


def test_a_directory_that_cannot_be_written_fails_nothing() -> None:
    report = doctor(Path("/sys"))
    assert report.engine is None
    assert "give a bundle, or a directory" in report.unknown["engine"]
    assert "Errno" not in " ".join(report.unknown.values())
    assert report.unknown["curve"]
    assert report.failed == []
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
    assert report.failed == ["bundle"]
    done = flashd(tmp_path, "doctor", str(made.directory), "--no-write")
    assert done.returncode == 1
    assert done.stdout.count("ffn.bundle") == 1, "once, in the warning"


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


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        doctor(tmp_path / "nowhere")
