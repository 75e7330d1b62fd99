"""Damaged zarr stores: every row right or a named error, never garbage and never zeros."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zarr
from numcodecs import Zstd
from zarr_writing import GEOMETRY, ROWS, SHAPE, check, open_zarr, wide, write

from flashd import kernels
from flashd.disk.files import MAX_OPEN_FILES
from flashd.errors import BundleCorruptError, DiskReadError, FlashdError
from flashd.store.zarr_store import ZarrStore
from flashd.testing.bundles import write_zarr

ROW = SHAPE[1]
SHARDED = {"chunks": (8, ROW), "shards": (24, ROW), "compressors": None}
INDEX_BYTES = 3 * 16 + 4
INDEX_FIRST = {
    "chunks": (24, ROW),
    "serializer": zarr.codecs.ShardingCodec(chunk_shape=(8, ROW), index_location="start"),
    "compressors": None,
}
UNSHARDED = {"chunks": (16, ROW), "compressors": None}
ZSTD = {"chunks": (16, ROW), "compressors": zarr.codecs.ZstdCodec()}
BLOSC_SHARDS = {"chunks": (8, ROW), "shards": (24, ROW), "compressors": zarr.codecs.BloscCodec()}
CUT = {"chunks": (16, 100), "compressors": None}

Damage = Callable[[Path], None]


def flip(at: int) -> Damage:
    """Change one byte; from the end if ``at`` is negative."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)

    return damage


def cut(by: int) -> Damage:
    return lambda path: os.truncate(path, path.stat().st_size - by)


def entry(chunk: int, offset: int, nbytes: int) -> Damage:
    """Another entry in a shard's index at the end, with a checksum that is right."""

    def damage(path: Path) -> None:
        data = np.fromfile(path, np.uint8)
        index = data[-INDEX_BYTES:-4]
        index.view("<u8").reshape(-1, 2)[chunk] = offset, nbytes
        kernels.crc32c(index.reshape(1, -1), data[-4:].view("<u4"))
        path.write_bytes(data.tobytes())

    return damage


def packed(nbytes: int) -> Damage:
    """A chunk that decodes well, to another size."""
    return lambda path: path.write_bytes(Zstd().encode(bytes(nbytes))) and None


AT_OPEN: dict[str, tuple[dict[str, Any], Damage, str]] = {
    **{
        f"index-byte-{at}": (SHARDED, flip(-at), r"c/1/0: the shard's index has checksum")
        for at in (1, 4, 5, 20, INDEX_BYTES)
    },
    **{
        f"first-index-byte-{at}": (INDEX_FIRST, flip(at), r"c/1/0: the shard's index has checksum")
        for at in (0, 17, INDEX_BYTES - 1)
    },
    "packed-index": (BLOSC_SHARDS, flip(-7), r"c/1/0: the shard's index has checksum"),
    "shard-cut": (SHARDED, cut(1), r"c/1/0: the shard's index has checksum"),
    "shard-cut-at-a-row": (SHARDED, cut(ROW), r"c/1/0: the shard's index has checksum"),
    "index-first-cut": (INDEX_FIRST, cut(1), r"c/1/0: chunk 5 has 4096 bytes at \d+, but the shard ends at"),
    "shard-without-index": (SHARDED, lambda path: os.truncate(path, 51), "51 bytes, its index alone has 52"),
    "empty-shard": (SHARDED, lambda path: os.truncate(path, 0), "0 bytes, its index alone has 52"),
    "behind-the-end": (SHARDED, entry(1, 12288 + 52, 4096), "chunk 4 has 4096 bytes at 12340, but the shard"),
    "huge-offset": (SHARDED, entry(1, 2**64 - 2, 4096), f"chunk 4 has 4096 bytes at {2**64 - 2}"),
    "huge-length": (SHARDED, entry(1, 8, 2**64 - 8), f"chunk 4 has {2**64 - 8} bytes at 8"),
    "half-left-out": (SHARDED, entry(1, 2**64 - 1, 4096), f"chunk 4 has 4096 bytes at {2**64 - 1}"),
    "short-chunk": (SHARDED, entry(2, 8192, 4095), "chunk 5 has 4095 bytes, expected 4096"),
    "long-chunk": (SHARDED, entry(2, 8192, 4100), "chunk 5 has 4100 bytes, expected 4096"),
    "short-file": (UNSHARDED, cut(1), "c/1/0: chunk 1 has 8191 bytes, expected 8192"),
    "long-file": (UNSHARDED, cut(-1), "c/1/0: chunk 1 has 8193 bytes, expected 8192"),
}


