"""zarr stores made to exhaust memory or to hang who opens them: a named error, and little memory."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import psutil
import pytest
import zarr
from zarr_writing import GEOMETRY, ROWS, SHAPE, check, open_zarr, write

from flashd.errors import BundleCorruptError
from flashd.store.zarr_store import ZarrStore

ROW = SHAPE[1]
BIG_BYTES = 1 << 30
ZSTD = {"chunks": (16, ROW), "compressors": zarr.codecs.ZstdCodec()}
SHARD = {"chunks": (8, ROW), "shards": (16, ROW), "compressors": zarr.codecs.ZstdCodec()}
RAW = {"chunks": (16, ROW), "compressors": None}
CUT = {"chunks": (16, ROW // 2), "compressors": zarr.codecs.ZstdCodec()}


def zstd_frame(nbytes: int, *, says: int | None = None) -> bytes:
    """One frame of repeated bytes, 4 bytes for 128 KiB; by default it does not say how many."""
    frame = struct.pack("<IBB", 0xFD2FB528, 0 if says is None else 0xC0, 0x50)
    blocks = [min(128 << 10, nbytes - start) for start in range(0, nbytes, 128 << 10)]
    frame += b"" if says is None else says.to_bytes(8, "little")
    for number, size in enumerate(blocks):
        frame += (int(number == len(blocks) - 1) | 1 << 1 | size << 3).to_bytes(3, "little") + b"\7"
    return frame


def members(pack: Callable[[bytes], bytes]) -> bytes:
    """A stream of many parts, which is made in no time."""
    return pack(bytes(16 << 20)) * (BIG_BYTES >> 24)


def zeros_zlib() -> bytes:
    packer = zlib.compressobj(1)
    return b"".join(packer.compress(bytes(16 << 20)) for _ in range(BIG_BYTES >> 24)) + packer.flush()


def blosc_saying(nbytes: int) -> bytes:
    good = bytearray(numcodecs.Blosc().encode(bytes(8192)))
    good[4:8] = nbytes.to_bytes(4, "little")
    return bytes(good)


V2 = {"zarr_format": 2, "chunks": (16, ROW)}
BOMBS: dict[str, tuple[dict[str, Any], Callable[[], bytes]]] = {
    "zstd-silent": (ZSTD, lambda: zstd_frame(BIG_BYTES)),
    "zstd-honest": (ZSTD, lambda: zstd_frame(BIG_BYTES, says=BIG_BYTES)),
    "zstd-liar": (ZSTD, lambda: zstd_frame(BIG_BYTES, says=8192)),
    "zstd-second-frame": (ZSTD, lambda: numcodecs.Zstd().encode(bytes(8192)) + zstd_frame(BIG_BYTES)),
    "zstd-rows-cut": (CUT, lambda: zstd_frame(BIG_BYTES)),
    "blosc": (
        {**ZSTD, "compressors": zarr.codecs.BloscCodec()},
        lambda: blosc_saying(BIG_BYTES),
    ),
    "gzip": ({**ZSTD, "compressors": zarr.codecs.GzipCodec()}, lambda: members(gzip.compress)),
    "v2-zstd": ({**V2, "compressors": numcodecs.Zstd()}, lambda: zstd_frame(BIG_BYTES)),
    "v2-gzip": ({**V2, "compressors": numcodecs.GZip()}, lambda: members(gzip.compress)),
    "v2-zlib": ({**V2, "compressors": numcodecs.Zlib()}, zeros_zlib),
    "v2-bz2": ({**V2, "compressors": numcodecs.BZ2()}, lambda: members(bz2.compress)),
    "v2-lz4": (
        {**V2, "compressors": numcodecs.LZ4()},
        lambda: BIG_BYTES.to_bytes(4, "little") + numcodecs.LZ4().encode(bytes(8192))[4:],
    ),
}


@pytest.mark.parametrize(("options", "bomb"), BOMBS.values(), ids=BOMBS)
async def test_a_chunk_that_unpacks_to_gigabytes(
    tmp_path: Path, options: dict[str, Any], bomb: Callable[[], bytes]
) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    stored = await asyncio.to_thread(bomb)
    said = "layers/1: " if options is CUT else "layers/1: chunk 1: "
    if not stored.startswith(zstd_frame(1)[:4]):  # the others are found out before, or while, unpacking
        said += r"decodes to \d+ bytes or more, expected 8192"
    key = "1.0" if options.get("zarr_format") == 2 else "c/1/0"
    # What a codec may be given is bounded, too: less of those that pack badly still is too much.
    await asyncio.to_thread((tmp_path / "z/layers/1" / key).write_bytes, stored[: 64 << 10])
    async with open_zarr(tmp_path / "z") as store:
        out = np.empty(SHAPE, np.uint8)
        await store.read_range(0, 0, SHAPE[0], out)
        peak, stop = [0], threading.Event()
        watcher = threading.Thread(target=watch, args=(peak, stop))
        before = psutil.Process().memory_info().rss
        watcher.start()
        try:
            with pytest.raises(BundleCorruptError, match=said):
                await store.read_range(1, 16, 32, out[:16])
        finally:
            stop.set()
            watcher.join()
        assert peak[0] - before < 32 << 20
        await store.read_range(2, 0, SHAPE[0], out)
        np.testing.assert_array_equal(out, ROWS[2])


def watch(peak: list[int], stop: threading.Event) -> None:
    process = psutil.Process()
    while not stop.is_set():
        peak[0] = max(peak[0], process.memory_info().rss)
        stop.wait(0.001)


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("silent", [False, True])
async def test_zstd_frames_of_every_kind(tmp_path: Path, frames: int, silent: bool) -> None:
    """Which say their size or not, one after the other, with something to skip."""
    await asyncio.to_thread(write, tmp_path / "z", **ZSTD)
    each = 8192 // frames
    chunk = struct.pack("<II", 0x184D2A51, 3) + b"abc"
    chunk += zstd_frame(each, says=None if silent else each) * frames
    await asyncio.to_thread((tmp_path / "z/layers/1/c/1/0").write_bytes, chunk)
    expected = ROWS.copy()
    expected[1, 16:32] = 7
    async with open_zarr(tmp_path / "z") as store:
        await check(store, expected)


@pytest.mark.parametrize("options", [ZSTD, CUT], ids=["decoded", "rows-cut"])
async def test_a_stored_chunk_of_terabytes(tmp_path: Path, options: dict[str, Any]) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    await asyncio.to_thread(os.truncate, tmp_path / "z/layers/1/c/1/0", 1 << 40)
    said = rf"layers/1/c/1/0: .*{1 << 40} bytes.* expected at most"
    if options is ZSTD:
        with pytest.raises(BundleCorruptError, match=said):
            await ZarrStore.open(tmp_path / "z", GEOMETRY)
    async with open_zarr(tmp_path / "z", keep_damaged=True) as store:
        out = np.empty(SHAPE, np.uint8)
        with pytest.raises(BundleCorruptError, match=said):
            await store.read_range(1, 0, SHAPE[0], out)
        await store.read_range(0, 0, SHAPE[0], out)
        np.testing.assert_array_equal(out, ROWS[0])


@pytest.mark.parametrize("options", [RAW, ZSTD, SHARD, CUT], ids=["raw", "zstd", "sharded", "rows-cut"])
async def test_a_fifo_for_a_chunk(tmp_path: Path, options: dict[str, Any]) -> None:
    await asyncio.to_thread(write, tmp_path / "z", **options)
    path = tmp_path / "z/layers/1/c/1/0"
    await asyncio.to_thread(path.unlink)
    await asyncio.to_thread(os.mkfifo, path)
    async with asyncio.timeout(20):
        if options is not CUT:
            with pytest.raises(BundleCorruptError, match=r"c/1/0: not a regular file"):
                await ZarrStore.open(tmp_path / "z", GEOMETRY)
        async with open_zarr(tmp_path / "z", keep_damaged=True) as store:
            with pytest.raises(BundleCorruptError, match=r"c/1/0: not a regular file"):
                await store.read_range(1, 0, SHAPE[0], np.empty(SHAPE, np.uint8))


def brackets(path: Path) -> None:
    path.write_text("[" * 100_000)


def padded(path: Path) -> None:
    path.write_text(path.read_text() + " " * (1 << 20))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def no_rows(path: Path) -> None:
    document = json.loads(path.read_text())
    document["chunk_grid"]["configuration"]["chunk_shape"] = [0, ROW]
    path.write_text(json.dumps(document))


def no_inner_rows(path: Path) -> None:
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"]["chunk_shape"] = [0, ROW]
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("options", [RAW, SHARD], ids=["raw", "sharded"])
@pytest.mark.parametrize("damage", [brackets, padded, fifo, no_rows, no_inner_rows])
async def test_metadata(tmp_path: Path, options: dict[str, Any], damage: Callable[[Path], None]) -> None:
    if damage is no_inner_rows and options is RAW:
        options = {**SHARD, "compressors": None}
    await asyncio.to_thread(write, tmp_path / "z", **options)
    await asyncio.to_thread(damage, tmp_path / "z/layers/1/zarr.json")
    async with asyncio.timeout(20):
        with pytest.raises(BundleCorruptError, match="layers/1"):
            await ZarrStore.open(tmp_path / "z", GEOMETRY)
