"""The read engines on real files: page cache, threads, io_uring; and the fake one."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flashd.disk import blocking
from flashd.disk.buffered import BufferedEngine
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadEngine
from flashd.disk.native_engine import open_native
from flashd.disk.probe import open_engine
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.testing.engine_suite import OpenFiles, ReadEngineTests, one_read, random_file
from flashd.testing.fake_engine import FakeEngine


class TestBuffered(ReadEngineTests):
    demand_first = False

    @pytest.fixture
    def open_files(self) -> OpenFiles:
        async def opened(paths: Sequence[Path]) -> ReadEngine:
            return BufferedEngine([str(path) for path in paths])

        return opened


class _Native(ReadEngineTests):
    name = "threads"
    alignment = 512

    @pytest.fixture
    def open_files(self) -> OpenFiles:
        async def opened(paths: Sequence[Path]) -> ReadEngine:
            return open_native(self.name, [str(path) for path in paths], self.alignment, "asked for")

        return opened


class TestThreads(_Native):
    pass


class TestThreads4096(_Native):
    alignment = 4096


class TestUring(_Native):
    name = "uring"


class TestUring4096(_Native):
    name = "uring"
    alignment = 4096


class TestUring64K(_Native):
    name = "uring"
    alignment = 65536


class TestFake(ReadEngineTests):
    """With its default manners, the fake is an engine like any other."""

    several_files = False

    @pytest.fixture
    def open_files(self) -> OpenFiles:
        async def opened(paths: Sequence[Path]) -> ReadEngine:
            try:
                content = np.fromfile(paths[0], np.uint8)
            except OSError as exc:
                raise DiskReadError(f"{paths[0]}: cannot be opened: {exc.strerror}") from exc
            return FakeEngine(content, latency_us=20 if len(content) > 4 << 20 else 0)

        return opened


@pytest.mark.parametrize("name", ["uring", "threads"])
async def test_aligned_reads_need_no_scratch(tmp_path: Path, name: str) -> None:
    content = random_file(tmp_path / "f", 1 << 20)
    engine = open_native(name, [str(tmp_path / "f")], 4096, "asked for")
    dest = aligned_empty(1 << 20)
    await engine.read(one_read(0, dest))
    assert engine.stats.scratch_reads == 0
    await engine.read(one_read(512, dest[:512]))
    assert engine.stats.scratch_reads == 1
    np.testing.assert_array_equal(dest[:512], content[512:1024])
    assert engine.stats.bytes_read == (1 << 20) + 4096
    await engine.close()


@pytest.mark.parametrize("name", ["uring", "threads", "buffered"])
async def test_a_device_error_names_file_and_offset(name: str) -> None:
    """Reading memory that is not mapped fails with EIO: a real one, twice."""
    path = "/proc/self/mem"
    engine: ReadEngine
    if name == "buffered":
        engine = BufferedEngine([path])
    else:
        engine = open_native(name, [path], 4096, "asked for", flags=0)
    with pytest.raises(
        DiskReadError, match=r"/proc/self/mem: reading \d+ bytes at offset 4096.*error"
    ) as caught:
        await engine.read(one_read(4096, aligned_empty(4096)))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    if name != "buffered":
        assert engine.stats.retried == 1
    await engine.close()


async def test_buffered_retries_eio_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random_file(tmp_path / "f", 100_000)
    engine = await open_engine(tmp_path / "f", "buffered")
    failures = [OSError(errno.EIO, "Input/output error")]
    real = os.preadv

    def flaky(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        if failures:
            raise failures.pop()
        return real(fd, buffers, offset)

    monkeypatch.setattr(blocking.os, "preadv", flaky)
    dest = aligned_empty(100_000)
    await engine.read(one_read(0, dest))
    np.testing.assert_array_equal(dest, content)
    assert engine.stats.retried == 1
    failures[:] = [OSError(errno.EIO, "Input/output error")] * 2
    with pytest.raises(DiskReadError, match="Input/output error"):
        await engine.read(one_read(0, aligned_empty(3000)))
    failures[:] = [OSError(errno.EINVAL, "Invalid argument")]
    with pytest.raises(DiskReadError, match="Invalid argument"):
        await engine.read(one_read(0, aligned_empty(3000)))
    await engine.read(one_read(0, dest))
    await engine.close()


async def test_buffered_continues_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may deliver less than was asked for, at any byte."""
    content = random_file(tmp_path / "f", 200_000)
    engine = await open_engine(tmp_path / "f", "buffered")
    rng = np.random.default_rng(0)
    real = os.preadv

    def short(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        return real(fd, (buffers[0][: int(rng.integers(1, 20_000))],), offset)

    monkeypatch.setattr(blocking.os, "preadv", short)
    for offset, length in [(0, 200_000), (512, 100_352), (3, 150_001)]:
        dest = aligned_empty(length)
        await engine.read(one_read(offset, dest))
        np.testing.assert_array_equal(dest, content[offset : offset + length])
    assert engine.stats.continued > 10
    with pytest.raises(BundleCorruptError, match="ends at byte 200000"):
        await engine.read(one_read(0, aligned_empty(200_001)))
    await engine.close()


@pytest.mark.parametrize("name", ["uring", "threads", "buffered"])
def test_a_loop_that_ends_with_reads_in_flight(tmp_path: Path, name: str) -> None:
    """Nobody closed the engine: no hang, no exception in a thread, no write into freed memory."""
    random_file(tmp_path / "f", 8 << 20)

    async def leave() -> None:
        engine = await open_engine(tmp_path / "f", name)
        task = asyncio.create_task(engine.read(one_read(0, aligned_empty(8 << 20))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task

    asyncio.run(leave())
