"""Conformance suite of weight stores. A store passes it by defining one async fixture::

    class TestMyStore(WeightStoreTests):
        @pytest.fixture
        async def made(self, tmp_path: Path) -> AsyncIterator[MadeStore]:
            bundle = make_bundle(tmp_path / "bundle", self.spec, align_bytes=512)
            store = await my_store(bundle)
            yield MadeStore(store, bundle.rows, data_files=[...])
            await store.close()

Needs pytest with ``asyncio_mode = auto``, and hypothesis. A subclass may set another ``spec`` of the
same number of layers and neurons.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.disk.buffers import aligned_empty
from flashd.errors import BundleCorruptError
from flashd.store.base import WeightStore
from flashd.testing.bundles import tiny_spec
from flashd.types import U8Array

_GUARD = 0xA5


@dataclass(frozen=True)
class MadeStore:
    """An open store and what it must deliver.

    Attributes:
        store: under test; the fixture closes it.
        rows: ``[n_layers, n_neurons, stride_bytes]``, the right content.
        data_files: files that hold the rows and are read on demand; empty for a store in RAM.
    """

    store: WeightStore
    rows: U8Array
    data_files: Sequence[Path] = field(default=())


def destination(store: WeightStore, count: int) -> U8Array:
    """Aligned rows to read into, filled with a pattern."""
    stride = store.geometry.stride_bytes
    out = aligned_empty(count * stride, max(4096, store.alignment_bytes)).reshape(count, stride)
    out[:] = _GUARD
    return out


class WeightStoreTests:
    """What every store does alike; ``made`` is the fixture to define."""

    # Three layers of 83 neurons: several shards in zarr, layers that end off a page.
    spec = tiny_spec("llama", d_ffn=83)

    @pytest.fixture
    async def made(self) -> MadeStore:
        """The store under test."""
        raise NotImplementedError("define an async fixture `made` that yields a MadeStore")

    async def test_every_layer_whole(self, made: MadeStore) -> None:
        """All rows, padding included."""
        for layer, expected in enumerate(made.rows):
            out = destination(made.store, len(expected))
            await made.store.read_range(layer, 0, len(expected), out)
            np.testing.assert_array_equal(out, expected)

    async def test_every_range_of_a_prefix_and_a_suffix(self, made: MadeStore) -> None:
        """Single rows, empty ranges, and ranges that touch both ends of a layer."""
        n = made.store.geometry.n_neurons
        ends = [0, 1, 2, 7, 8, 9, n - 9, n - 2, n - 1, n]
        for start in ends:
            for stop in (end for end in ends if end >= start):
                out = destination(made.store, stop - start)
                await made.store.read_range(1, start, stop, out)
                np.testing.assert_array_equal(out, made.rows[1, start:stop])

    async def test_random_ids_with_repeats(self, made: MadeStore) -> None:
        """Any order, runs of neighbours, the same id twice: property-tested."""
        n = made.store.geometry.n_neurons
        cases: list[list[int]] = []

        @settings(max_examples=40, deadline=None, database=None)
        @given(st.lists(st.integers(0, n - 1), max_size=2 * n))
        def collect(ids: list[int]) -> None:
            cases.append(ids)

        collect()
        for ids in [*cases, list(range(n)), [5, 6, 7, 5, 6, 7, 7, 6]]:
            wanted = np.array(ids, np.int64)
            out = destination(made.store, len(ids))
            await made.store.read_rows(2, wanted, out)
            np.testing.assert_array_equal(out, made.rows[2][wanted])

    @pytest.mark.parametrize("prefetch", [False, True])
    async def test_scattered_rows(self, made: MadeStore, prefetch: bool) -> None:
        """Each id in the row it was meant for, all other rows as they were."""
        store, n = made.store, made.store.geometry.n_neurons
        rng = np.random.default_rng(3)
        for count in (0, 1, 2, 7, n, 2 * n):
            ids, out = rng.integers(0, n, count), destination(store, 3 * n)
            if count == n:
                ids = np.arange(n)
            for rows in (rng.permutation(3 * n)[:count], np.arange(count) + 5):
                out[:] = _GUARD
                await store.read_rows(1, ids, out, rows, prefetch=prefetch)
                np.testing.assert_array_equal(out[rows], made.rows[1][ids])
                assert (np.delete(out, rows, axis=0) == _GUARD).all()

    async def test_scattered_rows_by_ticket(self, made: MadeStore) -> None:
        """As awaited ones, several at once, for a thread that waits while the event loop runs."""
        store, n, loop = made.store, made.store.geometry.n_neurons, asyncio.get_running_loop()
        rng = np.random.default_rng(4)

        def read() -> None:
            jobs = []
            for count in (0, 1, 2, 7, n, 2 * n):
                ids, out = rng.integers(0, n, count), destination(store, 3 * n)
                rows = rng.permutation(3 * n)[:count]
                ticket = store.start_rows(2, ids, out, rows, loop, prefetch=count % 2 == 1)
                jobs.append((ticket, ids, out, rows))
            ids, out = np.arange(n), destination(store, n)
            jobs.append((store.start_rows(2, ids, out, None, loop), ids, out, ids))
            for ticket, ids, out, rows in jobs:
                while not ticket.wait(0.01):
                    pass
                np.testing.assert_array_equal(out[rows], made.rows[2][ids])
                assert (np.delete(out, rows, axis=0) == _GUARD).all()

        await asyncio.to_thread(read)

    async def test_errors_by_ticket(self, made: MadeStore) -> None:
        """Raised when the read begins or when it ends; a file that is cut off is one."""
        store, n, loop = made.store, made.store.geometry.n_neurons, asyncio.get_running_loop()
        out = destination(store, n)

        def read(ids: Any, rows: Any, layer: int = 1) -> None:
            assert store.start_rows(layer, ids, out, rows, loop).wait()

        for layer, ids in ((-1, [0]), (3, [0]), (0, [-1]), (0, [n])):
            with pytest.raises(IndexError, match=r"layer|neurons"):
                await asyncio.to_thread(read, np.array(ids), np.array([0]), layer)
        for rows in ([0, n], [-1, 0], [1, 2, 3]):
            with pytest.raises(ValueError, match="rows"):
                await asyncio.to_thread(read, np.arange(2), np.array(rows))
        assert (out == _GUARD).all()
        for path in made.data_files:
            os.truncate(path, path.stat().st_size // 2 + 1)
        if made.data_files:
            with pytest.raises(BundleCorruptError, match="layer 2") as caught:
                await asyncio.to_thread(read, np.arange(n), np.arange(n), 2)
            assert os.path.commonpath(made.data_files) in str(caught.value)
        if len(made.data_files) < 2:  # the first layer is in its first half
            await asyncio.to_thread(read, np.arange(8), np.arange(8), 0)
            np.testing.assert_array_equal(out[:8], made.rows[0, :8])

    async def test_rows_that_do_not_exist(self, made: MadeStore) -> None:
        """Rows outside the destination or not one for each id are refused before anything is read."""
        store, out = made.store, destination(made.store, 8)
        wrong: list[Any] = [np.array(rows, np.int64) for rows in ([0, 8], [-1, 3], [1, 2, 3], [1])]
        for rows in (*wrong, np.arange(2, dtype=np.int32)):
            with pytest.raises(ValueError, match="rows"):
                await store.read_rows(0, np.arange(2), out, rows)
        short: Any = np.arange(2, dtype=np.int32)
        with pytest.raises(ValueError, match="ids"):
            await store.read_rows(0, short, out[:2])
        assert (out == _GUARD).all()

    async def test_neighbours_of_the_destination_stay(self, made: MadeStore) -> None:
        """No read leaves its destination rows."""
        store = made.store
        step = max(1, store.alignment_bytes // store.geometry.stride_bytes)
        around = destination(store, 5 + 2 * step)
        await store.read_range(0, 3, 8, around[step : step + 5])
        np.testing.assert_array_equal(around[step : step + 5], made.rows[0, 3:8])
        assert (around[:step] == _GUARD).all()
        assert (around[step + 5 :] == _GUARD).all()

    @pytest.mark.parametrize(("layer", "start", "stop"), [(-1, 0, 1), (3, 0, 1), (0, -1, 1), (0, 82, 84)])
    async def test_what_does_not_exist(self, made: MadeStore, layer: int, start: int, stop: int) -> None:
        """Layers and neurons out of range."""
        out = destination(made.store, stop - start)
        with pytest.raises(IndexError, match=r"layer|neurons"):
            await made.store.read_range(layer, start, stop, out)
        with pytest.raises(IndexError, match=r"layer|neurons"):
            await made.store.read_rows(layer, np.arange(start, stop), out)

    async def test_wrong_destinations(self, made: MadeStore) -> None:
        """Shape, dtype, layout and read-only memory are checked before anything is read."""
        good = destination(made.store, 4)
        frozen = destination(made.store, 4)
        frozen.flags.writeable = False
        wrong = [good[:3], good[:, :-1], good.view(np.uint16), good[::-1], good.reshape(-1), frozen]
        for out in wrong:
            with pytest.raises(ValueError, match="out"):
                await made.store.read_range(0, 0, 4, out)  # type: ignore[arg-type]  # the test's point
            with pytest.raises(ValueError, match="out"):
                await made.store.read_rows(0, np.arange(4), out)  # type: ignore[arg-type]  # as above
        assert (good == _GUARD).all()

    async def test_destination_off_by_one_byte(self, made: MadeStore) -> None:
        """Unaligned memory: an error where the store needs alignment, else right."""
        store = made.store
        stride = store.geometry.stride_bytes
        out = aligned_empty(2 * stride + 1)[1:].reshape(2, stride)
        if store.alignment_bytes > 1:
            with pytest.raises(ValueError, match="multiple of"):
                await store.read_range(0, 0, 2, out)
        else:
            await store.read_range(0, 0, 2, out)
            np.testing.assert_array_equal(out, made.rows[0, :2])

    async def test_many_outstanding(self, made: MadeStore) -> None:
        """Two hundred reads at once, ranges and rows mixed."""
        store, n = made.store, made.store.geometry.n_neurons
        rng = np.random.default_rng(7)
        jobs = []
        for i in range(200):
            layer, ids = int(rng.integers(3)), rng.integers(0, n, 11)
            if i % 2:
                ids = np.arange(ids[0] // 2, ids[0] // 2 + 11)
            out = destination(store, len(ids))
            if i % 2:
                read = store.read_range(layer, int(ids[0]), int(ids[-1]) + 1, out)
            else:
                read = store.read_rows(layer, ids, out)
            jobs.append((read, out, made.rows[layer][ids]))
        await asyncio.gather(*(read for read, _, _ in jobs))
        for _, out, expected in jobs:
            np.testing.assert_array_equal(out, expected)

    async def test_cancelled_in_the_middle_then_used_again(self, made: MadeStore) -> None:
        """A cancelled read leaves the store usable and its destination alone or half filled."""
        store, n = made.store, made.store.geometry.n_neurons
        for yields in range(6):
            out = destination(store, n)
            task = asyncio.create_task(store.read_range(0, 0, n, out))
            for _ in range(yields):
                await asyncio.sleep(0)
            if task.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await task
            del out
            again = destination(store, n)
            await store.read_range(1, 0, n, again)
            np.testing.assert_array_equal(again, made.rows[1])

    async def test_close_with_reads_in_flight(self, made: MadeStore) -> None:
        """Reads that were started end well, later ones are refused, closing twice is fine."""
        store, n = made.store, made.store.geometry.n_neurons
        outs = [destination(store, n) for _ in range(8)]
        tasks = [asyncio.create_task(store.read_range(i % 3, 0, n, out)) for i, out in enumerate(outs)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*tasks)
        for i, out in enumerate(outs):
            np.testing.assert_array_equal(out, made.rows[i % 3])
        await store.close()
        with pytest.raises(ValueError, match="closed"):
            await store.read_range(0, 0, n, outs[0])

    async def test_file_truncated_while_in_use(self, made: MadeStore) -> None:
        """Every row right or a named error, never garbage."""
        store, n = made.store, made.store.geometry.n_neurons
        for path in made.data_files:
            os.truncate(path, path.stat().st_size // 2 + 1)
        out = destination(store, n)
        if not made.data_files:
            await store.read_range(2, 0, n, out)
            np.testing.assert_array_equal(out, made.rows[2])
            return
        with pytest.raises(BundleCorruptError) as caught:
            await store.read_range(2, 0, n, out)
        assert os.path.commonpath(made.data_files) in str(caught.value)
        # Where a layer lies in many files, the end of its last one may hold only padding.
        lost = 0
        for neuron in range(n):
            try:
                await store.read_rows(2, np.array([neuron]), out[:1])
            except BundleCorruptError:
                lost += 1
            else:
                np.testing.assert_array_equal(out[0], made.rows[2, neuron])
        assert lost > n // 3
