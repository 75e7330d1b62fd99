"""Tables of rows: looking up, choosing what goes, taking and dropping; and new tokens into a KV cache."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import EXAMPLES, SEEDS

N, ROWS = 40, 30


class Tables:
    """A layer's tables and a pool's, filled by a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.row_of = np.full(N, -1, np.int32)
        there = self.rng.permutation(N)[: self.rng.integers(0, ROWS + 1)]
        rows = self.rng.permutation(ROWS)
        self.row_of[there] = rows[: len(there)]
        self.owner = np.full(ROWS, -1, np.int64)
        self.owner[self.row_of[there]] = there + 100
        self.free = np.zeros(ROWS, np.int64)
        self.n_free = ROWS - len(there)
        self.free[: self.n_free] = rows[len(there) :]
        self.in_flight = (self.row_of >= 0) & (self.rng.random(N) < 0.2)
        self.guessed = (self.row_of >= 0) & (self.rng.random(N) < 0.2)
        self.last = self.rng.integers(0, 4, N).astype(np.int32)

    def ids(self, among: np.ndarray) -> np.ndarray:
        """Some neurons, ascending."""
        return np.sort(self.rng.permutation(among)[: self.rng.integers(0, len(among) + 1)]).astype(np.int64)


@EXAMPLES
@given(seed=SEEDS, counts=st.booleans())
def test_every_requested_row_is_in_one_place(verbs: ModuleType, seed: int, counts: bool) -> None:
    t = Tables(seed)
    ids = t.ids(np.arange(N))
    count = t.rng.random(N).astype(np.float32) if counts else None
    before = {
        "last": t.last.copy(),
        "guessed": t.guessed.copy(),
        "count": None if count is None else count.copy(),
    }
    found = verbs.find_rows(ids, t.row_of, t.in_flight)
    used, *again = verbs.request_rows(ids, 9, t.last, t.guessed, t.row_of, t.in_flight, count, 0.3)
    for one, other in zip(found, again, strict=True):
        assert one.dtype == np.int64
        np.testing.assert_array_equal(one, other)
    rows, here, coming, missing = found
    np.testing.assert_array_equal(rows, t.row_of[ids])
    assert sorted([*here, *coming, *missing]) == list(range(len(ids)))
    assert (rows[missing] < 0).all()
    assert t.in_flight[ids[coming]].all()
    assert not t.in_flight[ids[here]].any()
    assert used == before["guessed"][ids].sum()
    others = np.setdiff1d(np.arange(N), ids)
    assert (t.last[ids] == 9).all()
    np.testing.assert_array_equal(t.last[others], before["last"][others])
    assert not t.guessed[ids].any()
    np.testing.assert_array_equal(t.guessed[others], before["guessed"][others])
    if count is not None:
        grown = before["count"].copy()
        grown[ids] += np.float32(0.3)
        reference.same(count, grown)


@EXAMPLES
@given(
    seed=SEEDS,
    kind=st.sampled_from(["few steps", "float", "nan", "equal"]),
    step=st.sampled_from([-1, 2]),
    k=st.integers(0, N),
)
def test_what_is_worth_least_goes(verbs: ModuleType, seed: int, kind: str, step: int, k: int) -> None:
    t = Tables(seed)
    value = t.last if kind == "few steps" else t.rng.normal(size=N).astype(np.float32)
    if kind == "nan":
        value[t.rng.random(N) < 0.3] = np.nan
    if kind == "equal":
        value = np.zeros(N, np.float32) * np.sign(value)  # zeros of both signs
    before = Tables(seed)
    worth = [
        (
            not t.guessed[i],
            0 if t.guessed[i] else (np.isnan(value[i]), 0 if np.isnan(value[i]) else value[i]),
            i,
        )
        for i in range(N)
        if t.row_of[i] >= 0 and t.last[i] != step and not t.in_flight[i]
    ]
    gone = sorted(i for *_, i in sorted(worth, key=str_safe)[:k])
    told = verbs.evict_rows(
        t.row_of, t.in_flight, t.last, step, value, t.guessed, k, t.owner, t.free, t.n_free
    )
    assert told == (len(gone), before.guessed[gone].sum())
    assert not t.guessed[gone].any()
    rows = before.row_of[gone]
    assert t.free[t.n_free : t.n_free + len(gone)].tolist() == rows.tolist()
    before.row_of[gone], before.owner[rows], before.guessed[gone] = -1, -1, False
    np.testing.assert_array_equal(t.row_of, before.row_of)
    np.testing.assert_array_equal(t.owner, before.owner)
    np.testing.assert_array_equal(t.guessed, before.guessed)


def str_safe(entry: tuple[bool, object, int]) -> tuple[bool, tuple[bool, float], int]:
    """The same order, for guesses too, which have no value."""
    mine, value, neuron = entry
    return mine, value if isinstance(value, tuple) else (False, 0.0), neuron


