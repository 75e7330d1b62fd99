"""predict against float64 and by its own scores; topk_union against a plain sort."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import BATCHES, COUNTS, DTYPES, EXAMPLES, SEEDS, WIDTHS


def check_union(ids: npt.NDArray[Any], mask: npt.NDArray[Any], active: npt.NDArray[Any]) -> None:
    assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)
    assert mask.flags.c_contiguous
    np.testing.assert_array_equal(ids, np.flatnonzero(active.any(axis=0)))
    np.testing.assert_array_equal(mask, active[:, ids])


@EXAMPLES
@given(
    d=WIDTHS,
    rank=WIDTHS,
    n=COUNTS,
    batch=BATCHES,
    dtypes=st.tuples(DTYPES, DTYPES),
    biased=st.tuples(st.booleans(), st.booleans()),
    threshold=st.sampled_from([0.0, -3.7, 1e9, -np.inf, np.inf]),
    seed=SEEDS,
)
def test_predict(
    verbs: ModuleType,
    d: int,
    rank: int,
    n: int,
    batch: int,
    dtypes: tuple[str, str],
    biased: tuple[bool, bool],
    threshold: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    w1, exact1 = reference.weights(rng, (rank, d), dtypes[0])
    w2, exact2 = reference.weights(rng, (n, rank), dtypes[1])
    x = reference.normal(rng, batch, d)
    b1 = reference.normal(rng, rank) if biased[0] else None
    b2 = reference.normal(rng, n) if biased[1] else None
    scores = np.full((batch, n), np.nan, np.float32)
    ids, mask = verbs.predict(w1, w2, x, threshold, b1, b2, scores)
    hidden = reference.linear(exact1, x, b1)
    reference.linear(exact2, np.maximum(hidden.value, 0), b2, hidden.error).check(scores)
    check_union(ids, mask, scores > np.float32(threshold))
    again = verbs.predict(w1, w2, x, threshold, b1, b2)
    reference.same(again[0], ids)
    reference.same(again[1], mask)


def test_a_score_at_the_threshold_is_not_active(verbs: ModuleType) -> None:
    w1 = np.eye(3, dtype=np.float32)
    levels = np.array(
        [0.1, np.nextafter(np.float32(0.1), np.float32(1)), 5, np.nan, -np.inf, 0.0], np.float32
    )
    w2 = np.zeros((6, 3), np.float32)
    x = np.zeros((1, 3), np.float32)
    for threshold, expected in (
        (0.1, [1, 2, 3]),
        (-np.inf, [0, 1, 2, 3, 5]),
        (np.inf, [3]),
        (-1, [0, 1, 2, 3, 5]),
    ):
        ids, _ = verbs.predict(w1, w2, x, threshold, None, levels)
        assert ids.tolist() == expected


@pytest.mark.parametrize("where", ["w1", "w2", "x", "b1", "b2"])
@pytest.mark.parametrize("batch", [1, 16])
def test_nan_hides_nothing(verbs: ModuleType, where: str, batch: int) -> None:
    """Neither ReLU nor the threshold makes a broken predictor say that nothing is needed."""
    arguments = {
        "w1": np.ones((19, 37), np.float32), "w2": np.full((9, 19), -1, np.float32),
        "x": np.ones((batch, 37), np.float32), "b1": np.zeros(19, np.float32), "b2": np.zeros(9, np.float32),
    }  # fmt: skip
    ids, mask = verbs.predict(**arguments, threshold=0.0)
    assert (len(ids), mask.shape) == (0, (batch, 0))
    arguments[where][0] = np.nan
    ids, mask = verbs.predict(**arguments, threshold=0.0)
    assert ids.tolist() == ([0] if where in ("w2", "b2") else list(range(9)))
    assert mask[0].all()
    if where == "x":
        assert not mask[1:].any()


def test_infinite_scores(verbs: ModuleType) -> None:
    w1, x = np.ones((4, 5), np.float32), np.ones((1, 5), np.float32)
    x[0, 2] = np.inf
    w2 = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1]], np.float32)
    scores = np.zeros((1, 3), np.float32)
    ids, _ = verbs.predict(w1, w2, x, 0.0, scores=scores)
    np.testing.assert_array_equal(scores, [[np.inf, -np.inf, np.nan]])
    assert ids.tolist() == [0, 2]


def best(row: list[float], k: int) -> set[int]:
    """The k highest by sorting Python floats: NaN first, then by value, then by id."""
    order = sorted(range(len(row)), key=lambda i: (row[i] == row[i], 0 if row[i] != row[i] else -row[i], i))
    return set(order[:k])


SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, 3.0]) | st.floats(width=32)


@EXAMPLES
@given(n=st.integers(1, 40), batch=BATCHES, data=st.data())
def test_topk_union(verbs: ModuleType, n: int, batch: int, data: st.DataObject) -> None:
    """Few distinct values, so that ties decide."""
    palette = data.draw(st.lists(SCORES, min_size=1, max_size=6))
    k = data.draw(st.integers(1, n))
    rng = np.random.default_rng(data.draw(SEEDS))
    scores = np.array(palette, np.float32)[rng.integers(0, len(palette), (batch, n))]
    ids, mask = verbs.topk_union(scores, k)
    active = np.zeros((batch, n), np.bool_)
    for b, row in enumerate(scores.tolist()):
        active[b, sorted(best(row, k))] = True
    check_union(ids, mask, active)


def test_topk_union_of_many(verbs: ModuleType) -> None:
    """As a layer has them: all values distinct, of both signs and many sizes."""
    rng = np.random.default_rng(8)
    scores = (reference.normal(rng, 5, 9001) ** 7).astype(np.float32)
    for k in (1, 900, 9000, 9001):
        ids, mask = verbs.topk_union(scores, k)
        cut = np.sort(scores, axis=1)[:, -k]
        check_union(ids, mask, scores >= cut[:, None])
