from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from flashd.disk import probe
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch
from flashd.disk.probe import open_engine, probe_direct, statx_alignment
from flashd.errors import ConfigError, DiskReadError

CONTENT = os.urandom(200_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "f"
    file.write_bytes(CONTENT)
    return file


async def test_auto_and_direct_read_past_the_page_cache(path: Path) -> None:
    for backend in ("auto", "direct"):
        engine = await open_engine(path, backend)
        assert (engine.name, engine.direct) == ("threads", True)
        assert "alignment" in engine.reason
        dest = aligned_empty(200_000)
        await engine.read(ReadBatch(np.array([0]), np.array([200_000]), dest, np.array([0])))
        assert dest.tobytes() == CONTENT
        await engine.close()


async def test_buffered_when_asked_for(path: Path) -> None:
    engine = await open_engine(path, "buffered")
    assert (engine.name, engine.direct, engine.alignment_bytes) == ("buffered", False, 1)
    assert engine.reason == "asked for"
    await engine.close()


async def test_falls_back_where_o_direct_is_refused() -> None:
    """procfs opens no file with O_DIRECT."""
    engine = await open_engine("/proc/self/status")
    assert engine.name == "buffered"
    assert "Invalid argument" in engine.reason
    dest = np.empty(5, np.uint8)
    await engine.read(ReadBatch(np.array([0]), np.array([5]), dest, np.array([0])))
    assert dest.tobytes() == b"Name:"
    await engine.close()
    with pytest.raises(ConfigError, match="/proc/self/status: direct reads do not work here"):
        await open_engine("/proc/self/status", "direct")


async def test_falls_back_where_opening_works_but_reading_does_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network and FUSE mounts accept the flag and fail the read."""
    real = os.preadv

    def refuse(fd: int, buffers: tuple[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(probe.os, "preadv", refuse)
    engine = await open_engine(path)
    assert engine.name == "buffered"
    assert engine.reason.endswith("reading with O_DIRECT: Invalid argument")
    await engine.close()


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
    with pytest.raises(ConfigError, match="'mmap'; known: auto, direct, buffered"):
        await open_engine(path, "mmap")


@pytest.mark.parametrize("backend", ["auto", "direct", "buffered"])
async def test_missing_file(tmp_path: Path, backend: str) -> None:
    with pytest.raises(DiskReadError, match="No such file"):
        await open_engine(tmp_path / "nothing", backend)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 513])
async def test_tiny_files(tmp_path: Path, nbytes: int) -> None:
    file = tmp_path / "tiny"
    content = os.urandom(nbytes)
    file.write_bytes(content)
    engine = await open_engine(file)
    dest = np.empty(nbytes, np.uint8)
    await engine.read(ReadBatch(np.array([0]), np.array([nbytes]), dest, np.array([0])))
    assert dest.tobytes() == content
    await engine.close()
