"""The device curve: measured on real files, kept, and ignored when it is not what it should be."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.config import cache_dir
from flashd.disk import measure
from flashd.disk.buffered import BufferedEngine
from flashd.disk.curve import MIN_FILE_BYTES, CurvePoint, DeviceCurve, load_curve
from flashd.disk.device import device_identity
from flashd.disk.engine import ReadBatch
from flashd.disk.measure import DEPTHS, SIZES_BYTES, measure_curve
from flashd.disk.probe import open_engine
from flashd.errors import BundleCorruptError, ConfigError, DiskReadError


def random_file(path: Path, nbytes: int) -> Path:
    block = np.random.default_rng(0).bytes(min(nbytes, 1 << 20))
    with path.open("wb") as file:
        for start in range(0, nbytes, len(block) or 1):
            file.write(block[: nbytes - start])
        file.flush()
        os.fsync(file.fileno())  # space is allotted late: before that the file has holes
    return path


def curve_of(path: Path, **changes: Any) -> DeviceCurve:
    """A curve of the device that holds ``path``: 20 us and 0.4 ns a byte, which is 50 000 bytes."""
    points = tuple(
        CurvePoint(size, depth, size / (20e-6 + 0.4e-9 * size) / 1e9 * depth / 128, 1.5)
        for depth in (1, 128)
        for size in SIZES_BYTES
    )
    curve = DeviceCurve(points, "uring", True, "6.1", device_identity(path), int(time.time()), MIN_FILE_BYTES)
    return replace(curve, **changes)


class Recording(BufferedEngine):
    """A real engine that remembers what it was asked for."""

    opened: list[Recording]

    def __init__(self, path: str, depth: int) -> None:
        super().__init__([path], "asked for", depth)
        self.batches: list[ReadBatch] = []
        self.most_outstanding = self.outstanding = 0
        Recording.opened.append(self)

    async def read(self, batch: ReadBatch, *, prefetch: bool = False) -> None:
        self.batches.append(batch)
        self.outstanding += 1
        self.most_outstanding = max(self.outstanding, self.most_outstanding)
        try:
            await super().read(batch, prefetch=prefetch)
        finally:
            self.outstanding -= 1


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    async def opener(path: Path, backend: str, *, depth: int) -> Recording:
        return Recording(str(path), depth)

    Recording.opened = []
    monkeypatch.setattr(measure, "open_engine", opener)
    return Recording


async def test_a_measured_device(tmp_path: Path) -> None:
    path = random_file(tmp_path / "file", 16 << 20)
    sizes, depths = (4096, 65536, 1 << 20), (8, 1)
    curve = await measure_curve(path, sizes_bytes=sizes, depths=depths, limit_s=60, point_limit_s=0.05)
    engine = await open_engine(path)
    await engine.close()
    assert (curve.engine, curve.direct) == (engine.name, engine.direct)
    assert (curve.kernel, curve.device) == (os.uname().release, device_identity(path))
    assert curve.file_bytes == 16 << 20
    assert abs(curve.measured_unix_s - time.time()) < 60
    assert [(point.size_bytes, point.depth) for point in curve.points] == [
        (s, d) for d in depths for s in sizes
    ]
    for point in curve.points:
        assert point.gb_per_s > 0
        busy_us = point.depth * point.size_bytes / point.gb_per_s / 1e3
        assert point.latency_us == pytest.approx(busy_us)
    assert 0 <= curve.break_even_bytes() <= 1 << 20
    assert list(curve.fastest()) == list(sizes)
    assert "too small to stand for the device" in curve.save(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


async def test_reads_are_random_whole_and_two_batches_at_once(
    tmp_path: Path, recording: type[Recording]
) -> None:
    path = random_file(tmp_path / "file", 4 << 20)
    curve = await measure_curve(
        path, sizes_bytes=(4096, 32768), depths=(4, 2), limit_s=60, point_limit_s=0.15
    )
    assert [engine.depth for engine in recording.opened] == [4, 2]
    for engine in recording.opened:
        assert engine.most_outstanding == 2
        for size in (4096, 32768):
            batches = [batch for batch in engine.batches if batch.length_bytes[0] == size]
            offset = np.concatenate([batch.offset_bytes for batch in batches])
            assert all((batch.length_bytes == size).all() for batch in batches)
            assert not (offset % 4096).any()
            assert 0 <= offset.min() <= offset.max() <= (4 << 20) - size
            assert len(np.unique(offset)) > 0.5 * min(len(offset), (4 << 20) // 4096)
            assert (np.diff(offset) < 0).any()
        with pytest.raises(ValueError, match="closed"):
            await engine.read(engine.batches[0])
    # The whole file once, before anything is measured.
    warmed = recording.opened[0].batches[0]
    assert warmed.offset_bytes.tolist() == [0, 1 << 20, 2 << 20, 3 << 20]
    assert warmed.nbytes == 4 << 20
    assert len(curve.points) == 4


async def test_a_large_file_is_read_in_parts_all_over(
    tmp_path: Path, recording: type[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_PARTS", 4)
    monkeypatch.setattr(measure, "_PART_BYTES", 256 << 10)
    path = random_file(tmp_path / "file", (4 << 20) + 100)
    await measure_curve(path, sizes_bytes=(4096,), depths=(4,), limit_s=60, point_limit_s=0.1)
    offset = np.concatenate([batch.offset_bytes for batch in recording.opened[0].batches])
    assert set((offset // (1 << 20)).tolist()) == {0, 1, 2, 3}
    assert int((offset % (1 << 20)).max()) <= (256 << 10) - 4096


async def test_sizes_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    curve = await measure_curve(
        random_file(tmp_path / "file", 50_000), depths=(2,), limit_s=60, point_limit_s=0.02
    )
    assert [point.size_bytes for point in curve.points] == [4096, 8192, 16384, 32768]


async def test_no_time_left(tmp_path: Path) -> None:
    curve = await measure_curve(random_file(tmp_path / "file", 1 << 20), limit_s=0)
    assert [(point.size_bytes, point.depth) for point in curve.points] == [(4096, DEPTHS[0])]
    assert curve.break_even_bytes() == 0


async def test_files_that_say_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="12288 bytes, too small"):
        await measure_curve(random_file(tmp_path / "small", 3 * 4096))
    with pytest.raises(ConfigError, match="too small"):
        await measure_curve(random_file(tmp_path / "empty", 0))
    (tmp_path / "holes").touch()
    os.truncate(tmp_path / "holes", 1 << 20)
    with pytest.raises(ConfigError, match="0 of 1048576 bytes are on the device"):
        await measure_curve(tmp_path / "holes")
    with pytest.raises(DiskReadError, match="none"):
        await measure_curve(tmp_path / "none")


async def test_a_file_that_is_truncated_meanwhile(
    tmp_path: Path, recording: type[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = random_file(tmp_path / "file", 4 << 20)

    class Truncating(Recording):
        async def read(self, batch: ReadBatch, *, prefetch: bool = False) -> None:
            await super().read(batch, prefetch=prefetch)
            if len(self.batches) > 2:
                os.truncate(path, 4096)

    async def opener(path: Path, backend: str, *, depth: int) -> Recording:
        return Truncating(str(path), depth)

    monkeypatch.setattr(measure, "open_engine", opener)
    with pytest.raises(BundleCorruptError, match="ends at byte 4096"):
        await measure_curve(path, sizes_bytes=(65536,), depths=(4,), limit_s=60)
    assert recording.opened[0].outstanding == 0


def test_break_even_goes_by_the_busy_device(tmp_path: Path) -> None:
    curve = curve_of(tmp_path)
    assert curve.break_even_bytes() == pytest.approx(50_000, abs=1)
    assert {point.depth for point in curve.fastest().values()} == {128}
    assert replace(curve, direct=False).break_even_bytes() == 0
    assert replace(curve, points=()).break_even_bytes() == 0


def test_kept_and_loaded(tmp_path: Path) -> None:
    curve = curve_of(tmp_path)
    cache = tmp_path / "made" / "flashd"
    assert curve.save(cache) == ""
    assert cache.stat().st_mode & 0o777 == 0o700
    assert load_curve(tmp_path, directory=cache) == curve
    newer = replace(curve, kernel="7.0")
    assert newer.save(cache) == ""
    assert load_curve(tmp_path, "uring", cache) == newer
    assert len(os.listdir(cache)) == 1


def test_one_curve_for_each_engine(tmp_path: Path) -> None:
    threads, buffered = (curve_of(tmp_path, engine=name) for name in ("threads", "buffered"))
    assert buffered.save(tmp_path) == threads.save(tmp_path) == ""
    assert load_curve(tmp_path, "uring", tmp_path) is None
    assert load_curve(tmp_path, "buffered", tmp_path) == buffered
    assert load_curve(tmp_path, directory=tmp_path) == threads


def test_another_device(tmp_path: Path) -> None:
    other = curve_of(tmp_path, device="wwid eui.77")
    assert other.save(tmp_path) == ""
    assert load_curve(tmp_path, directory=tmp_path) is None
    # Its file under this device's name, as after a copy of the cache directory.
    os.rename(only_file(tmp_path), kept(tmp_path))
    assert load_curve(tmp_path, directory=tmp_path) is None
    assert load_curve(tmp_path / "none", directory=tmp_path) is None


def only_file(directory: Path) -> Path:
    (path,) = (path for path in directory.iterdir() if path.suffix == ".json")
    return path


def kept(directory: Path) -> Path:
    """Save a curve of this device beside ``directory``; where it would be in ``directory``."""
    aside = directory / "aside"
    assert curve_of(directory).save(aside) == ""
    return directory / only_file(aside).name


def changed(**changes: Any) -> Callable[[Path], Any]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def first_point(**changes: Any) -> Callable[[Path], Any]:
    def damage(path: Path) -> None:
        values = json.loads(path.read_text())
        values["points"][0].update(changes)
        path.write_text(json.dumps(values))

    return damage


DAMAGE: list[Callable[[Path], Any]] = [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes()[:200]),
    lambda path: path.write_bytes(bytes(500)),
    lambda path: path.write_bytes(b"\xff" * 500),
    lambda path: path.write_text("[" * 100_000),
    lambda path: path.write_text("[1, 2]"),
    lambda path: path.write_text(path.read_text() + " " * (1 << 20)),
    lambda path: (path.unlink(), os.mkfifo(path)),
    lambda path: (path.unlink(), path.mkdir()),
    lambda path: (path.unlink(), path.symlink_to(path)),
    changed(format="other"),
    changed(format_version=2),
    changed(engine="threads"),
    changed(engine=None),
    changed(direct=1),
    changed(device="another"),
    changed(kernel=6),
    changed(measured_unix_s=1.5),
    changed(file_bytes=True),
    changed(points=[]),
    changed(points={}),
    changed(points=[1]),
    changed(points=None),
    first_point(size_bytes=0),
    first_point(size_bytes="4096"),
    first_point(size_bytes=10**400),
    first_point(depth=-1),
    first_point(gb_per_s=0),
    first_point(gb_per_s=float("nan")),
    first_point(gb_per_s=float("inf")),
    first_point(gb_per_s=5e-324),
    first_point(gb_per_s=10**400),
    first_point(latency_us=None),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_means_not_measured(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    assert curve_of(tmp_path).save(tmp_path) == ""
    damage(only_file(tmp_path))
    assert load_curve(tmp_path, directory=tmp_path) is None


def test_whatever_loads_has_a_break_even(tmp_path: Path) -> None:
    """Numbers at the ends of what is accepted do not make the daemon fail."""
    assert curve_of(tmp_path).save(tmp_path) == ""
    for value in (1e-11, 1e18):
        first_point(gb_per_s=value, size_bytes=(1 << 62) - 1)(only_file(tmp_path))
        loaded = load_curve(tmp_path, directory=tmp_path)
        assert loaded is not None
        assert loaded.break_even_bytes() >= 0


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    curve = curve_of(tmp_path)
    for directory in (tmp_path / "file" / "flashd", Path("/proc/flashd")):
        assert "cannot be written" in curve.save(directory)
        assert load_curve(tmp_path, directory=directory) is None


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.mkdir()
    assert "cannot be written" in curve_of(tmp_path).save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(["aside", path.name])


def test_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "flashd"
    curve = curve_of(tmp_path)
    assert curve.save() == ""
    assert only_file(tmp_path / "flashd").parent == cache_dir()
    assert load_curve(tmp_path) == curve
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative"):
        assert cache_dir({"XDG_CACHE_HOME": unusable}) == tmp_path / "home" / ".cache" / "flashd"


@pytest.mark.parametrize(("sizes", "depths", "good"), [(64, 16, True), (65, 1, False), (8, 129, False)])
def test_more_points_than_anyone_measures(tmp_path: Path, sizes: int, depths: int, good: bool) -> None:
    points = tuple(
        CurvePoint(4096 * (size + 1), depth + 1, 1.0, 1.0) for size in range(sizes) for depth in range(depths)
    )
    assert curve_of(tmp_path, points=points).save(tmp_path) == ""
    assert (load_curve(tmp_path, directory=tmp_path) is not None) == good
