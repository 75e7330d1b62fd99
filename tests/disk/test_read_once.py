from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashd.disk.read_once import ReadOnce
from flashd.errors import BundleCorruptError, DiskReadError

SIZE = 20 << 20


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache, as mincore(2) counts them."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(SIZE), pages) == 0
        del first
        return sum(flags & 1 for flags in pages)


@pytest.fixture
def path() -> Iterator[Path]:
    """Beside this file and not in the temporary directory, which may be a tmpfs: there the page
    cache is the file."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".read-once-") as directory:
        file = Path(directory) / "f"
        with file.open("wb") as out:
            out.write(os.urandom(SIZE))
            out.flush()
            os.fsync(out.fileno())
        yield file


def test_reads_and_leaves_nothing_in_the_page_cache(path: Path) -> None:
    assert cached_pages(path) > 0.9 * SIZE / mmap.PAGESIZE
    out = np.empty(SIZE - 77, np.uint8)
    with ReadOnce(path) as file:
        assert file.size_bytes == SIZE
        file.read_into(77, out)
    assert out.tobytes() == path.read_bytes()[77:]
    with ReadOnce(path) as file:
        file.read_into(0, np.empty(SIZE, np.uint8))
    assert cached_pages(path) < 0.02 * SIZE / mmap.PAGESIZE


def test_end_of_file_and_missing_file(path: Path) -> None:
    with ReadOnce(path) as file, pytest.raises(BundleCorruptError, match="ends at byte"):
        file.read_into(SIZE - 5, np.empty(6, np.uint8))
    with pytest.raises(DiskReadError, match="No such file"):
        ReadOnce(path.with_name("nothing"))
