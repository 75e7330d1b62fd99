"""Tables of rows in RAM: whatever is requested, guessed, evicted or fails, they agree with each other and
with a simple model, and rows keep their bytes and biases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashd.memory.eviction import POLICIES, Frequency, LeastRecent, PaperWindow, make_policy
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.types import I64Array

LAYERS, NEURONS, MOST_ROWS = 3, 13, 30
BIASES = [np.arange(NEURONS, dtype=np.float32) + 100 * layer for layer in range(LAYERS)]

ids_of_a_layer = st.sets(st.integers(0, NEURONS - 1)).map(lambda some: np.array(sorted(some), np.int64))
layers = st.integers(0, LAYERS - 1)


class Machine(RuleBasedStateMachine):
    """Any order of what the sparse FFN does. A row's first byte says whose it is, as if it was read."""

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        k=st.integers(1, 4),
        n_rows=st.integers(0, MOST_ROWS),
        capacity=st.lists(st.integers(0, NEURONS), min_size=LAYERS, max_size=LAYERS),
    )
    def begin(self, name: str, k: int, n_rows: int, capacity: list[int]) -> None:
        matrix = np.zeros((MOST_ROWS, 8), np.uint8)
        pool = RowPool(matrix, n_rows, up_bias=True)
        policy = make_policy(name, LAYERS, NEURONS, k, None)
        self.window = Window(pool, LAYERS, NEURONS, capacity, policy, BIASES)
        self.flying: list[tuple[int, I64Array, I64Array]] = []
        self.step = 0
        self.here: dict[tuple[int, int], int] = {}  # neurons whose rows have arrived

    def insert(self, layer: int, ids: I64Array) -> None:
        missing = ids[self.window.row_of[layer][ids] < 0][: self.window.pool.n_free]
        if len(missing):
            self.flying.append((layer, missing, self.window.insert(layer, missing)))

    @rule(layer=layers, ids=ids_of_a_layer)
    def request(self, layer: int, ids: I64Array) -> None:
        self.step += 1
        from_guess, rows, places = self.window.request(layer, ids, self.step)
        assert 0 <= from_guess <= len(places.here) + len(places.coming)
        np.testing.assert_array_equal(rows, self.window.row_of[layer][ids])
        self.window.make_room(layer, len(places.missing))
        # What this step wants is not what makes room for it.
        np.testing.assert_array_equal(self.window.row_of[layer][ids], rows)
        self.insert(layer, ids)

    @rule(layer=layers, tokens=st.lists(ids_of_a_layer, min_size=1, max_size=6))
    def prompt(self, layer: int, tokens: list[I64Array]) -> None:
        self.step += 1
        tail = np.zeros((len(tokens), NEURONS), np.bool_)
        for token, ids in zip(tail, tokens, strict=True):
            token[ids] = True
        before = self.window.row_of[layer].copy()
        taken, rows = self.window.remember(layer, tail, self.step)
        assert (before[taken] < 0).all()
        assert tail.any(axis=0)[taken].all()
        assert self.window.used[layer] <= max(self.window.capacity[layer], self.window.n_in_flight[layer])
        if len(taken):
            self.flying.append((layer, taken, rows))

    @rule(layer=layers, ids=ids_of_a_layer, most=st.integers(0, 5))
    def guess(self, layer: int, ids: I64Array, most: int) -> None:
        missing = ids[self.window.row_of[layer][ids] < 0]
        taken, rows = self.window.guess(layer, ids, min(most, self.window.pool.n_free))
        np.testing.assert_array_equal(taken, missing[: min(most, len(taken) + self.window.pool.n_free)])
        if len(taken):
            self.flying.append((layer, taken, rows))

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 100), fails=st.booleans())
    def end_of_a_read(self, which: int, fails: bool) -> None:
        layer, ids, rows = self.flying.pop(which % len(self.flying))
        if fails:
            self.window.drop(layer, ids)
            return
        self.window.pool.matrix[rows] = (ids + 17 * layer)[:, None]
        self.window.settle(layer, ids)

    @rule(layer=layers)
    def trim(self, layer: int) -> None:
        self.window.trim(layer)
        # Only what is in flight may keep a layer above its capacity.
        assert self.window.used[layer] <= max(self.window.capacity[layer], self.window.n_in_flight[layer])

    @rule(n=st.integers(0, MOST_ROWS), layer=layers)
    def steal(self, n: int, layer: int) -> None:
        others = sum(1 for owner, _ in self.settled() if owner != layer)
        before = self.window.pool.n_free
        self.window.steal(n, layer)
        assert self.window.pool.n_free >= min(n, before + others)

    @rule(layer=layers, ids=ids_of_a_layer, n=st.integers(0, NEURONS))
    def release(self, layer: int, ids: I64Array, n: int) -> None:
        self.window.release(layer, ids, n)

    @rule(
        n_rows=st.integers(0, MOST_ROWS),
        capacity=st.lists(st.integers(0, NEURONS), min_size=LAYERS, max_size=LAYERS),
    )
    def resize(self, n_rows: int, capacity: list[int]) -> None:
        if self.flying:
            with pytest.raises(ValueError, match="in flight"):
                self.window.resize(n_rows, capacity)
            return
        self.window.resize(n_rows, capacity)
        assert self.window.pool.n_rows == n_rows

    @rule()
    def balance(self) -> None:
        before = list(self.window.capacity)
        self.window.balance()
        after = self.window.capacity
        assert sum(before) - LAYERS <= sum(after) <= sum(before)
        assert [rows > 0 for rows in after] == [rows > 0 for rows in before]

    def settled(self) -> list[tuple[int, int]]:
        pool, flying = self.window.pool, self.window.in_flight.reshape(-1)
        return [divmod(int(owner), NEURONS) for owner in pool.owner if owner >= 0 and not flying[owner]]

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "window"):
            return
        self.window.check_integrity()
        for layer, neuron in self.settled():
            row = self.window.row_of[layer][neuron]
            assert (self.window.pool.matrix[row] == neuron + 17 * layer).all()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)


