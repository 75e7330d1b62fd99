"""Rows that a thread waits for by itself: checked and counted as those that the event loop reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.disk.engine import FOREVER_S, ReadTicket
from flashd.errors import BundleCorruptError, DiskReadError
from flashd.layout.manifest import BUNDLE
from flashd.store.base import WeightStore, WrappedStore
from flashd.store.check_budget import CheckBudget
from flashd.store.checked import CheckedStore
from flashd.store.in_memory import InMemoryStore
from flashd.store.metered import MeteredStore
from flashd.store.open import load_sums, open_store
from flashd.testing.bundles import make_bundle
from flashd.testing.store_suite import destination
from flashd.types import I64Array, U8Array

Wrong = Iterator[int | Exception | None]


async def by_ticket(store: WeightStore, layer: int, out: U8Array) -> None:
    """Rows from the end to the beginning, read and waited for by another thread."""
    ids, loop = np.arange(len(out))[::-1].copy(), asyncio.get_running_loop()
    await asyncio.to_thread(lambda: store.start_rows(layer, ids, out, ids, loop).wait())


@pytest.mark.parametrize("backend", ["uring", "threads"])
async def test_whoever_waits_for_a_ticket_checks(tmp_path: Path, backend: str) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    at = bundle.manifest.layer_offset_bytes[1] + 7 * bundle.manifest.ffn.stride_bytes
    with (bundle.directory / BUNDLE).open("r+b") as file:
        file.seek(at)
        file.write(b"\xa5\x5a")
    store = await open_store(bundle.directory, bundle.manifest, backend, verify="auto")
    out = destination(store, bundle.manifest.ffn.n_neurons)
    await by_ticket(store, 0, out)
    np.testing.assert_array_equal(out, bundle.rows[0])
    for _ in range(2):
        with pytest.raises(
            BundleCorruptError, match=r"ffn\.bundle: layer 1, neuron 7: checksum mismatch \(1"
        ):
            await by_ticket(store, 1, out)
    stats = store.stats
    assert (stats.checks.mismatched_rows, stats.checks.rereads, stats.errors, stats.calls) == (4, 2, 2, 3)
    assert stats.checks.rows >= stats.checks.checked_rows >= 2 * len(out)
    assert stats.device == store.read_stats
    await store.close()
    with pytest.raises(ValueError, match="closed"):
        await by_ticket(store, 0, out)


class _Tickets(WrappedStore):
    """Gives tickets for what an in-memory store has, with one wrong byte or an error when it is told to."""

    has_tickets = True
    busy_ns = 5

    def __init__(self, inner: WeightStore, wrong: Wrong) -> None:
        super().__init__(inner)
        self.wrong = wrong

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        raise AssertionError("rows are asked for by ticket")

    async def read_rows(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("rows are asked for by ticket")

    async def close(self) -> None:
        await self.inner.close()

    def start_rows(self, layer: int, ids: I64Array, out: U8Array, *args: Any, **kwargs: Any) -> ReadTicket:
        return _Ticket(self.inner.start_rows(layer, ids, out, *args, **kwargs), next(self.wrong), out)


class _Ticket(ReadTicket):
    def __init__(self, inner: ReadTicket, wrong: int | Exception | None, out: U8Array) -> None:
        self.inner = inner
        self.wrong = wrong
        self.out = out

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        if not self.inner.wait(timeout_s):
            return False
        if isinstance(self.wrong, Exception):
            raise self.wrong
        if self.wrong is not None:
            self.out[self.wrong, 0] ^= 1
        return True


async def test_what_a_ticket_brought_wrong_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    inner = _Tickets(InMemoryStore(bundle.manifest.ffn, bundle.rows), iter([5, None, 3, 4, None, None]))
    sums = load_sums(bundle.directory, bundle.manifest)
    store = CheckedStore(inner, sums, bundle.directory, budget=CheckBudget(lambda: 0))
    out = destination(store, bundle.manifest.ffn.n_neurons)
    await by_ticket(store, 0, out)
    np.testing.assert_array_equal(out, bundle.rows[0])
    assert "layer 0, neuron 5: checksum mismatch (1 of" in caplog.text
    with pytest.raises(BundleCorruptError, match="layer 1, neuron 4"):
        await by_ticket(store, 1, out)
    await by_ticket(store, 1, out)
    assert (store.stats.mismatched_rows, store.stats.rereads) == (3, 2)
    assert store.stats.checked_rows == 4 * len(out) + 1  # all at first and again, then the suspect
    await by_ticket(store, 1, out)
    assert store.stats.checked_rows == 4 * len(out) + 1  # time stands still
    await store.close()


async def test_calls_by_ticket_count(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    inner = _Tickets(InMemoryStore(bundle.manifest.ffn, bundle.rows), iter([None, DiskReadError("broken")]))
    store = MeteredStore(inner)
    out = destination(store, 4)
    await by_ticket(store, 0, out)
    with pytest.raises(DiskReadError):
        await by_ticket(store, 0, out)
    stats = store.stats
    assert (stats.calls, stats.errors, stats.bytes_delivered) == (2, 1, out.nbytes)
    assert stats.busy_ns == 0  # since it was opened, and by the clock of who reads
    inner.busy_ns = 12
    inner.wrong = iter([None])
    await by_ticket(store, 0, out)
    assert stats.busy_ns == 7
    await store.close()


async def test_a_loop_that_is_closed_refuses(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    store = InMemoryStore(bundle.manifest.ffn, bundle.rows)
    closed = asyncio.new_event_loop()
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        store.start_rows(0, np.arange(2), destination(store, 2), None, closed)
    await store.close()
