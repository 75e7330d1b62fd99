from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from flashd.disk.engine import ReadBatch


def column(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def test_counts_its_bytes() -> None:
    assert ReadBatch(column(0, 9), column(5, 3), np.empty(8, np.uint8), column(0, 5)).nbytes == 8
    assert ReadBatch(column(), column(), np.empty(0, np.uint8), column()).nbytes == 0


@pytest.mark.parametrize(
    ("offset", "length", "at"),
    [
        ([0], [9], [0]),
        ([0], [4], [5]),
        ([0], [1], [8]),
        ([-1], [1], [0]),
        ([0], [-1], [0]),
        ([0], [1], [-2]),
        ([0], [1 << 62], [1 << 62]),
        ([0, 1], [1, 1], [0]),
    ],
)
def test_reads_that_leave_the_destination(
    offset: Sequence[int], length: Sequence[int], at: Sequence[int]
) -> None:
    with pytest.raises(ValueError, match=r"destination|negative|int64"):
        ReadBatch(column(*offset), column(*length), np.empty(8, np.uint8), column(*at))


def test_columns_of_another_type() -> None:
    with pytest.raises(ValueError, match="int64"):
        ReadBatch(np.zeros(1, np.int32), column(1), np.empty(8, np.uint8), column(0))  # type: ignore[arg-type]  # the test's point


def test_destinations_of_another_kind() -> None:
    frozen = np.empty(8, np.uint8)
    frozen.flags.writeable = False
    for dest in (np.empty((2, 4), np.uint8), np.empty(8, np.int8), np.empty(16, np.uint8)[::2], frozen):
        with pytest.raises(ValueError, match="dest"):
            ReadBatch(column(0), column(1), dest, column(0))


@pytest.mark.parametrize(
    ("offset", "first", "places"),
    [([0], [1], 2), ([0, 9], [0, 0], 2), ([0, 9], [0, 3], 2), ([0, 9], [0, 2], 2), ([], [], 1), ([0], [], 1)],
)
def test_places_that_belong_to_no_read(offset: Sequence[int], first: Sequence[int], places: int) -> None:
    lengths = column(*[1] * places)
    with pytest.raises(ValueError, match="first"):
        ReadBatch(column(*offset), lengths, np.empty(8, np.uint8), column(*[0] * places), column(*first))


def test_too_many_places_and_files_that_cannot_be() -> None:
    dest, many = np.empty(1025, np.uint8), np.arange(1025)
    with pytest.raises(ValueError, match="1025 places, at most 1024"):
        ReadBatch(column(0), np.ones(1025, np.int64), dest, many, column(0))
    with pytest.raises(ValueError, match="file index"):
        ReadBatch(column(0), column(1), dest, column(0), None, column(-1))
    assert ReadBatch(column(0), column(1), dest, column(-1), None, column(3)).nbytes == 1
