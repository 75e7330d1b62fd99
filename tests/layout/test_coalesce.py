from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flashd.layout.coalesce import coalesce_runs


@given(st.lists(st.integers(0, 40), max_size=80))
def test_runs_cover_the_ids_and_are_as_long_as_can_be(ids: list[int]) -> None:
    wanted = np.array(ids, np.int64)
    first, count = coalesce_runs(wanted)
    rebuilt = [int(wanted[at]) + i for at, n in zip(first, count, strict=True) for i in range(n)]
    assert rebuilt == ids
    for at in first[1:]:
        assert ids[at] != ids[at - 1] + 1


def test_no_ids() -> None:
    first, count = coalesce_runs(np.empty(0, np.int64))
    assert len(first) == len(count) == 0
