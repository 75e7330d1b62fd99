from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.disk import native_engine, probe
from flashd.disk.buffers import aligned_empty
from flashd.disk.native_engine import DEFAULT_DEPTH, NativeEngine
from flashd.disk.probe import open_engine, probe_direct, statx_alignment
from flashd.errors import ConfigError, DiskReadError
from flashd.testing.engine_suite import one_read
from flashd.testing.fake_engine import FakeEngine

CONTENT = os.urandom(200_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "f"
    file.write_bytes(CONTENT)
    return file


async def test_auto_takes_the_fastest_that_reads(path: Path) -> None:
    engine = await open_engine(path)
    assert (engine.name, engine.direct, engine.depth) == ("uring", True, DEFAULT_DEPTH["uring"])
    assert "alignment" in engine.reason
    dest = aligned_empty(200_000)
    await engine.read(one_read(0, dest))
    assert dest.tobytes() == CONTENT
    await engine.close()


@pytest.mark.parametrize("backend", ["uring", "threads", "buffered"])
async def test_the_backend_that_was_asked_for(path: Path, backend: str) -> None:
    engine = await open_engine(path, backend, depth=3)
    assert (engine.name, engine.direct, engine.depth) == (backend, backend != "buffered", 3)
    if backend == "buffered":
        assert engine.alignment_bytes == 1
    dest = aligned_empty(200_000)
    await engine.read(one_read(0, dest))
    assert dest.tobytes() == CONTENT
    await engine.close()


async def test_falls_back_where_o_direct_is_refused() -> None:
    """procfs opens no file with O_DIRECT."""
    engine = await open_engine("/proc/self/status")
    assert engine.name == "buffered"
    assert engine.reason.count("Invalid argument") == 2
    dest = np.empty(5, np.uint8)
    await engine.read(one_read(0, dest))
    assert dest.tobytes() == b"Name:"
    await engine.close()
    for backend in ("uring", "threads"):
        with pytest.raises(ConfigError, match=f"/proc/self/status: backend {backend}: open with O_DIRECT"):
            await open_engine("/proc/self/status", backend)


async def test_falls_back_where_opening_works_but_reading_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network and FUSE mounts accept the flag and fail the read."""
    real = os.preadv

    def refuse(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(probe.os, "preadv", refuse)
    engine = await open_engine(path)
    assert engine.name == "buffered"
    assert engine.reason.endswith("reading with O_DIRECT: Invalid argument)")
    await engine.close()


async def test_an_engine_that_opens_and_cannot_read_is_passed_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring may be there and its reads refused: only a read through it tells."""
    real = native_engine.open_native
    content = np.frombuffer(CONTENT, np.uint8).copy()

    def open_native(name: str, *args: Any) -> NativeEngine:
        return FakeEngine(content, einval_first=1) if name == "uring" else real(name, *args)

    monkeypatch.setattr(native_engine, "open_native", open_native)
    engine = await open_engine(path)
    assert engine.name == "threads"
    assert "uring: fake: reading 4096 bytes at offset 0 failed: Invalid argument" in engine.reason
    await engine.close()


async def test_a_bad_sector_is_no_reason_to_change_the_backend(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.frombuffer(CONTENT, np.uint8).copy()
    monkeypatch.setattr(native_engine, "open_native", lambda *args: FakeEngine(content, eio_share=1.0))
    engine = await open_engine(path)
    assert engine.name == "fake"
    await engine.close()


async def test_without_the_native_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_engine, "AVAILABLE", False)
    engine = await open_engine(path)
    assert engine.name == "buffered"
    assert "native module is not installed" in engine.reason
    await engine.close()
    with pytest.raises(ConfigError, match="backend uring: the native module is not installed"):
        await open_engine(path, "uring")


def test_probing_finds_what_the_reads_need(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without statx, and on a device with 4096-byte sectors: the first alignment that works."""
    monkeypatch.setattr(probe, "statx_alignment", lambda fd: None)
    stated, why = probe_direct(str(path))
    assert stated in probe.PROBED_ALIGNMENTS_BYTES
    assert "found by reading" in why
    real = probe.try_direct
    monkeypatch.setattr(probe, "try_direct", lambda fd, a: real(fd, a) if a >= 4096 else "Invalid argument")
    assert probe_direct(str(path))[0] == 4096


def test_statx_agrees_with_what_works(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    stated = statx_alignment(fd)
    assert stated is None or (stated > 0 and probe.try_direct(fd, stated) is None)
    os.close(fd)


async def test_unknown_backend_lists_the_known(path: Path) -> None:
    with pytest.raises(ConfigError, match="'mmap'; known: auto, uring, threads, buffered"):
        await open_engine(path, "mmap")


@pytest.mark.parametrize("backend", ["auto", "uring", "threads", "buffered"])
async def test_missing_file(tmp_path: Path, backend: str) -> None:
    with pytest.raises(DiskReadError, match="No such file"):
        await open_engine(tmp_path / "nothing", backend)


@pytest.mark.parametrize("backend", ["auto", "uring", "threads", "buffered"])
async def test_a_fifo_does_not_hold_the_opening(tmp_path: Path, backend: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DiskReadError, match="not a regular file"):
        await open_engine(tmp_path / "fifo", backend)


@pytest.mark.parametrize("depth", [-1, 0, 4097])
@pytest.mark.parametrize("backend", ["auto", "uring", "threads", "buffered"])
async def test_depths_that_cannot_be(path: Path, backend: str, depth: int) -> None:
    with pytest.raises(ConfigError, match=f"depth is {depth}, expected 1 to 4096"):
        await open_engine(path, backend, depth=depth)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 513])
async def test_tiny_files(tmp_path: Path, nbytes: int) -> None:
    file = tmp_path / "tiny"
    content = os.urandom(nbytes)
    file.write_bytes(content)
    engine = await open_engine(file)
    dest = np.empty(nbytes, np.uint8)
    await engine.read(one_read(0, dest))
    assert dest.tobytes() == content
    await engine.close()
