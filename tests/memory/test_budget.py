"""What a budget buys."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.errors import ConfigError
from flashd.memory.budget import MIN_POOL_ROWS, Demand, allocate, parse_budget
from flashd.types import FFNGeometry

GEOMETRY = FFNGeometry(n_layers=4, n_neurons=1000, d_model=32, gated=False, dtype="f16", stride_bytes=512)
# A step requests a tenth; six steps a fifth, and so on.
USAGE = [100 + 20 * k for k in range(64)]
DEMAND = Demand(GEOMETRY, 1_000_000, 100_000, [False, True, True, True], [[], USAGE, USAGE, USAGE])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", 7), ("AUTO", 7), ("4096", 4096), ("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("2k", 2048),
        ("55%", 550), ("12.5 %", 125), ("3tib", 3 << 40),
        ("9" * 400 + "TiB", 1 << 62), ("9" * 400 + "%", 1 << 62),
    ],
)  # fmt: skip
def test_budgets_as_people_write_them(text: str, expected: int) -> None:
    assert parse_budget(text, 1000, 7) == expected


@pytest.mark.parametrize("text", ["", "much", "4 GiBs", "-3", "%", "1e9"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, a size such as 4GiB, or a share such as 55%"):
        parse_budget(text, 1000, 7)


def test_with_everything_nothing_is_read_twice() -> None:
    got = allocate(DEMAND.everything_bytes, DEMAND)
    assert got.resident_layers == (0,)
    assert got.capacity == (0, 1000, 1000, 1000)


def test_the_least_and_less() -> None:
    least = 1_100_000 + MIN_POOL_ROWS * 512
    got = allocate(least, DEMAND)
    assert got.n_rows == MIN_POOL_ROWS
    assert (got.resident_layers, got.k) == ((), 0)
    with pytest.raises(ConfigError, match=r"1\.0 MB, stream buffers 0\.1 MB.*give it 1\.1 MB or more"):
        allocate(least - 1, DEMAND)
    with pytest.raises(ConfigError, match="a budget of 8 bytes is too small"):
        allocate(parse_budget("8", 1000, 7), DEMAND)


def test_a_model_without_masks_gets_whole_layers() -> None:
    dense = replace(DEMAND, masked=[False] * 4, capacity_rows=())
    got = allocate(1_100_000 + 2 * GEOMETRY.layer_bytes + 5, dense)
    assert (got.resident_layers, got.n_rows, got.k) == ((0, 1), 0, 0)


def test_a_layer_without_a_mask_comes_before_a_longer_window() -> None:
    one_step = 3 * 100
    got = allocate(1_100_000 + GEOMETRY.layer_bytes + (one_step + 82) * 512, DEMAND)
    assert got.resident_layers == (0,)
    assert got.k == 1
    assert allocate(1_100_000 + GEOMETRY.layer_bytes + (one_step - 1) * 512, DEMAND).resident_layers == ()


def test_a_window_of_k_steps_is_all_that_is_bought() -> None:
    got = allocate(DEMAND.everything_bytes, DEMAND, k=5)
    assert got.capacity == (0, USAGE[4], USAGE[4], USAGE[4])
    assert got.k == 5


def test_the_longest_window_is_bought_as_fast_as_a_short_one() -> None:
    """Not tried step by step, of which there may be a million."""
    began_s = time.perf_counter()
    for demand in (DEMAND, replace(DEMAND, capacity_rows=())):
        got = allocate(demand.everything_bytes, demand, 1 << 20)
        assert got.k == 1 << 20
        assert got.capacity == allocate(demand.everything_bytes, demand, 64).capacity
    assert time.perf_counter() - began_s < 0.5


@settings(max_examples=100, deadline=None, database=None)
@given(st.integers(0, 4_000_000), st.integers(0, 70), st.booleans())
def test_never_more_than_the_budget(budget_bytes: int, k: int, measured: bool) -> None:
    demand = DEMAND if measured else replace(DEMAND, capacity_rows=())
    try:
        got = allocate(budget_bytes, demand, k)
    except ConfigError:
        assert budget_bytes < 1_100_000 + MIN_POOL_ROWS * 512
        return
    spent = demand.fixed_bytes + demand.ring_bytes + got.n_rows * 512
    assert spent + len(got.resident_layers) * GEOMETRY.layer_bytes <= budget_bytes
    assert all(0 <= rows <= 1000 for rows in got.capacity)
    assert got.capacity[0] == 0
    assert sum(got.capacity) < got.n_rows
    more = allocate(budget_bytes + 10_000, demand, k)
    assert more.n_rows >= got.n_rows or more.resident_layers > got.resident_layers
