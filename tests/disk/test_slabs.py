"""Memory that is registered with the kernel and given back, again and again, under real reads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import psutil
import pytest

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.probe import open_engine
from flashd.disk.slabs import SLAB_BYTES, SlabBuffer
from flashd.testing.engine_suite import random_file
from flashd.testing.fake_engine import FakeEngine
from flashd.types import U8Array

ROW_BYTES = 16 << 10


async def read_rows(engine: ReadEngine, content: U8Array, memory: U8Array, rows: U8Array) -> None:
    """Random file rows into the given rows of memory, then compare."""
    rng = np.random.default_rng(int(rows[0]))
    file_rows = rng.integers(0, content.size // ROW_BYTES, len(rows))
    length = np.full(len(rows), ROW_BYTES)
    await engine.read(ReadBatch(file_rows * ROW_BYTES, length, memory, rows * ROW_BYTES))
    got = memory.reshape(-1, ROW_BYTES)[rows]
    np.testing.assert_array_equal(got, content.reshape(-1, ROW_BYTES)[file_rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slab_bytes", "rounds", "registered"),
    [(128 << 10, 10_000, True), (128 << 10, 1000, False), (SLAB_BYTES, 300, True)],
)
async def test_shrink_grow_and_read(tmp_path: Path, slab_bytes: int, rounds: int, registered: bool) -> None:
    """Pages that were given back under a registered buffer would show old bytes, or none."""
    content = random_file(tmp_path / "f", 8 << 20)
    engine = await open_engine(tmp_path / "f", "uring")
    slabs, slab_rows = 4, slab_bytes // ROW_BYTES
    buffer = SlabBuffer(slabs * slab_bytes, engine if registered else None, slab_bytes)
    rng = np.random.default_rng(0)
    buffer.resize(slabs * slab_bytes)
    for round_ in range(rounds):
        # Shrink, grow, read into what stayed and into what came back.
        kept = int(rng.integers(0, slabs))
        buffer.resize(kept * slab_bytes)
        size = int(rng.integers(kept + 1, slabs + 1))
        buffer.resize(size * slab_bytes)
        assert buffer.why_unregistered == ""
        new = rng.integers(kept * slab_rows, size * slab_rows, 3)
        if round_ % 16 == 0:
            assert not buffer.memory.reshape(-1, ROW_BYTES)[new].any()
        await read_rows(engine, content, buffer.memory, np.unique(np.append(new, 0)))
    assert (engine.stats.registered_reads > rounds) == registered
    buffer.close()
    await engine.close()


async def test_pages_really_go_and_come(tmp_path: Path) -> None:
    random_file(tmp_path / "f", 1 << 20)
    engine = await open_engine(tmp_path / "f", "uring")
    process = psutil.Process()
    buffer = SlabBuffer(16 * SLAB_BYTES, engine)
    before = process.memory_info().rss
    buffer.resize(16 * SLAB_BYTES)  # registered memory is there at once
    buffer.memory[:] = 1
    assert process.memory_info().rss - before > 15 * SLAB_BYTES
    buffer.resize(SLAB_BYTES + 1)
    assert buffer.size_bytes == 2 * SLAB_BYTES
    assert process.memory_info().rss - before < 4 * SLAB_BYTES
    assert (buffer.memory[: 2 * SLAB_BYTES] == 1).all()
    buffer.close()
    buffer.close()
    await engine.close()


@pytest.mark.parametrize("backend", ["fake", "uring", "threads", "buffered"])
async def test_reads_of_every_kind_count_as_in_flight(tmp_path: Path, backend: str) -> None:
    """Into several places, over the border of two slabs, waiting in the queue: pages that go under them
    would take what is read with them."""
    content = random_file(tmp_path / "f", 4 << 20)
    engine: ReadEngine = FakeEngine(content, depth=2, latency_us=3000)
    if backend != "fake":
        engine = await open_engine(tmp_path / "f", backend, depth=2)
    buffer = SlabBuffer(8 * 65536, engine, 65536)
    n = 32
    scattered = ReadBatch(
        np.arange(n) * 8192,
        np.full(2 * n, 4096),
        buffer.memory,
        (np.arange(2 * n) + 64) * 4096 % buffer.memory.size,
        np.arange(n) * 2,
    )
    across = ReadBatch(np.array([0]), np.array([65536]), buffer.memory, np.array([32768]))
    for batch in (scattered, across) * (1 if backend == "fake" else 10):
        buffer.resize(8 * 65536)
        task = asyncio.create_task(engine.read(batch))
        await asyncio.sleep(0)
        try:
            buffer.resize(0)
        except ValueError:
            assert buffer.size_bytes == 8 * 65536
            await task
            if batch is across:
                np.testing.assert_array_equal(buffer.memory[32768 : 32768 + 65536], content[:65536])
        else:
            # It has ended already, and only the event loop does not know yet.
            assert backend != "fake"
            assert not buffer.memory.any()
            await task
            assert not buffer.memory.any(), "something was read into pages that were given back"
    buffer.resize(0)
    buffer.close()
    await engine.close()


async def test_registering_overlapping_memory_and_too_much(tmp_path: Path) -> None:
    random_file(tmp_path / "f", 1 << 20)
    engine = await open_engine(tmp_path / "f", "uring")
    memory = aligned_empty(1 << 20)
    assert engine.register(memory) == ""
    for start, stop in ((0, 1 << 20), (4096, 8192), (1 << 19, 1 << 20)):
        assert "exists" in engine.register(memory[start:stop])
    engine.unregister(memory[:4096])  # not registered by itself
    engine.unregister(memory)
    engine.unregister(memory)
    assert engine.register(memory[4096:8192]) == ""
    await engine.close()


@pytest.mark.parametrize("backend", ["threads", "buffered"])
async def test_engines_that_register_nothing(tmp_path: Path, backend: str) -> None:
    content = random_file(tmp_path / "f", 1 << 20)
    engine = await open_engine(tmp_path / "f", backend)
    buffer = SlabBuffer(SLAB_BYTES, engine)
    buffer.resize(1)
    assert "no registered memory" in buffer.why_unregistered
    await read_rows(engine, content, buffer.memory, np.arange(5))
    buffer.close()
    await engine.close()


@pytest.mark.parametrize(("capacity", "slab"), [(-1, 4096), (1, 0), (1, 5000)])
def test_wrong_sizes(capacity: int, slab: int) -> None:
    with pytest.raises(ValueError, match="multiples of"):
        SlabBuffer(capacity, None, slab)
    with pytest.raises(ValueError, match="the capacity is"):
        SlabBuffer(4096).resize(4097)
