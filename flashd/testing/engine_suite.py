"""Conformance suite of read engines. An engine passes it by defining one fixture::

    class TestMyEngine(ReadEngineTests):
        @pytest.fixture
        def open_files(self) -> OpenFiles:
            async def opened(paths: Sequence[Path]) -> ReadEngine:
                return MyEngine([str(path) for path in paths])

            return opened

Needs pytest with ``asyncio_mode = auto``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import SKIP, ReadBatch, ReadEngine, RowBatch
from flashd.disk.files import MAX_OPEN_FILES
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.types import I64Array, U8Array

OpenFiles = Callable[[Sequence[Path]], Awaitable[ReadEngine]]
Opener = Callable[..., Awaitable[ReadEngine]]

ODD_SIZES = [3 * 4096 + d for d in (-513, -512, -511, -1, 0, 1, 511, 512, 513)]
N_FILES = MAX_OPEN_FILES + 88
_GUARD = 0xA5


def random_file(path: Path, nbytes: int, seed: int = 0) -> U8Array:
    """Write random bytes; returns them."""
    content = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    path.write_bytes(content.tobytes())
    return content


def one_read(offset: int, dest: U8Array, file: int = 0) -> ReadBatch:
    """A batch of a single read that fills ``dest``."""
    return ReadBatch(
        np.array([offset]), np.array([len(dest)]), dest, np.array([0]), None, np.array([file], np.int64)
    )


def random_batch(
    rng: np.random.Generator, content: U8Array, grain: int, n: int, longest: int
) -> tuple[ReadBatch, U8Array]:
    """Reads of every kind: several places each, some skipped, some empty, gaps between them.

    Args:
        rng: randomness.
        content: the file.
        grain: what offsets, lengths and addresses are multiples of.
        n: reads.
        longest: bytes of a place, at most.

    Returns:
        The batch, and what its destination must hold afterwards.
    """
    places = rng.integers(1, 5, n) * (rng.random(n) < 0.5) + 1
    first = np.cumsum(places) - places
    m = int(places.sum())
    length = rng.integers(0, longest, m) // grain * grain
    total = np.add.reduceat(length, first) if n else np.zeros(0, np.int64)
    while (total > len(content)).any():
        length //= 2 * grain
        length *= grain
        total = np.add.reduceat(length, first)
    offset = rng.integers(0, len(content) - total + 1) // grain * grain
    gap = rng.integers(0, 3, m) * (grain if grain > 1 else 7)
    at = np.cumsum(length + gap) - length
    dest = aligned_empty(int((length + gap).sum()) + 64, 4096)
    dest[:] = _GUARD
    expected = dest.copy()
    skipped = rng.random(m) < 0.2
    read = np.repeat(np.arange(n), places)
    before = np.cumsum(length) - length
    source = offset[read] + before - before[first][read] if n else np.zeros(0, np.int64)
    for start, count, to, skip in zip(source, length, at, skipped, strict=True):
        if not skip:
            expected[to : to + count] = content[start : start + count]
    at[skipped] = SKIP
    return ReadBatch(offset, length, dest, at, first.astype(np.int64)), expected


class ReadEngineTests:
    """What every engine does alike; ``open_files`` is the fixture to define."""

    # Engines of one file, or whose queue has no order, say so.
    several_files = True
    demand_first = True

    @pytest.fixture
    def open_files(self) -> OpenFiles:
        """Opens files with the engine under test."""
        raise NotImplementedError("define a fixture `open_files`")

    @pytest.fixture
    async def opened(self, open_files: OpenFiles) -> AsyncIterator[Opener]:
        """Opens files; closes the engines at the end."""
        engines: list[ReadEngine] = []

        async def opener(*paths: Path) -> ReadEngine:
            engines.append(await open_files(paths))
            return engines[-1]

        yield opener
        for engine in engines:
            await engine.close()

    @pytest.mark.parametrize("gap", [0, 1, 5])
    async def test_rows(self, opened: Opener, tmp_path: Path, gap: int) -> None:
        """Scattered rows land where they belong, and are read as ``layout.coalesce`` plans it."""
        content = random_file(tmp_path / "f", 4096 + 300 * 4096)
        rows_of_file = content[4096:].reshape(300, 4096)
        engine = await opened(tmp_path / "f")
        rng = np.random.default_rng(gap)
        for count in (1, 2, 60, 250, 300):
            for run in (1, 7, 64):
                ids = rng.integers(0, 300, count)
                if run == 7:
                    ids = np.sort(rng.permutation(300)[:count])
                dest = aligned_empty(400 * 4096).reshape(400, 4096)
                dest[:] = _GUARD
                rows = np.arange(count) + 50 if run == 64 else rng.permutation(400)[:count]
                batch, before = RowBatch(4096, ids, rows, dest, gap, run), engine.stats
                await engine.read_rows(batch)
                np.testing.assert_array_equal(dest[rows], rows_of_file[ids])
                assert (np.delete(dest, rows, axis=0) == _GUARD).all()
                after, plan = engine.stats, batch.plan()
                assert after.reads - before.reads - (after.continued - before.continued) >= 1
                if engine.direct and engine.name != "fake":  # else places are read one by one, or come short
                    assert after.reads - before.reads == len(plan.offset_bytes)
                    assert after.bytes_read - before.bytes_read == plan.nbytes

    async def test_rows_that_do_not_exist(self, opened: Opener, tmp_path: Path) -> None:
        """Nothing is read into or from elsewhere."""
        random_file(tmp_path / "f", 16 * 4096)
        engine = await opened(tmp_path / "f")
        dest = aligned_empty(8 * 4096).reshape(8, 4096)
        dest[:] = _GUARD
        for ids, rows in (([-1], [0]), ([0, 1], [3, 8]), ([2], [-1]), ([1, 2], [0])):
            wrong = RowBatch(0, np.array(ids, np.int64), np.array(rows, np.int64), dest, 0, 64)
            with pytest.raises(ValueError, match=r"\w"):
                await engine.read_rows(wrong)
        with pytest.raises(BundleCorruptError):
            await engine.read_rows(RowBatch(0, np.array([3, 40]), np.array([0, 1]), dest[:2], 0, 64))
        assert (dest[2:] == _GUARD).all()

    async def test_facts(self, opened: Opener, tmp_path: Path) -> None:
        """What doctor and logs show of an engine."""
        random_file(tmp_path / "f", 5000)
        engine = await opened(tmp_path / "f")
        assert engine.name
        assert engine.reason
        assert engine.depth >= 1
        assert engine.alignment_bytes & (engine.alignment_bytes - 1) == 0
        assert engine.stats.bytes_read >= 0

    @pytest.mark.parametrize("size", ODD_SIZES)
    async def test_odd_sizes_to_the_last_byte(self, opened: Opener, tmp_path: Path, size: int) -> None:
        """Files that end anywhere in a block."""
        content = random_file(tmp_path / "f", size)
        engine = await opened(tmp_path / "f")
        for offset in (0, 1, 511, 512, 4096, size - 513, size - 1, size):
            dest = aligned_empty(size - offset)
            await engine.read(one_read(offset, dest))
            np.testing.assert_array_equal(dest, content[offset:])

    @pytest.mark.parametrize("size", ODD_SIZES)
    @pytest.mark.parametrize("beyond", [1, 512, 5000])
    async def test_end_of_file_is_an_error(
        self, opened: Opener, tmp_path: Path, size: int, beyond: int
    ) -> None:
        """A truncated file is named, whatever else was read."""
        random_file(tmp_path / "f", size)
        engine = await opened(tmp_path / "f")
        for offset in (0, 512, size, size + 4096):
            with pytest.raises(BundleCorruptError, match=r"ends at byte \d+, expected \d+.*convert"):
                await engine.read(one_read(offset, aligned_empty(max(size, offset) + beyond - offset)))

    @pytest.mark.parametrize("grain", [1, 512, 4096])
    async def test_random_batches(self, opened: Opener, tmp_path: Path, grain: int) -> None:
        """Reads of every size land where they should, and nowhere else."""
        content = random_file(tmp_path / "f", 3 << 20)
        engine = await opened(tmp_path / "f")
        rng = np.random.default_rng(grain)
        for round_ in range(12):
            longest = (30_000, 1 << 20)[round_ % 6 == 5]
            batch, expected = random_batch(rng, content, grain, int(rng.integers(0, 30)), longest)
            await engine.read(batch, prefetch=round_ % 2 == 0)
            np.testing.assert_array_equal(batch.dest, expected)

    async def test_as_many_places_as_are_allowed(self, opened: Opener, tmp_path: Path) -> None:
        """One read into 1024 rows, every other one skipped."""
        content = random_file(tmp_path / "f", 1024 * 512)
        engine = await opened(tmp_path / "f")
        dest = aligned_empty(1024 * 512, 4096)
        at = np.where(np.arange(1024) % 2, SKIP, np.arange(1024)[::-1] * 512)
        await engine.read(ReadBatch(np.array([0]), np.full(1024, 512), dest, at, np.array([0])))
        rows, file_rows = dest.reshape(1024, 512), content.reshape(1024, 512)
        np.testing.assert_array_equal(rows[1::2], file_rows[::-1][1::2])
        assert not rows[::2].any()

    async def test_a_gap_longer_than_any_buffer(self, opened: Opener, tmp_path: Path) -> None:
        """Skipped bytes are thrown away, however many."""
        content = random_file(tmp_path / "f", 3 << 20)
        engine = await opened(tmp_path / "f")
        dest = aligned_empty(8192, 4096)
        length = np.array([4096, (3 << 20) - 8192, 4096])
        await engine.read(ReadBatch(np.array([0]), length, dest, np.array([0, SKIP, 4096]), np.array([0])))
        np.testing.assert_array_equal(dest, np.concatenate((content[:4096], content[-4096:])))

    async def test_batches_at_the_same_time(self, opened: Opener, tmp_path: Path) -> None:
        """A hundred at once, overlapping in the file."""
        content = random_file(tmp_path / "f", 4 << 20)
        engine = await opened(tmp_path / "f")
        offsets = [i * 37 * 512 for i in range(100)]
        dests = [aligned_empty(100_000 + i) for i in range(100)]
        await asyncio.gather(*(engine.read(one_read(o, d)) for o, d in zip(offsets, dests, strict=True)))
        for offset, dest in zip(offsets, dests, strict=True):
            np.testing.assert_array_equal(dest, content[offset : offset + len(dest)])

    async def test_more_files_than_are_kept_open(self, opened: Opener, tmp_path: Path) -> None:
        """A batch names its files by index; descriptors are opened as needed."""
        if not self.several_files:
            return
        paths = [tmp_path / f"f{i}" for i in range(N_FILES)]
        contents = [random_file(path, 700 + i, seed=i) for i, path in enumerate(paths)]
        before = len(os.listdir("/proc/self/fd"))
        engine = await opened(*paths)
        order = np.random.default_rng(0).permutation(N_FILES).astype(np.int64)

        async def some(files: I64Array) -> None:
            n = len(files)
            dest = aligned_empty(n * 512)
            ends = np.arange(n) * 512
            await engine.read(ReadBatch(np.full(n, 100), np.full(n, 512), dest, ends, None, files))
            for i, row in zip(files.tolist(), dest.reshape(n, 512), strict=True):
                np.testing.assert_array_equal(row, contents[i][100:612])

        await asyncio.gather(*(some(files) for files in np.array_split(order, 30)))
        await some(np.array([N_FILES - 1, 0, N_FILES - 1, 0]))
        # Twenty files a batch, thirty batches at once: more than are kept, but not for long.
        await some(order[:200])
        assert len(os.listdir("/proc/self/fd")) - before < MAX_OPEN_FILES + 20
        with pytest.raises(ValueError, match=f"file {N_FILES} of {N_FILES}"):
            await some(np.array([N_FILES]))
        await engine.close()
        assert len(os.listdir("/proc/self/fd")) <= before

    async def test_demand_goes_first(self, opened: Opener, tmp_path: Path) -> None:
        """A read that is needed now overtakes a prefetch that was submitted earlier."""
        if not self.demand_first:
            return
        content = random_file(tmp_path / "f", 4 << 20)
        engine = await opened(tmp_path / "f")
        n = 4000
        offset = np.random.default_rng(0).integers(0, 1023, n) * 4096
        ahead = aligned_empty(n * 4096)
        early = asyncio.create_task(
            engine.read(
                ReadBatch(offset, np.full(n, 4096), ahead, np.arange(n) * 4096),
                prefetch=True,
            )
        )
        await asyncio.sleep(0)
        dest = aligned_empty(4096)
        await engine.read(one_read(4096, dest))
        assert not early.done()
        np.testing.assert_array_equal(dest, content[4096:8192])
        await early
        np.testing.assert_array_equal(ahead.reshape(n, 4096), content.reshape(-1, 4096)[offset // 4096])

    async def test_cancelled_read_keeps_its_destination_alive(self, opened: Opener, tmp_path: Path) -> None:
        """What was read is right, what was dropped is untouched; memory is free in the end."""
        content = random_file(tmp_path / "f", 8 << 20)
        engine = await opened(tmp_path / "f")
        for yields in range(4):
            dest = aligned_empty(8 << 20)
            alive = weakref.ref(dest)
            n = 8 << 8
            at = np.arange(n) * 4096
            task = asyncio.create_task(engine.read(ReadBatch(at, np.full(n, 4096), dest, at)))
            for _ in range(yields):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.read(one_read(0, aligned_empty(4096)))
            rows = dest.reshape(n, 4096)
            touched = rows.any(1)
            np.testing.assert_array_equal(rows[touched], content.reshape(n, 4096)[touched])
            del dest, rows, task
            await _until_gone(alive)

    async def test_close_waits_and_frees_everything(self, opened: Opener, tmp_path: Path) -> None:
        """Reads that were started end well, later ones are refused, closing again is fine."""
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

    async def test_a_failed_batch_spoils_no_other(self, opened: Opener, tmp_path: Path) -> None:
        """One reads behind the end, the others go on."""
        content = random_file(tmp_path / "f", 1 << 20)
        engine = await opened(tmp_path / "f")
        good = [aligned_empty(1 << 20) for _ in range(4)]
        bad = [engine.read(one_read((1 << 20) - 4096, aligned_empty(8192))) for _ in range(4)]
        results = await asyncio.gather(
            *(engine.read(one_read(0, dest)) for dest in good), *bad, return_exceptions=True
        )
        assert results[:4] == [None] * 4
        assert all(isinstance(result, BundleCorruptError) for result in results[4:])
        for dest in good:
            np.testing.assert_array_equal(dest, content)

    async def test_missing_file(self, opened: Opener, tmp_path: Path) -> None:
        """Named, with the reason."""
        with pytest.raises(DiskReadError, match=r"nothing: cannot be opened.*No such file"):
            await opened(tmp_path / "nothing")


async def _until_gone(alive: weakref.ref[U8Array]) -> None:
    for _ in range(1000):
        gc.collect(0)
        if alive() is None:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the destination of a cancelled read is still alive")
