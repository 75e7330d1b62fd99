"""zarr stores of other layouts than our own: every row as zarr itself reads it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr_writing import GEOMETRY, ROWS, SHAPE, check, open_zarr, wide, write, write_zarr_bundle

from flashd.disk.files import MAX_OPEN_FILES
from flashd.errors import BundleCorruptError, ConfigError
from flashd.store import zarr_store
from flashd.store.zarr_store import ZarrStore

ROW = SHAPE[1]
# Many files, but no directory for each.
DOTS = {"chunk_key_encoding": {"name": "default", "separator": "."}}
CRC = [zarr.codecs.Crc32cCodec()]
RAW = {"compressors": None}


def sharding(rows: int, **options: Any) -> dict[str, Any]:
    codec = zarr.codecs.ShardingCodec(chunk_shape=(rows, ROW), **options)
    return {"serializer": codec, "compressors": None}


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("raw", {"chunks": SHAPE, **RAW}),
    "unsharded": ("raw", {"chunks": (7, ROW), **RAW}),
    "a-file-a-row": ("raw", {"chunks": (1, ROW), **DOTS, **RAW}),
    "larger-than-the-array": ("raw", {"chunks": (100, ROW), **RAW}),
    "dots": ("raw", {"chunks": (7, ROW), **DOTS, **RAW}),
    "v2-keys": ("raw", {"chunks": (7, ROW), "chunk_key_encoding": {"name": "v2", "separator": "/"}, **RAW}),
    "v2-keys-dots": (
        "raw",
        {"chunks": (7, ROW), "chunk_key_encoding": {"name": "v2", "separator": "."}, **RAW},
    ),
    "sharded": ("raw", {"chunks": (8, ROW), "shards": (24, ROW), **RAW}),
    "one-shard": ("raw", {"chunks": (8, ROW), "shards": (160, ROW), **RAW}),
    "index-first": ("raw", {"chunks": (24, ROW), **sharding(8, index_location="start")}),
    "checksums": ("raw", {"chunks": (7, ROW), "compressors": CRC}),
    "checksums-in-shards": ("raw", {"chunks": (8, ROW), "shards": (24, ROW), "compressors": CRC}),
    "format-2": ("raw", {"chunks": (16, ROW), "zarr_format": 2, **RAW}),
    "format-2-slash": (
        "raw",
        {
            "chunks": (16, ROW),
            "zarr_format": 2,
            "chunk_key_encoding": {"name": "v2", "separator": "/"},
            **RAW,
        },
    ),
    "default-sharded": ("decoded", {"chunks": (8, ROW), "shards": (24, ROW)}),
    "zstd": ("decoded", {"chunks": (16, ROW), "compressors": zarr.codecs.ZstdCodec(checksum=True)}),
    "gzip-and-checksum": ("decoded", {"chunks": (16, ROW), "compressors": [zarr.codecs.GzipCodec(), *CRC]}),
    "blosc-in-a-shard": (
        "decoded",
        {"chunks": (16, ROW), "compressors": zarr.codecs.BloscCodec(), "shards": SHAPE},
    ),
    "zstd-index-first": (
        "decoded",
        {
            "chunks": (24, ROW),
            **sharding(8, codecs=[zarr.codecs.BytesCodec(), zarr.codecs.ZstdCodec()], index_location="start"),
        },
    ),
    "transposed": ("decoded", {"chunks": (16, ROW), "filters": zarr.codecs.TransposeCodec(order=(1, 0))}),
    "format-2-packed": ("decoded", {"chunks": (16, ROW), "zarr_format": 2}),
    "format-2-columns": ("decoded", {"chunks": (16, ROW), "zarr_format": 2, "order": "F", **RAW}),
    "rows-cut": ("generic", {"chunks": (7, 100), **RAW}),
    "rows-cut-in-shards": ("generic", {"chunks": (8, 256), "shards": (24, ROW)}),
    "chunks-wider-than-rows": ("generic", {"chunks": (8, 600), **RAW}),
    "packed-shards": (
        "generic",
        {"chunks": (24, ROW), **sharding(8), "compressors": zarr.codecs.ZstdCodec()},
    ),
    "unusual-index": (
        "generic",
        {"chunks": (24, ROW), **sharding(8, index_codecs=[zarr.codecs.BytesCodec()])},
    ),
    "shards-in-shards": (
        "generic",
        {"chunks": (24, ROW), **sharding(8, codecs=[zarr.codecs.ShardingCodec(chunk_shape=(4, ROW))])},
    ),
}


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")  # zarr's, of packed-shards
@pytest.mark.parametrize(("way", "options"), LAYOUTS.values(), ids=LAYOUTS)
async def test_any_layout(tmp_path: Path, way: str, options: dict[str, Any]) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    async with open_zarr(tmp_path / "z") as store:
        assert store.ways == (way,) * 3
        engine = store.engine.name if store.engine else ""
        assert store.name == {"raw": f"zarr/{engine}"}.get(way, f"zarr/{way}")
        assert (store.engine is None) == (store.read_stats is None) == (way == "generic")
        await check(store, ROWS)


@pytest.mark.parametrize(
    "name", ["unsharded", "sharded", "checksums-in-shards", "format-2", "zstd", "rows-cut"]
)
async def test_chunks_that_were_left_out(tmp_path: Path, name: str) -> None:
    """zarr's own writers leave out chunks of the fill value; that is content, not damage."""
    rows, fill = ROWS.copy(), 7
    rows[:, 16:48] = fill  # whole shards, and parts of some
    rows[1, 8:] = fill
    rows[2] = fill
    await asyncio.to_thread(write, tmp_path / "z", rows, fill_value=fill, **LAYOUTS[name][1])
    async with open_zarr(tmp_path / "z") as store:
        await check(store, rows)


