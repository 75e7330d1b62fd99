"""A hundred thousand reads from a device that comes late, short, in any order, or not at all."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.testing.engine_suite import one_read, random_batch
from flashd.testing.fake_engine import FakeEngine
from flashd.types import U8Array

GUARD = 0xA5
PAGES = 40
ENDS = [-513, -512, -511, -1, 0, 1, 511, 512, 513]
# Rows of 700 bytes go through scratch, those of 1024 and 4096 straight into place.
ROWS = (700, 1024, 4096)


def content_of(size: int) -> U8Array:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("end", ENDS)
async def test_every_byte_right_or_a_named_error(end: int, row: int) -> None:
    """4000 reads a case, 108 000 in all; those behind the end of the file must fail, others may
    (EIO twice), and no read leaves its row."""
    size = PAGES * 4096 + end
    content = content_of(size)
    engine = FakeEngine(content, seed=end + row, short_share=0.3, eio_share=0.05)
    rng = np.random.default_rng(row)
    last = -(-size // row)  # one row or more behind the last whole one
    n, stride = 20, -(-row // 512) * 512 + 512
    succeeded = 0
    errors: list[tuple[bool, Exception]] = []

    async def batch() -> None:
        nonlocal succeeded
        rows = rng.integers(0, last, n)
        dest = aligned_empty(n * stride, 4096)
        dest[:] = GUARD
        behind = ((rows + 1) * row > size).any()
        at = rng.permutation(n) * stride
        try:
            await engine.read(
                ReadBatch(rows * row, np.full(n, row), dest, at), prefetch=bool(rng.random() < 0.3)
            )
        except (BundleCorruptError, DiskReadError) as exc:
            errors.append((behind, exc))
        else:
            assert not behind
            for number, to in zip(rows, at, strict=True):
                np.testing.assert_array_equal(dest[to : to + row], content[number * row : (number + 1) * row])
            succeeded += 1
        gaps = np.ones(len(dest), np.bool_)
        for to in at:
            gaps[to : to + row] = False
        assert (dest[gaps] == GUARD).all()

    for _ in range(20):
        await asyncio.gather(*(batch() for _ in range(10)))
    assert succeeded
    assert errors
    for behind, error in errors:
        if isinstance(error, BundleCorruptError):
            assert behind, error
        assert (f"ends at byte {size}" if isinstance(error, BundleCorruptError) else "Input/output") in str(
            error
        )
    assert engine.stats.retried
    # What is as large as the alignment can't come short; all else did, and went on.
    assert engine.stats.continued or row == 512
    await engine.close()


@pytest.mark.parametrize("grain", [1, 512])
async def test_reads_with_several_places_that_come_short(grain: int) -> None:
    content = content_of(1 << 20)
    engine = FakeEngine(content, seed=grain, short_share=0.5)
    rng = np.random.default_rng(grain)
    for _ in range(60):
        batch, expected = random_batch(rng, content, grain, int(rng.integers(0, 30)), 20_000)
        await engine.read(batch)
        np.testing.assert_array_equal(batch.dest, expected)
    assert engine.stats.continued > 100
    await engine.close()


async def test_eio_is_retried_once() -> None:
    content = content_of(1 << 20)
    dying = FakeEngine(content, eio_share=1.0)
    with pytest.raises(DiskReadError, match=r"fake: reading 4096 bytes at offset 8192 failed: Input/output"):
        await dying.read(one_read(8192, aligned_empty(4096)))
    assert (dying.stats.reads, dying.stats.retried) == (2, 1)
    await dying.close()


async def test_other_errors_are_not_retried() -> None:
    content = content_of(1 << 20)
    engine = FakeEngine(content, einval_first=1)
    with pytest.raises(DiskReadError, match="Invalid argument"):
        await engine.read(one_read(0, aligned_empty(4096)))
    dest = aligned_empty(4096)
    await engine.read(one_read(0, dest))
    np.testing.assert_array_equal(dest, content[:4096])
    assert engine.stats.retried == 0
    await engine.close()


async def test_the_queue_stays_full_across_batches() -> None:
    """The second batch fills the place that the first one leaves, before that has ended."""
    content = content_of(1 << 20)
    engine = FakeEngine(content, depth=16, latency_us=200, reorder=False)
    n = 10
    offsets = np.arange(n) * 4096
    dests = [aligned_empty(n * 4096) for _ in range(2)]
    await asyncio.gather(
        *(engine.read(ReadBatch(offsets, np.full(n, 4096), dest, offsets)) for dest in dests)
    )
    assert engine.max_in_flight == 16
    await engine.close()


async def test_cancelling_half_way_drops_what_was_not_submitted() -> None:
    content = content_of(4 << 20)
    engine = FakeEngine(content, depth=4, latency_us=500)
    n = 1000
    at = np.arange(n) * 4096
    dest = aligned_empty(n * 4096)
    task = asyncio.create_task(engine.read(ReadBatch(at, np.full(n, 4096), dest, at)))
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if dest.any():
            break
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = aligned_empty(4096)
    await engine.read(one_read(4096, after))
    np.testing.assert_array_equal(after, content[4096:8192])
    await engine.close()
    stats = engine.stats
    assert stats.dropped > 800
    assert stats.reads + stats.dropped == n + 1
    arrived = dest.reshape(n, 4096).any(1)
    np.testing.assert_array_equal(dest.reshape(n, 4096)[arrived], content.reshape(-1, 4096)[:n][arrived])


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("faults", [{"short_share": 0.9}, {"eio_share": 0.3}])
async def test_retries_that_hold_all_scratch_memory_go_on(depth: int, faults: dict[str, float]) -> None:
    """Prefetches that wait for another try hold what a demand read needs; the demand must not hold them."""
    content = content_of(1 << 20)
    engine = FakeEngine(content, depth=depth, latency_us=100, **faults)
    n, length = 20, 2000

    async def keep_reading(prefetch: bool) -> None:
        for round_ in range(40):
            offset = (np.arange(n) + round_) * (length + 1) + 1
            dest = np.empty(n * length, np.uint8)
            batch = ReadBatch(offset, np.full(n, length), dest, np.arange(n) * length)
            with contextlib.suppress(DiskReadError):
                await engine.read(batch, prefetch=prefetch)
                for start, row in zip(offset, dest.reshape(n, length), strict=True):
                    np.testing.assert_array_equal(row, content[start : start + length])

    await asyncio.wait_for(asyncio.gather(keep_reading(True), keep_reading(False)), 60)
    await engine.close()


async def test_failing_batches_leave_the_others_alone() -> None:
    """Batches that fail, are cancelled, or succeed, all at once, many times."""
    content = content_of(1 << 20)
    engine = FakeEngine(content, depth=8, seed=5, short_share=0.2, eio_share=0.15)
    rng = np.random.default_rng(0)
    outcomes = {"ok": 0, "failed": 0, "cancelled": 0}

    async def one(number: int) -> None:
        n = 8
        offset = rng.integers(0, (1 << 20) // 4096, n) * 4096
        dest = aligned_empty(n * 4096)
        read = engine.read(ReadBatch(offset, np.full(n, 4096), dest, np.arange(n) * 4096))
        task = asyncio.ensure_future(read)
        if number % 3 == 0:
            await asyncio.sleep(0)
            task.cancel()
        try:
            await task
        except DiskReadError:
            outcomes["failed"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        else:
            outcomes["ok"] += 1
            np.testing.assert_array_equal(dest.reshape(n, 4096), content.reshape(-1, 4096)[offset // 4096])

    for _ in range(40):
        await asyncio.gather(*(one(number) for number in range(30)))
    assert min(outcomes.values()) > 50, outcomes
    await engine.close()