@settings(max_examples=20, deadline=None, database=None)
@given(seed=SEEDS, k=st.integers(1, 400), spread=st.sampled_from([1, 10, 10**6]))
def test_the_least_of_many(verbs: ModuleType, seed: int, k: int, spread: int) -> None:
    """So many that a sample is looked at first."""
    rng = np.random.default_rng(seed)
    n = 5000
    row_of = np.where(rng.random(n) < 0.5, np.arange(n), -1).astype(np.int32)
    last = rng.integers(0, spread, n).astype(np.int32)
    none = np.zeros(n, np.bool_)
    owner = row_of.astype(np.int64)
    there = np.flatnonzero(row_of >= 0)
    expected = there[np.lexsort((there, last[there]))[:k]]
    free = np.zeros(n, np.int64)
    assert verbs.evict_rows(row_of, none, last, -1, last, none.copy(), k, owner, free, 0) == (k, 0)
    np.testing.assert_array_equal(free[:k], np.sort(expected))
    np.testing.assert_array_equal(np.flatnonzero(row_of >= 0), np.setdiff1d(there, expected))


@EXAMPLES
@given(seed=SEEDS, guesses=st.booleans())
def test_rows_are_taken_and_dropped(verbs: ModuleType, seed: int, guesses: bool) -> None:
    t = Tables(seed)
    ids = t.ids(np.arange(N))
    lacking = ids[t.row_of[ids] < 0]
    most = int(t.rng.integers(0, t.n_free + 1))
    guessed = t.guessed if guesses else None
    owner, row_of, flying, before = t.owner.copy(), t.row_of.copy(), t.in_flight.copy(), t.guessed.copy()
    taken, rows = verbs.take_rows(ids, most, 100, t.row_of, t.in_flight, t.owner, t.free, t.n_free, guessed)
    assert taken.dtype == rows.dtype == np.int64
    np.testing.assert_array_equal(taken, lacking[:most])
    np.testing.assert_array_equal(rows, np.sort(t.free[t.n_free - len(taken) : t.n_free]))
    np.testing.assert_array_equal(t.row_of[taken], rows)
    np.testing.assert_array_equal(t.owner[rows], taken + 100)
    flying[taken] = True
    np.testing.assert_array_equal(t.in_flight, flying)
    if guesses:
        before[taken] = True
    np.testing.assert_array_equal(t.guessed, before)
    verbs.drop_rows(taken, t.row_of, t.owner, t.free, t.n_free - len(taken))
    np.testing.assert_array_equal(t.owner, owner)
    np.testing.assert_array_equal(t.row_of, row_of)
    np.testing.assert_array_equal(np.sort(t.free[: t.n_free]), np.flatnonzero(owner < 0))


def test_a_call_that_is_refused_has_changed_nothing(verbs: ModuleType) -> None:
    t = Tables(3)
    t.row_of[:2], t.owner[:] = (0, -1), -1
    before = t.row_of.copy(), t.owner.copy(), t.free.copy()
    with pytest.raises(ValueError, match="row_of is -1 at 1"):
        verbs.drop_rows(np.array([0, 1]), t.row_of, t.owner, t.free, 0)
    t.free[0] = ROWS
    with pytest.raises(ValueError, match=f"free has {ROWS}, expected 0..{ROWS - 1}"):
        verbs.take_rows(np.array([1]), 1, 0, t.row_of, t.in_flight, t.owner, t.free, 1)
    everything = np.zeros(N, np.float32)
    with pytest.raises(ValueError, match=r"n_free is 30, expected 0\.\."):
        verbs.evict_rows(t.row_of, t.in_flight, t.last, -1, everything, t.guessed, 1, t.owner, t.free, ROWS)
    t.free[0] = before[2][0]
    for now, then in zip((t.row_of, t.owner, t.free), before, strict=True):
        np.testing.assert_array_equal(now, then)


@EXAMPLES
@given(
    tokens=st.integers(1, 20),
    heads=st.integers(1, 5),
    d_head=st.sampled_from([1, 7, 64]),
    dtype=st.sampled_from([np.float32, np.float16]),
    seed=SEEDS,
)
def test_append_kv(
    verbs: ModuleType, tokens: int, heads: int, d_head: int, dtype: type[np.floating], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    k, v = (rng.normal(scale=1e4, size=(tokens, heads, d_head)).astype(np.float32) for _ in range(2))
    k[0, 0, 0] = 1e30  # infinite in float16
    cache = rng.normal(size=(2, heads, tokens + 5, d_head)).astype(dtype)
    position = int(rng.integers(0, 6))
    expected = cache.copy()
    with np.errstate(over="ignore"):
        expected[0, :, position : position + tokens] = k.transpose(1, 0, 2).astype(dtype)
        expected[1, :, position : position + tokens] = v.transpose(1, 0, 2).astype(dtype)
    verbs.append_kv(k, v, cache, position)
    reference.same(cache, expected)