@pytest.mark.parametrize(("options", "damage", "said"), AT_OPEN.values(), ids=AT_OPEN)
async def test_found_when_opening(tmp_path: Path, options: dict[str, Any], damage: Damage, said: str) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    await asyncio.to_thread(damage, tmp_path / "z/layers/1/c/1/0")
    with pytest.raises(BundleCorruptError, match=said) as caught:
        await ZarrStore.open(tmp_path / "z", GEOMETRY)
    assert f"{tmp_path}/z/layers/1/c/1/0" in str(caught.value)
    assert str(caught.value).endswith("(layer 1)")


async def test_a_damaged_layer_leaves_the_others(tmp_path: Path) -> None:
    """For those who ask for it."""
    await asyncio.to_thread(write, tmp_path / "z", **SHARDED)
    await asyncio.to_thread(flip(-1), tmp_path / "z/layers/1/c/1/0")
    async with open_zarr(tmp_path / "z", keep_damaged=True) as store:
        out = np.empty(SHAPE, np.uint8)
        for _ in range(2):
            with pytest.raises(
                BundleCorruptError, match=r"c/1/0: the shard's index has .*again \(layer 1\)$"
            ):
                await store.read_range(1, 0, SHAPE[0], out)
            with pytest.raises(BundleCorruptError, match="index"):
                await store.read_rows(1, np.array([79]), out[:1])
        for layer in (0, 2):
            await store.read_range(layer, 0, SHAPE[0], out)
            np.testing.assert_array_equal(out, ROWS[layer])


WHEN_READING: dict[str, tuple[dict[str, Any], Damage, str]] = {
    "zstd-byte": (ZSTD, flip(20), r"layers/1: chunk 1: "),
    "zstd-cut": (ZSTD, cut(3), r"layers/1: chunk 1: "),
    "zstd-empty": (ZSTD, lambda path: path.write_bytes(b"") and None, r"layers/1: chunk 1: "),
    "decodes-to-less": (ZSTD, packed(8191), r"layers/1: chunk 1: .*8191"),
    "decodes-to-more": (ZSTD, packed(8704), r"layers/1: chunk 1: .*8704"),
    "blosc-size": (BLOSC_SHARDS, flip(4), r"layers/1: chunk 3: "),
    "rows-cut-short": ({**CUT, "chunks": (16, 512 // 2)}, cut(1), r"layers/1: "),
}


@pytest.mark.parametrize(("options", "damage", "said"), WHEN_READING.values(), ids=WHEN_READING)
async def test_found_when_reading(tmp_path: Path, options: dict[str, Any], damage: Damage, said: str) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    await asyncio.to_thread(damage, tmp_path / "z/layers/1/c/1/0")
    async with open_zarr(tmp_path / "z") as store:
        out = np.empty(SHAPE, np.uint8)
        with pytest.raises(BundleCorruptError, match=said):
            await store.read_range(1, 0, SHAPE[0], out)
        with pytest.raises(BundleCorruptError, match=said):
            await store.read_rows(1, np.array([0, 30, 79, 24]), out[:4])
        await store.read_range(1, 48, 80, out[:32])
        np.testing.assert_array_equal(out[:32], ROWS[1, 48:])
        await store.read_range(0, 0, SHAPE[0], out)
        np.testing.assert_array_equal(out, ROWS[0])


async def test_any_byte_of_any_file(tmp_path: Path) -> None:
    """Of raw shards and their metadata, before opening: an error, or no row is wrong but those that the
    byte belongs to, which the bundle's own checksums guard."""
    await asyncio.to_thread(write_zarr, tmp_path / "z", ROWS)
    files = sorted(path for path in (tmp_path / "z").rglob("*") if path.is_file())
    rng = np.random.default_rng(3)
    outcomes = set()
    for number in range(40):
        path = files[number % len(files)]
        good = path.read_bytes()
        at = int(rng.integers(len(good)))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << int(rng.integers(8))]) + good[at + 1 :])
        try:
            store = await ZarrStore.open(tmp_path / "z", GEOMETRY, "buffered")
        except FlashdError:
            outcomes.add("refused")
        else:
            wrong = 0
            for layer, expected in enumerate(ROWS):
                out = np.empty(SHAPE, np.uint8)
                await store.read_range(layer, 0, SHAPE[0], out)
                wrong += int((out != expected).sum())
            assert wrong <= 1
            outcomes.add("one byte" if wrong else "harmless")
            await store.close()
        path.write_bytes(good)
    assert outcomes >= {"refused", "one byte"}


