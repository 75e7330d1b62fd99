"""Reads that a thread waits for by itself: the loop has no part in them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd import kernels
from flashd.disk.buffered import BufferedEngine
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import Checked, ReadEngine, RowBatch, RowCheck
from flashd.disk.native_engine import open_native
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.testing.engine_suite import one_read, random_file
from flashd.testing.fake_engine import FakeDevice, FakeEngine
from flashd.types import U8Array, U32Array

ROW = 4096
CONTENT = np.random.default_rng(1).integers(0, 256, 64 * ROW, np.uint8)


def rows_of(ids: list[int], stride: int = ROW) -> tuple[RowBatch, U8Array]:
    dest = aligned_empty(len(ids) * stride, 4096).reshape(len(ids), stride)
    return RowBatch(0, np.array(ids), np.arange(len(ids)), dest, 0, 8), dest


async def waited(engine: ReadEngine, ids: list[int], stride: int = ROW) -> U8Array:
    batch, dest = rows_of(ids, stride)
    assert await asyncio.to_thread(engine.start_rows(batch).wait)
    return dest


@pytest.mark.parametrize("stride", [ROW, 1000])
@pytest.mark.parametrize("name", ["uring", "threads"])
async def test_a_file(tmp_path: Path, name: str, stride: int) -> None:
    """In place and through scratch, and its end."""
    content = random_file(tmp_path / "file", 64 * ROW)
    engine = open_native(name, [str(tmp_path / "file")], 512, "asked for")
    ids = [7, 8, 9, 3, 50, 3]
    expected = content[: 60 * stride].reshape(-1, stride)[ids]
    np.testing.assert_array_equal(await waited(engine, ids, stride), expected)
    assert engine.stats.reads > 0
    with pytest.raises(BundleCorruptError, match=r"file: ends at byte 262144"):
        await waited(engine, [64 * ROW // stride + 1], stride)
    await engine.close()


async def test_the_loop_and_threads_at_the_same_time() -> None:
    engine = FakeEngine(CONTENT, depth=4, latency_us=300, short_share=0.3)
    rng = np.random.default_rng(2)
    cases = [rng.integers(0, 64, 9).tolist() for _ in range(60)]

    async def awaited(ids: list[int]) -> U8Array:
        batch, dest = rows_of(ids)
        await engine.read_rows(batch)
        return dest

    results = await asyncio.gather(
        *(waited(engine, ids) if i % 2 else awaited(ids) for i, ids in enumerate(cases))
    )
    for ids, dest in zip(cases, results, strict=True):
        np.testing.assert_array_equal(dest, CONTENT.reshape(-1, ROW)[ids])
    await engine.close()


async def test_waiting_blocks_nobody_and_may_have_an_end() -> None:
    engine = FakeEngine(CONTENT, depth=1, device=FakeDevice(100_000, 1e12))
    batch, dest = rows_of([5])
    ticket = engine.start_rows(batch)
    began_s = time.perf_counter()
    assert not ticket.wait(0)
    assert not ticket.wait(0.01)
    waiting = threading.Thread(target=ticket.wait)
    waiting.start()
    turns = 0
    while waiting.is_alive():  # this thread has the GIL whenever it wants
        await asyncio.sleep(0.001)
        turns += 1
    assert time.perf_counter() - began_s > 0.09
    assert turns > 10
    np.testing.assert_array_equal(dest[0], CONTENT[5 * ROW : 6 * ROW])
    with pytest.raises(ValueError, match="no such ticket"):
        ticket.wait()
    await engine.close()


async def test_a_device_error() -> None:
    engine = FakeEngine(CONTENT, eio_share=1.0)
    with pytest.raises(DiskReadError, match="fake: reading 4096 bytes at offset 8192"):
        await waited(engine, [2])
    await engine.close()


async def test_busy_is_time_with_any_batch_on_its_way() -> None:
    engine = FakeEngine(CONTENT, depth=8, device=FakeDevice(30_000, 1e12))
    assert engine.busy_ns == 0
    first, second = (engine.start_rows(rows_of([i])[0]) for i in (1, 2))
    await asyncio.sleep(0.2)  # both have ended long before anybody asks
    busy_ns = engine.busy_ns
    assert 30e6 <= busy_ns < 180e6
    assert first.wait()
    assert second.wait()
    assert engine.busy_ns == busy_ns
    third = engine.start_rows(rows_of([3])[0])
    await asyncio.sleep(0.005)
    assert engine.busy_ns > busy_ns
    assert third.wait()
    await engine.close()


async def test_close_waits_for_what_nobody_has_waited_for() -> None:
    engine = FakeEngine(CONTENT, depth=1, device=FakeDevice(2000, 1e12))
    batches = [rows_of([i, i + 9]) for i in range(5)]
    tickets = [engine.start_rows(batch) for batch, _ in batches]
    await engine.close()
    for i, (_, dest) in enumerate(batches):
        np.testing.assert_array_equal(dest, CONTENT.reshape(-1, ROW)[[i, i + 9]])
    assert all(ticket.wait(0) for ticket in tickets)
    with pytest.raises(ValueError, match="closed"):
        engine.start_rows(batches[0][0])


async def test_memory_that_a_ticket_is_out_for_stays_registered() -> None:
    engine = FakeEngine(CONTENT, depth=1, device=FakeDevice(20_000, 1e12))
    batch, dest = rows_of([1])
    ticket = engine.start_rows(batch)
    with pytest.raises(ValueError, match="in flight"):
        engine.unregister(dest.reshape(-1))
    assert ticket.wait()
    engine.unregister(dest.reshape(-1))
    await engine.close()


async def test_engines_without(tmp_path: Path) -> None:
    """Those of Python, and those of several files, which may have to be opened first."""
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        random_file(path, ROW)
    several = open_native("threads", [str(path) for path in paths], 512, "asked for")
    for engine in (several, BufferedEngine([str(paths[0])])):
        assert not engine.has_tickets
        with pytest.raises(ValueError, match="tickets"):
            engine.start(one_read(0, aligned_empty(512)))
        await engine.close()


def sums_of(rows: U8Array) -> U32Array:
    out = np.empty(len(rows), np.uint32)
    kernels.crc32c(np.ascontiguousarray(rows), out)
    return out


@settings(max_examples=60, deadline=None, database=None)
@given(
    ids=st.lists(st.integers(0, 63), min_size=1, max_size=40),
    trusted=st.sets(st.integers(0, 63)),
    wrong=st.sets(st.integers(0, 63), max_size=5),
    start=st.integers(0, 39),
    count=st.integers(0, 40),
    gap=st.sampled_from([0, 2]),
    short=st.sampled_from([0.0, 0.4]),
)
def test_rows_are_checked_as_they_arrive(
    ids: list[int], trusted: set[int], wrong: set[int], start: int, count: int, gap: int, short: float
) -> None:
    """Those that are not trusted, and some in a row by ascending id."""
    start, count = start % len(ids), min(count, len(ids))
    sums = sums_of(CONTENT.reshape(-1, ROW))
    sums[list(wrong)] ^= 1
    known = np.array([i in trusted for i in range(64)])
    before = known.copy()

    async def run() -> Checked | None:
        engine = FakeEngine(CONTENT, depth=4, short_share=short, eio_share=short / 4)
        batch, dest = rows_of(ids)
        batch.max_gap_rows, batch.n_rows = gap, 64
        batch.check = RowCheck(sums, known, start, count)
        ticket = engine.start_rows(batch)
        assert await asyncio.to_thread(ticket.wait)
        np.testing.assert_array_equal(dest, CONTENT.reshape(-1, ROW)[ids])
        await engine.close()
        return ticket.checked

    try:
        checked = asyncio.run(run())
    except DiskReadError:  # twice EIO
        return
    asked = sorted(ids)
    sampled = [asked[(start + i) % len(asked)] for i in range(count)]
    # A row that is asked for twice may be trusted the second time.
    must = sampled + [i for i in asked if not before[i]]
    assert checked is not None
    assert set(must) - set(wrong) <= set(np.flatnonzero(known))
    assert not known[sorted(set(must) & wrong)].any()
    np.testing.assert_array_equal(np.delete(known, must), np.delete(before, must))
    assert checked.first_wrong == min(set(must) & wrong, default=-1)
    assert len(set(must)) <= checked.n_rows <= len(ids)
    assert (checked.n_wrong > 0) == bool(set(must) & wrong)
    assert checked.time_ns > 0 or not must
    if len(set(ids)) == len(ids):
        assert checked.n_rows == len(set(must))
        assert checked.n_untrusted == sum(not before[i] for i in asked)
        assert checked.n_wrong == len(set(must) & wrong)


async def test_what_goes_through_scratch_is_not_checked_here() -> None:
    engine = FakeEngine(CONTENT)
    batch, _ = rows_of([1, 2], 1000)
    batch.check = RowCheck(np.zeros(64, np.uint32), np.zeros(64, np.bool_), 0, 2)
    ticket = engine.start_rows(batch)
    assert await asyncio.to_thread(ticket.wait)
    assert ticket.checked is None
    await engine.close()


async def test_a_checksum_is_asked_for_each_row_of_the_file() -> None:
    engine = FakeEngine(CONTENT)
    for sums, trusted, start in ((63, 64, 0), (64, 63, 0), (64, 64, -1)):
        batch, _ = rows_of([1])
        batch.n_rows = 64
        batch.check = RowCheck(np.zeros(sums, np.uint32), np.zeros(trusted, np.bool_), start, 1)
        with pytest.raises(ValueError, match="not one checksum for each row, or no sample"):
            engine.start_rows(batch)
    await engine.close()
