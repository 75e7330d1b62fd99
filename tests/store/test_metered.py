from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from flashd.errors import DiskReadError
from flashd.stats import ReadStats
from flashd.store.in_memory import InMemoryStore
from flashd.store.metered import MeteredStore
from flashd.store.open import open_store
from flashd.testing.bundles import make_bundle
from flashd.testing.store_suite import destination
from flashd.types import U8Array

DELAY_S = 0.05


class _Slow(InMemoryStore):
    """Takes a known time; layer 1 fails."""

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        await asyncio.sleep(DELAY_S)
        if layer == 1:
            raise DiskReadError("broken")
        await super().read_range(layer, start, stop, out)


@pytest.fixture
def store(tmp_path: Path) -> MeteredStore:
    made = make_bundle(tmp_path)
    return MeteredStore(_Slow(made.manifest.ffn, made.rows))


def rows(store: MeteredStore, count: int) -> U8Array:
    return np.empty((count, store.geometry.stride_bytes), np.uint8)


async def test_device_reads_are_the_engine_s_and_calls_the_store_s(tmp_path: Path) -> None:
    made = make_bundle(tmp_path)
    store = await open_store(made.directory, made.manifest, verify="reads")
    probed = store.read_stats  # opening it has read, too
    assert probed is not None
    scattered = np.array([2, 50, 9, 70])
    await store.read_rows(1, scattered, destination(store, 4))
    assert store.stats.calls == 1
    assert store.stats.device.reads == probed.reads + 4
    assert store.stats.bytes_delivered == 4 * store.geometry.stride_bytes
    assert store.stats.device.bytes_read >= probed.bytes_read + store.stats.bytes_delivered
    assert store.stats.device == store.read_stats
    assert store.stats.checks is store.check_stats
    assert store.stats.checks.checked_rows == 4
    await store.close()


async def test_a_store_in_ram_reads_from_no_device(tmp_path: Path) -> None:
    made = make_bundle(tmp_path)
    store = await open_store(made.directory, made.manifest, "memory", verify="reads")
    await store.read_range(0, 0, 3, rows(store, 3))
    assert (store.read_stats, store.check_stats) == (None, None)
    assert (store.stats.calls, store.stats.device) == (1, ReadStats())
    await store.close()


async def test_counts_calls_bytes_and_errors(store: MeteredStore) -> None:
    await store.read_range(0, 0, 3, rows(store, 3))
    await store.read_rows(2, np.array([4, 4]), rows(store, 2))
    with pytest.raises(DiskReadError):
        await store.read_range(1, 0, 3, rows(store, 3))
    assert (store.stats.calls, store.stats.errors) == (3, 1)
    assert store.stats.bytes_delivered == 5 * store.geometry.stride_bytes


async def test_busy_is_time_with_any_read_outstanding(store: MeteredStore) -> None:
    """Four reads at once count once, and idle time does not."""
    began_ns = time.perf_counter_ns()
    await asyncio.gather(*(store.read_range(0, 0, 1, rows(store, 1)) for _ in range(4)))
    took_ns = time.perf_counter_ns() - began_ns
    assert 0.9 * DELAY_S * 1e9 <= store.stats.busy_ns <= took_ns
    busy_ns = store.stats.busy_ns
    await asyncio.sleep(DELAY_S)
    assert store.stats.busy_ns == busy_ns
    await store.read_range(0, 0, 1, rows(store, 1))
    assert store.stats.busy_ns - busy_ns >= 0.9 * DELAY_S * 1e9


async def test_a_cancelled_read_is_no_error_and_ends_the_busy_time(store: MeteredStore) -> None:
    task = asyncio.create_task(store.read_range(0, 0, 1, rows(store, 1)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    busy_ns = store.stats.busy_ns
    await asyncio.sleep(DELAY_S)
    await store.read_rows(0, np.array([1]), rows(store, 1))
    assert store.stats.busy_ns - busy_ns < DELAY_S * 1e9
    assert (store.stats.errors, store.stats.bytes_delivered) == (0, store.geometry.stride_bytes)