def test_rows_go_to_the_layers_where_they_save_most_reads() -> None:
    """Two layers share ten rows; one wants the same three neurons always, the other ten in turn."""
    policy = Frequency(2, NEURONS)
    window = Window(RowPool(np.zeros((12, 8), np.uint8), 12), 2, NEURONS, [5, 5], policy)
    for at in range(1, 60):
        window.request(0, np.array([1, 4, 7]), at)
        window.request(1, np.array([at % 10]), at)
    window.balance()
    assert window.capacity == [4, 6]  # three that always pay, and one that each layer has anyway
    # Nobody counts requests: as it was.
    plain = Window(RowPool(np.zeros((12, 8), np.uint8), 12), 2, NEURONS, [5, 5], LeastRecent())
    plain.request(0, np.array([1, 4, 7]), 1)
    plain.balance()
    assert plain.capacity == [5, 5]


def one_layer(policy: LeastRecent | Frequency, capacity: int, n_rows: int = 12) -> Window:
    pool = RowPool(np.zeros((n_rows, 8), np.uint8), n_rows)
    return Window(pool, 1, NEURONS, [capacity], policy)


def step(window: Window, *wanted: int) -> set[int]:
    """One step of a layer; what is in RAM after it."""
    ids = np.array(sorted(wanted), np.int64)
    _, _, places = window.request(0, ids, window.step + 1)
    missing = ids[places.missing]
    window.make_room(0, len(missing))
    window.insert(0, missing)
    window.settle(0, missing)
    window.trim(0)
    return set(np.flatnonzero(window.row_of[0] >= 0).tolist())


def test_least_recent_keeps_what_fits() -> None:
    window = one_layer(LeastRecent(), capacity=4)
    assert step(window, 1, 2) == {1, 2}
    assert step(window, 3) == {1, 2, 3}
    assert step(window, 1, 4) == {1, 2, 3, 4}
    assert step(window, 5) == {1, 3, 4, 5}
    assert step(window, 6, 7, 8) >= {5, 6, 7, 8}


def test_the_papers_window_forgets_after_k_steps() -> None:
    window = one_layer(PaperWindow(2), capacity=10)
    assert step(window, 1, 2) == {1, 2}
    assert step(window, 3) == {1, 2, 3}
    assert step(window, 2) == {2, 3}
    assert step(window, 4) == {2, 4}