@pytest.mark.parametrize("options", [SHARDED, UNSHARDED, ZSTD], ids=["sharded", "unsharded", "zstd"])
async def test_a_file_that_is_deleted_stays_readable_while_it_is_open(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    async with open_zarr(tmp_path / "z") as store:
        await asyncio.to_thread(shutil.rmtree, tmp_path / "z/layers/1")
        await check(store, ROWS)


async def test_a_chunk_that_only_zarr_reads_disappears(tmp_path: Path) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **CUT)
    async with open_zarr(tmp_path / "z") as store:
        await asyncio.to_thread(shutil.rmtree, tmp_path / "z/layers/1/c/1")
        out = np.empty(SHAPE, np.uint8)
        with pytest.raises(BundleCorruptError, match=r"layers/1/c/1/\d: disappeared while in use"):
            await store.read_range(1, 0, SHAPE[0], out)
        with pytest.raises(BundleCorruptError, match="disappeared"):
            await store.read_rows(1, np.arange(0, 80, 3), out[:27])
        await store.read_range(0, 0, SHAPE[0], out)
        np.testing.assert_array_equal(out, ROWS[0])
        with pytest.raises(BundleCorruptError, match="disappeared"):
            await store.read_range(1, 0, SHAPE[0], out)
    gc.collect()  # what zarr left pending would be reported here


@pytest.mark.parametrize("chunk", [(1, ROW), (1, ROW // 2)], ids=["raw", "rows-cut"])
async def test_a_device_error(tmp_path: Path, chunk: tuple[int, int]) -> None:
    """Reading memory that is not mapped fails with EIO: a real one."""
    count = MAX_OPEN_FILES // 3 + 9  # more files in all than are kept open: this one is opened late
    geometry, rows = wide(count)
    dots = {"name": "default", "separator": "."}
    await asyncio.to_thread(
        write, tmp_path / "z", rows, chunks=chunk, compressors=None, chunk_key_encoding=dots
    )
    backend = "buffered" if chunk[1] == ROW else "auto"
    path = tmp_path / "z/layers/2/c.5.0"
    async with open_zarr(tmp_path / "z", backend, geometry=geometry) as store:
        await asyncio.to_thread(path.unlink)
        await asyncio.to_thread(path.symlink_to, "/proc/self/mem")
        out = np.empty((1, ROW), np.uint8)
        with pytest.raises(DiskReadError, match="Input/output error") as caught:
            await store.read_rows(2, np.array([5]), out)
        assert "layers/2" in str(caught.value)
        if backend == "buffered":
            assert f"{path}: reading 512 bytes at offset 0" in str(caught.value)
        await store.read_rows(2, np.array([6]), out)
        np.testing.assert_array_equal(out[0], rows[2, 6])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:2], "layers/2"),
        (ROWS[:, :-1], r"layers/0 is uint8\(79, 512\), expected uint8\(80, 512\)"),
        (ROWS[:, :, :-1], "expected"),
        (ROWS.astype(np.uint16), "uint16"),
    ],
)
async def test_arrays_of_another_shape(tmp_path: Path, rows: Any, said: str) -> None:
    await asyncio.to_thread(write, tmp_path / "z", rows)
    with pytest.raises(BundleCorruptError, match=said):
        await ZarrStore.open(tmp_path / "z", GEOMETRY)


async def test_no_zarr_at_all(tmp_path: Path) -> None:
    for root in (tmp_path / "nothing", tmp_path):
        with pytest.raises(BundleCorruptError, match=str(root)):
            await ZarrStore.open(root, GEOMETRY)


@pytest.mark.parametrize("options", [SHARDED, ZSTD, CUT], ids=["raw", "zstd", "rows-cut"])
async def test_nothing_is_left_behind(tmp_path: Path, options: dict[str, Any]) -> None:
    """Descriptors and threads, after cancelled reads, failed opens and closing twice at the same time."""
    await asyncio.to_thread(write, tmp_path / "z", **options)
    await asyncio.to_thread(write, tmp_path / "bad", **options)
    await asyncio.to_thread(flip(-2), tmp_path / "bad/layers/2/zarr.json")

    async def use() -> None:
        with pytest.raises(BundleCorruptError):
            await ZarrStore.open(tmp_path / "bad", GEOMETRY)
        store = await ZarrStore.open(tmp_path / "z", GEOMETRY)
        outs = [np.empty(SHAPE, np.uint8) for _ in range(12)]
        reads = [asyncio.create_task(store.read_range(i % 3, 0, 80, out)) for i, out in enumerate(outs)]
        for turns in range(12):
            reads[turns].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(store.close(), store.close())
        await asyncio.gather(*reads, return_exceptions=True)
        await store.close()
        with pytest.raises(ValueError, match="closed"):
            await store.read_rows(0, np.array([1]), outs[0][:1])

    process = psutil.Process()
    await use()  # the loop's own threads, zarr's import
    gc.collect()
    before = process.num_fds()
    for _ in range(3):
        await use()
    gc.collect()
    assert process.num_fds() <= before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flashd-")]
