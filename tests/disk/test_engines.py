"""The read engines on real files, page cache and O_DIRECT, aligned and not."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from flashd.disk import pieces
from flashd.disk.buffered import BufferedEngine
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.threads import ThreadsEngine
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.types import U8Array

Opener = Callable[[Path], Awaitable[ReadEngine]]

SIZES = [3 * 4096 + d for d in (-513, -512, -511, -1, 0, 1, 511, 512, 513)]


async def _buffered(path: Path) -> ReadEngine:
    return await BufferedEngine.open(str(path))


async def _direct(path: Path, alignment: int = 512) -> ReadEngine:
    return ThreadsEngine(str(path), alignment, n_threads=4)


async def _direct_4096(path: Path) -> ReadEngine:
    return await _direct(path, 4096)


@pytest.fixture(params=[_buffered, _direct, _direct_4096], ids=["buffered", "direct", "direct4096"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opener]:
    engines: list[ReadEngine] = []

    async def opener(path: Path) -> ReadEngine:
        engines.append(await request.param(path))
        return engines[-1]

    yield opener
    for engine in engines:
        await engine.close()


def random_file(path: Path, nbytes: int, seed: int = 0) -> U8Array:
    content = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    path.write_bytes(content.tobytes())
    return content


def one_read(offset: int, dest: U8Array) -> ReadBatch:
    return ReadBatch(np.array([offset]), np.array([len(dest)]), dest, np.array([0]))


@pytest.mark.parametrize("size", SIZES)
async def test_odd_sizes_to_the_last_byte(opened: Opener, tmp_path: Path, size: int) -> None:
    content = random_file(tmp_path / "f", size)
    engine = await opened(tmp_path / "f")
    for offset in (0, 1, 511, 512, 4096, size - 513, size - 1, size):
        dest = aligned_empty(size - offset)
        await engine.read(one_read(offset, dest))
        np.testing.assert_array_equal(dest, content[offset:])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beyond", [1, 512, 5000])
async def test_end_of_file_is_an_error(opened: Opener, tmp_path: Path, size: int, beyond: int) -> None:
    random_file(tmp_path / "f", size)
    engine = await opened(tmp_path / "f")
    for offset in (0, 512, size, size + 4096):
        with pytest.raises(BundleCorruptError, match=rf"f: ends at byte {size},.*convert"):
            await engine.read(one_read(offset, aligned_empty(max(size, offset) + beyond - offset)))


async def test_random_batches(opened: Opener, tmp_path: Path) -> None:
    """Reads of every size land where they should, and nowhere else."""
    content = random_file(tmp_path / "f", 5 << 20)
    engine = await opened(tmp_path / "f")
    rng = np.random.default_rng(1)
    for round_ in range(30):
        grain = (1, 512, 4096)[round_ % 3]
        n = int(rng.integers(0, 60))
        length = rng.integers(0, (30_000, 2 << 20)[round_ % 10 == 0], n) // grain * grain
        offset = rng.integers(0, len(content) - length + 1) // grain * grain
        gap = rng.integers(0, 3, n) * max(grain, 7)
        at = np.cumsum(length + gap) - length
        dest = aligned_empty(int((length + gap).sum()) + 5)
        dest[:] = 0xA5
        expected = dest.copy()
        for start, count, to in zip(offset, length, at, strict=True):
            expected[to : to + count] = content[start : start + count]
        await engine.read(ReadBatch(offset, length, dest, at))
        np.testing.assert_array_equal(dest, expected)


async def test_batches_at_the_same_time(opened: Opener, tmp_path: Path) -> None:
    content = random_file(tmp_path / "f", 4 << 20)
    engine = await opened(tmp_path / "f")
    offsets = [i * 37 * 512 for i in range(100)]
    dests = [aligned_empty(100_000 + i) for i in range(100)]
    await asyncio.gather(*(engine.read(one_read(o, d)) for o, d in zip(offsets, dests, strict=True)))
    for offset, dest in zip(offsets, dests, strict=True):
        np.testing.assert_array_equal(dest, content[offset : offset + len(dest)])


async def test_aligned_reads_need_no_scratch(tmp_path: Path) -> None:
    content = random_file(tmp_path / "f", 1 << 20)
    engine = await _direct_4096(tmp_path / "f")
    dest = aligned_empty(1 << 20)
    await engine.read(one_read(0, dest))
    assert engine.scratch_reads == 0
    await engine.read(one_read(512, dest[:512]))
    assert engine.scratch_reads == 1
    np.testing.assert_array_equal(dest[:512], content[512:1024])
    await engine.close()


async def test_cancelled_read_keeps_its_destination_alive(opened: Opener, tmp_path: Path) -> None:
    content = random_file(tmp_path / "f", 8 << 20)
    engine = await opened(tmp_path / "f")
    dest = aligned_empty(8 << 20)
    alive = weakref.ref(dest)
    task = asyncio.create_task(engine.read(one_read(0, dest)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive() is not None
    await engine.close()
    # What was read is right, what was dropped is untouched.
    for start in range(0, 8 << 20, pieces.PIECE_BYTES):
        part = dest[start : start + pieces.PIECE_BYTES]
        assert not part.any() or (part == content[start : start + pieces.PIECE_BYTES]).all()
    del dest, part, task
    gc.collect()
    assert alive() is None


async def test_close_waits_and_frees_everything(opened: Opener, tmp_path: Path) -> None:
    content = random_file(tmp_path / "f", 8 << 20)
    before = len(os.listdir("/proc/self/fd"))
    engine = await opened(tmp_path / "f")
    dests = [aligned_empty(8 << 20) for _ in range(3)]
    tasks = [asyncio.create_task(engine.read(one_read(0, dest))) for dest in dests]
    await asyncio.sleep(0)
    await asyncio.gather(engine.close(), engine.close())
    await engine.close()
    await asyncio.gather(*tasks)
    for dest in dests:
        np.testing.assert_array_equal(dest, content)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="closed"):
        await engine.read(one_read(0, dests[0]))


async def test_missing_file(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(DiskReadError, match=r"nothing: cannot be opened.*No such file"):
        await opened(tmp_path / "nothing")


async def test_a_device_error_names_file_and_offset() -> None:
    """Reading memory that is not mapped fails with EIO: a real one, twice."""
    engine = await BufferedEngine.open("/proc/self/mem")
    with pytest.raises(DiskReadError, match=r"/proc/self/mem: reading 100 bytes at offset 4096.*error"):
        await engine.read(one_read(4096, aligned_empty(100)))
    await engine.close()


async def test_eio_is_retried_once(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random_file(tmp_path / "f", 100_000)
    engine = await opened(tmp_path / "f")
    failures = [OSError(errno.EIO, "Input/output error")]
    real = os.preadv

    def flaky(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        if failures:
            raise failures.pop()
        return real(fd, buffers, offset)

    monkeypatch.setattr(pieces.os, "preadv", flaky)
    dest = aligned_empty(100_000)
    await engine.read(one_read(0, dest))
    np.testing.assert_array_equal(dest, content)
    failures[:] = [OSError(errno.EIO, "Input/output error")] * 2
    with pytest.raises(DiskReadError, match="Input/output error"):
        await engine.read(one_read(0, aligned_empty(3000)))
    failures[:] = [OSError(errno.EINVAL, "Invalid argument")]
    with pytest.raises(DiskReadError, match="Invalid argument"):
        await engine.read(one_read(0, aligned_empty(3000)))
    await engine.read(one_read(0, dest))


async def test_short_reads_are_continued(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may deliver less than was asked for, at any byte."""
    content = random_file(tmp_path / "f", 200_000)
    engine = await opened(tmp_path / "f")
    rng = np.random.default_rng(0)
    real = os.preadv

    def short(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        # More than an alignment at a time: less could never move an O_DIRECT read on.
        return min(got, int(rng.integers(4097, 20_000)))

    monkeypatch.setattr(pieces.os, "preadv", short)
    for offset, length in [(0, 200_000), (512, 100_352), (3, 150_001)]:
        dest = aligned_empty(length)
        await engine.read(one_read(offset, dest))
        np.testing.assert_array_equal(dest, content[offset : offset + length])
    with pytest.raises(BundleCorruptError, match="ends at byte 200000"):
        await engine.read(one_read(0, aligned_empty(200_001)))


def test_a_loop_that_ends_with_reads_in_flight(tmp_path: Path) -> None:
    """Nobody closed the engine: no hang, no exception in a thread."""
    random_file(tmp_path / "f", 8 << 20)

    async def leave() -> None:
        engine = await _direct(tmp_path / "f")
        task = asyncio.create_task(engine.read(one_read(0, aligned_empty(8 << 20))))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task

    asyncio.run(leave())