async def test_nothing_but_fill_values(tmp_path: Path) -> None:
    rows = np.full_like(ROWS, 3)
    await asyncio.to_thread(write, tmp_path / "z", rows, fill_value=3, chunks=(16, ROW), **RAW)
    async with open_zarr(tmp_path / "z") as store:
        assert store.name == "zarr/empty"
        await check(store, rows)


async def test_format_2_without_a_fill_value(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[:, :32] = 0
    await asyncio.to_thread(
        write, tmp_path / "z", rows, zarr_format=2, chunks=(16, ROW), fill_value=None, **RAW
    )
    async with open_zarr(tmp_path / "z") as store:
        await check(store, rows)


async def test_layers_of_different_layouts(tmp_path: Path) -> None:
    """Each layer goes its own way, and the store's name says the slowest."""
    layouts = [LAYOUTS["sharded"][1], LAYOUTS["zstd"][1], LAYOUTS["rows-cut"][1]]
    await asyncio.to_thread(write, tmp_path / "z", each=layouts)
    async with open_zarr(tmp_path / "z") as store:
        assert store.ways == ("raw", "decoded", "generic")
        assert store.name == "zarr/generic"
        await check(store, ROWS)
    with pytest.raises(ConfigError, match=r"'buffered' cannot read layers/2"):
        await ZarrStore.open(tmp_path / "z", GEOMETRY, "buffered")


async def test_consolidated_metadata(tmp_path: Path) -> None:
    """What the group says of its arrays holds, then; zarr knows."""
    await asyncio.to_thread(write, tmp_path / "z", zarr_format=2, chunks=(16, ROW), **RAW)
    await asyncio.to_thread(zarr.consolidate_metadata, tmp_path / "z")
    async with open_zarr(tmp_path / "z") as store:
        assert store.ways == ("raw",) * 3
        await check(store, ROWS)


@pytest.mark.parametrize("gap_bytes", [0, 5 * ROW, 1 << 30])
@pytest.mark.parametrize("name", ["sharded", "unsharded"])
async def test_gaps_are_read_over_within_a_chunk_only(tmp_path: Path, name: str, gap_bytes: int) -> None:
    rows = ROWS.copy()
    rows[:, 48:56] = 0
    await asyncio.to_thread(write, tmp_path / "z", rows, **LAYOUTS[name][1])
    async with open_zarr(tmp_path / "z", max_gap_bytes=gap_bytes) as store:
        await check(store, rows)


async def test_a_read_needs_few_requests(tmp_path: Path) -> None:
    """Chunks that follow each other in a shard are one extent, neighbours one read."""
    await asyncio.to_thread(write, tmp_path / "z", **LAYOUTS["sharded"][1])
    async with open_zarr(tmp_path / "z", "buffered", max_gap_bytes=0) as store:
        out = np.empty(SHAPE, np.uint8)
        reads = []
        for ids in (np.arange(80), np.arange(24), np.array([3, 4, 5, 40, 41, 23, 24])):
            before = store.read_stats.reads if store.read_stats else 0
            await store.read_rows(0, ids, out[: len(ids)])
            reads.append((store.read_stats.reads if store.read_stats else 0) - before)
        assert reads == [4, 1, 4]


async def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    """A file a row: reads of all files at once, several at a time, and one file gone."""
    count = MAX_OPEN_FILES + 60
    geometry, rows = wide(count)
    await asyncio.to_thread(write, tmp_path / "z", rows, chunks=(1, geometry.stride_bytes), **DOTS, **RAW)
    async with open_zarr(tmp_path / "z", geometry=geometry) as store:
        outs = [np.empty(rows.shape[1:], np.uint8) for _ in range(4)]
        backwards = np.arange(count)[::-1].copy()
        await asyncio.gather(
            store.read_range(0, 0, count, outs[0]),
            store.read_rows(1, backwards, outs[1]),
            store.read_rows(2, backwards, outs[2]),
            store.read_range(1, 0, count, outs[3]),
        )
        for out, expected in zip(outs, (rows[0], rows[1, ::-1], rows[2, ::-1], rows[1]), strict=True):
            np.testing.assert_array_equal(out, expected)
        await asyncio.to_thread((tmp_path / "z/layers/0/c.3.0").unlink)
        with pytest.raises(BundleCorruptError, match=r"layers/0/c\.3\.0: disappeared while in use"):
            await store.read_range(0, 0, count, outs[0])
        with pytest.raises(BundleCorruptError, match="disappeared"):
            await store.read_rows(0, np.array([3]), outs[0][:1])
        await store.read_range(1, 0, count, outs[0])
        np.testing.assert_array_equal(outs[0], rows[1])


LAYOUT = st.fixed_dictionaries(
    {
        "chunk": st.integers(3, 90),
        "shard": st.sampled_from([None, 1, 2, 3, 20]),
        "width": st.sampled_from([ROW, ROW, ROW, 512, 100]),
        "compressors": st.sampled_from([None, None, CRC, zarr.codecs.ZstdCodec(), zarr.codecs.BloscCodec()]),
        "fill_value": st.sampled_from([0, 1]),
        "backend": st.sampled_from(["auto", "buffered"]),
        "holes": st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=3),
        "ids": st.lists(st.integers(0, 79), min_size=1, max_size=60),
    }
)