def test_frequency_keeps_what_is_asked_for_often() -> None:
    window = one_layer(Frequency(1, NEURONS, half_life_steps=8), capacity=3)
    for _ in range(6):
        step(window, 1)
    assert step(window, 2, 3) == {1, 2, 3}
    assert step(window, 4, 5) == {1, 4, 5}  # least recent would have let 1 go
    for i in range(60):  # but not for ever
        step(window, 6 + i % 2, 8 + i % 2)
    assert 1 not in step(window, 6)


def test_frequency_survives_many_steps() -> None:
    policy = Frequency(1, NEURONS, half_life_steps=1)
    window = one_layer(policy, capacity=2)
    for i in range(300):
        assert {i % 3} <= step(window, i % 3)
    assert np.isfinite(policy.values(0, np.zeros(NEURONS, np.int32))).all()


def test_a_prior_counts_like_requests() -> None:
    prior = np.zeros((1, NEURONS), np.float32)
    prior[0, 7] = 0.9
    window = one_layer(Frequency(1, NEURONS, prior), capacity=2)
    assert step(window, 7) == {7}
    step(window, 1)
    step(window, 1)
    assert step(window, 2) == {7, 2}


def test_what_only_a_guess_brought_goes_first() -> None:
    window = one_layer(LeastRecent(), capacity=3)
    step(window, 1)
    taken, _ = window.guess(0, np.array([1, 8, 9, 10]), 2)
    assert taken.tolist() == [8, 9]
    window.settle(0, np.array([8, 9]))
    assert step(window, 2, 8) == {1, 2, 8}
    used, _, _ = window.request(0, np.array([8]), window.step + 1)
    assert used == 0  # counted when it was used first


def test_rows_of_neighbours_are_neighbours_where_possible() -> None:
    pool = RowPool(np.zeros((8, 8), np.uint8), 8)
    row_of = np.full(24, -1, np.int32)
    flying = np.zeros(24, np.bool_)

    def take(*ids: int) -> list[int]:
        taken, rows = pool.take(np.array(ids), len(ids), row_of, flying)
        assert flying[taken].all()
        return rows.tolist()

    assert take(*range(5)) == [0, 1, 2, 3, 4]
    pool.give_back(np.array([0, 1, 3]), row_of)
    assert take(2, 10, 11, 12) == [0, 1, 3]  # 2 has one
    with pytest.raises(ValueError, match=r"most is 4, expected 0\.\.3"):
        take(*range(20, 24))


def test_a_row_is_taken_once() -> None:
    window = one_layer(LeastRecent(), capacity=3)
    window.insert(0, np.array([1]))
    with pytest.raises(ValueError, match="layer 0: 1 of 2 neurons have a row already"):
        window.insert(0, np.array([1, 2]))
    with pytest.raises(ValueError, match=r"\d+ rows are wanted, \d+ are free"):
        window.insert(0, np.arange(NEURONS))


def test_limits_are_told() -> None:
    with pytest.raises(ValueError, match="9 rows of a matrix of 8"):
        RowPool(np.zeros((8, 8), np.uint8), 9)
    pool = RowPool(np.zeros((8, 8), np.uint8), 8)
    pool.take(np.arange(5), 5, np.full(5, -1, np.int32), np.zeros(5, np.bool_))
    with pytest.raises(ValueError, match=r"4 rows, expected 5 \(in use\) to 8"):
        pool.resize(4)
    with pytest.raises(ValueError, match="unknown eviction policy 'fifo'; known: lru, window, frequency"):
        make_policy("fifo", 1, 1, 1, None)
    with pytest.raises(ValueError, match="window of 0 steps"):
        PaperWindow(0)


@given(st.data())
@settings(max_examples=30, deadline=None, database=None)
def test_damage_to_a_table_is_found(data: st.DataObject) -> None:
    """The check itself checks something."""
    window = one_layer(LeastRecent(), capacity=6)
    step(window, 1, 4, 5)
    damage = data.draw(st.sampled_from(["row", "owner", "free", "used", "flying"]))
    if damage == "row":
        window.row_of[0][4] = window.row_of[0][5]
    elif damage == "owner":
        window.pool.owner[window.row_of[0][4]] = 9
    elif damage == "free":
        window.pool.give_back(np.array([4]), window.row_of[0].copy())
    elif damage == "used":
        window.used[0] += 1
    else:
        window.n_in_flight[0] += 1
    with pytest.raises(AssertionError):
        window.check_integrity()
