"""The fake engine as a device that keeps time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch
from flashd.testing.fake_engine import FakeDevice, FakeEngine
from flashd.types import U8Array

READ = 4096
CONTENT = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
# Nobody else's work makes a device faster: a model is met if it is met once, and never undercut.
TRIES = 40


def reads(n: int, dest: U8Array | None = None) -> ReadBatch:
    offset = np.arange(n) % (len(CONTENT) // READ) * READ
    dest = aligned_empty(n * READ) if dest is None else dest
    return ReadBatch(offset, np.full(n, READ), dest, np.arange(n) * READ)


async def elapsed_s(engine: FakeEngine, n: int, prefetch: bool = False) -> float:
    batch = reads(n)
    start = time.perf_counter()
    await engine.read(batch, prefetch=prefetch)
    took_s = time.perf_counter() - start
    np.testing.assert_array_equal(batch.dest.reshape(n, READ)[-1], CONTENT[batch.offset_bytes[-1] :][:READ])
    return took_s


@pytest.mark.parametrize(
    ("n", "depth", "device", "expected_s"),
    [
        pytest.param(40, 8, FakeDevice(5000, 1e12), 5 * 5e-3, id="latency"),
        pytest.param(200, 32, FakeDevice(0, 200 * READ / 20e-3), 20e-3, id="bandwidth"),
        # Eight end from 6 to 13 ms, and what has begun in their places goes on from there.
        pytest.param(16, 8, FakeDevice(5000, READ / 1e-3), 21e-3, id="both"),
        # Were every read late by what it takes to wake up, this would take half as long again.
        pytest.param(200, 1, FakeDevice(100, 1e12), 20e-3, id="one at a time"),
    ],
)
async def test_reads_take_the_time_of_the_model(
    n: int, depth: int, device: FakeDevice, expected_s: float
) -> None:
    engine = FakeEngine(CONTENT, depth=depth, device=device)
    best_s = float("inf")
    for _ in range(TRIES):
        took_s = await elapsed_s(engine, n)
        assert took_s >= 0.999 * expected_s
        best_s = min(best_s, took_s)
        if best_s < 1.1 * expected_s:
            break
    assert best_s < 1.1 * expected_s
    assert engine.max_in_flight == min(n, depth)
    await engine.close()


async def test_it_sleeps_meanwhile() -> None:
    engine = FakeEngine(CONTENT, depth=2, device=FakeDevice(20_000, 1e9))
    cpu_s = time.process_time()
    assert await elapsed_s(engine, 10) > 0.1
    assert time.process_time() - cpu_s < 0.05
    await engine.close()


async def test_demand_goes_before_prefetch_that_has_not_begun() -> None:
    engine = FakeEngine(CONTENT, depth=4, device=FakeDevice(2000, 1e9))
    ended: list[str] = []

    async def read(name: str, n: int, prefetch: bool) -> None:
        await elapsed_s(engine, n, prefetch)
        ended.append(name)

    prefetch = asyncio.ensure_future(read("prefetch", 200, True))  # 100 ms
    await asyncio.sleep(0)
    await read("demand", 4, False)
    await prefetch
    assert ended == ["demand", "prefetch"]
    await engine.close()


async def test_reads_that_come_short_take_their_time_again() -> None:
    engine = FakeEngine(CONTENT, depth=1, short_share=1.0, device=FakeDevice(1000, 1e12))
    start = time.perf_counter()
    for _ in range(10):
        await elapsed_s(engine, 1)
    took_s = time.perf_counter() - start
    assert engine.stats.continued >= 10
    assert took_s >= 0.999e-3 * engine.stats.reads
    await engine.close()


@pytest.mark.parametrize(("latency_us", "bytes_per_s"), [(-1.0, 1e9), (1.0, 0.0), (float("nan"), 1.0)])
def test_what_is_no_device(latency_us: float, bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        FakeDevice(latency_us, bytes_per_s)