def test_random_layouts(tmp_path: Path) -> None:
    """Against zarr's own reading of what zarr wrote."""
    count = 0

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(LAYOUT)
    def one(drawn: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        root = tmp_path / str(count)
        chunks = (drawn["chunk"], min(drawn["width"], ROW))
        options = {name: drawn[name] for name in ("compressors", "fill_value")} | {"chunks": chunks, **DOTS}
        if drawn["shard"] and chunks[1] == ROW:
            options["shards"] = (drawn["chunk"] * drawn["shard"], ROW)
        rows = ROWS.copy()
        for start, stop in drawn["holes"]:
            rows[:, start:stop] = drawn["fill_value"]
        write(root, rows, **options)
        written = zarr.open_group(root, mode="r")
        backend = drawn["backend"] if chunks[1] == ROW else "auto"

        async def read() -> None:
            async with open_zarr(root, backend) as store:
                await check(store, np.stack([written[f"layers/{i}"][:] for i in range(3)]), drawn["ids"])

        asyncio.run(read())

    one()


@pytest.mark.parametrize("name", ["packed", "rows-cut"])
async def test_decoding_stays_off_the_event_loop(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time of each callback of the loop's thread, while chunks that take far longer are decoded."""
    geometry, rows = wide(512, d_model=2048)  # 8 KiB a row, 4 MiB a layer
    options = {
        "chunks": (512, geometry.stride_bytes // (2 if name == "rows-cut" else 1)),
        "filters": zarr.codecs.TransposeCodec(order=(1, 0)),  # which makes copying rows slow
        "compressors": [zarr.codecs.ZstdCodec(level=1), *CRC],
    }
    await asyncio.to_thread(write, tmp_path / "z", rows, **options)
    async with open_zarr(tmp_path / "z", geometry=geometry) as store:
        outs = [np.zeros(rows.shape[1:], np.uint8) for _ in range(6)]
        ids = np.random.default_rng(0).permutation(512)
        slowest_ns = [0]
        plain: Callable[[asyncio.Handle], None] = asyncio.Handle._run
        thread_ns = time.thread_time_ns

        def timed(handle: asyncio.Handle) -> None:
            if handle._loop is not loop:  # a worker thread's
                plain(handle)
                return
            began_ns = thread_ns()
            plain(handle)
            slowest_ns[-1] = max(slowest_ns[-1], thread_ns() - began_ns)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(asyncio.Handle, "_run", timed)
        gc.disable()  # what a collection costs depends on the tests before
        try:
            for _ in range(3):
                slowest_ns.append(0)
                await asyncio.gather(
                    *(store.read_rows(i, ids, outs[i]) for i in range(3)),
                    *(store.read_range(i, 0, 512, outs[3 + i]) for i in range(3)),
                )
        finally:
            gc.enable()
            monkeypatch.undo()
        for i in range(3):
            np.testing.assert_array_equal(outs[i], rows[i, ids])
            np.testing.assert_array_equal(outs[3 + i], rows[i])
        # What is slow by itself is slow each time; a virtual machine's clock counts its host's work, too.
        assert 0 < min(slowest_ns[1:]) < 5e6


async def test_chunks_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls are outstanding."""
    monkeypatch.setattr(zarr_store, "_CHUNK_MEMORY_BYTES", 2 * 8 * ROW)
    await asyncio.to_thread(write, tmp_path / "z", **LAYOUTS["default-sharded"][1])
    async with open_zarr(tmp_path / "z") as store:
        decoded = store._readers[0]
        assert isinstance(decoded, zarr_store.DecodedRows)
        stored, held, most = decoded._stored, 0, 0

        async def counted(number: int) -> Any:
            nonlocal held, most
            held += 1
            most = max(most, held)
            chunk = await stored(number)
            held -= 1
            return chunk

        monkeypatch.setattr(decoded, "_stored", counted)
        outs = [np.empty(SHAPE, np.uint8) for _ in range(8)]
        await asyncio.gather(*(store.read_range(0, 0, 80, out) for out in outs))
        assert most == 2
        for out in outs:
            np.testing.assert_array_equal(out, ROWS[0])


def test_a_converted_bundle_never_imports_zarr(tmp_path: Path) -> None:
    """Neither does a bundle file."""
    write_zarr_bundle(tmp_path / "z")
    code = (
        "import asyncio, sys; from pathlib import Path; from flashd.store.open import *\n"
        "async def use(directory):\n"
        "    manifest = open_manifest(directory)\n"
        "    for backend in ('auto', 'buffered', 'memory'):\n"
        "        await (await open_store(directory, manifest, backend)).close()\n"
        "    load_resident(directory, manifest)\n"
        "for name in sys.argv[1:]: asyncio.run(use(Path(name)))\n"
        "assert not {'zarr', 'gguf', 'torch'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "z"), str(tmp_path / "z-file")], check=True)
