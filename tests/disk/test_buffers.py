from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest

from flashd.disk.buffers import aligned_empty


@pytest.mark.parametrize("alignment", [1, 512, 4096, 65536, 1 << 21])
@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 100_001])
def test_size_alignment_and_content(nbytes: int, alignment: int) -> None:
    array = aligned_empty(nbytes, alignment)
    assert array.shape == (nbytes,)
    assert array.dtype == np.uint8
    assert not array.any()
    array[:] = 255
    if nbytes:
        assert array.ctypes.data % alignment == 0


@pytest.mark.parametrize(("nbytes", "alignment"), [(-1, 4096), (1, 0), (1, 3000)])
def test_wrong_arguments(nbytes: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        aligned_empty(nbytes, alignment)


def test_memory_is_private_and_goes_back_when_the_last_view_dies() -> None:
    process = psutil.Process()
    size = 64 << 20
    gc.collect()
    before = process.memory_info()
    array = aligned_empty(size)
    array[:] = 1
    view = array[10:20]
    del array
    held = process.memory_info()
    assert held.rss - before.rss > 0.9 * size
    assert held.shared - before.shared < size / 2
    assert view[0] == 1
    del view
    gc.collect()
    assert process.memory_info().rss - before.rss < 0.1 * size
