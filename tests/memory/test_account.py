"""What memory is promised to, and whether everybody gets what they were promised."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.memory.account import KV_HOLD_S, Beside, Claim, MemoryAccount, can_all_end
from flashd.memory.budget import Demand
from flashd.types import FFNGeometry

GEOMETRY = FFNGeometry(n_layers=4, n_neurons=1000, d_model=32, gated=False, dtype="f16", stride_bytes=512)
USAGE = [100 + 20 * k for k in range(64)]
DEMAND = Demand(GEOMETRY, 1_000_000, 100_000, [True] * 4, [USAGE] * 4)
BESIDE = Beside(base_bytes=500_000, prompt_bytes=50_000, kv_token_bytes=100, max_context=2048)


def test_what_is_asked_for_and_what_there_is() -> None:
    account = MemoryAccount(DEMAND, BESIDE)
    assert account.limit_bytes > 1 << 60
    account.asked_bytes = 3_000_000
    assert account.limit_bytes == 3_000_000
    account.ceiling_bytes = 2_500_000
    assert account.limit_bytes == 2_500_000
    fixed = 500_000 + 50_000 + 512 * 100
    assert account.weights_bytes(0.0) == 2_500_000 - fixed
    assert account.least_bytes == fixed + DEMAND.least_bytes
    # However little there is, what a step needs is not taken away.
    account.ceiling_bytes = 10
    assert account.weights_bytes(0.0) == DEMAND.least_bytes


def test_a_short_context_needs_a_short_cache() -> None:
    assert Beside(0, 0, 100, 40).least_kv_bytes == 4000


def test_kv_caches_come_out_of_the_weights_and_are_remembered_for_a_while() -> None:
    account = MemoryAccount(DEMAND, BESIDE, asked_bytes=3_000_000)
    alone = account.weights_bytes(0.0)
    account.count_kv(200_000, 200_000, 0.0)
    assert account.weights_bytes(1.0) == alone - (200_000 - 51_200)
    account.count_kv(100_000, 100_000, 10.0)
    assert account.kv_bytes(10.0) == 200_000
    account.count_kv(0, 0, 20.0)
    assert account.kv_bytes(10.0 + KV_HOLD_S - 1) == 200_000
    assert account.kv_bytes(10.0 + KV_HOLD_S) == 100_000
    assert account.kv_bytes(20.0 + KV_HOLD_S) == 51_200


def test_what_was_not_accounted_for_is_counted_too() -> None:
    account = MemoryAccount(DEMAND, BESIDE, asked_bytes=3_000_000)
    before = account.weights_bytes(0.0), account.most_kv_bytes()
    account.excess_bytes = 70_000
    assert (account.weights_bytes(0.0), account.most_kv_bytes()) == tuple(it - 70_000 for it in before)


def test_the_largest_cache_leaves_a_step_what_it_needs() -> None:
    account = MemoryAccount(DEMAND, BESIDE, asked_bytes=3_000_000, ceiling_bytes=2_000_000)
    assert account.most_kv_bytes(asked=True) == 3_000_000 - 550_000 - DEMAND.least_bytes
    assert account.most_kv_bytes() == 2_000_000 - 550_000 - DEMAND.least_bytes
    account.asked_bytes = account.least_bytes
    assert account.most_kv_bytes(asked=True) == BESIDE.least_kv_bytes
    text = account.shortage(77_700)
    assert "its KV cache takes 0.1 MB" in text
    assert f"{account.limit_bytes / 1e6:.1f} MB hold at most 0.1 MB" in text


def ends_one_by_one(claims: tuple[Claim, ...], room: int) -> bool:
    """In this order each gets all it may need, and gives it back."""
    free = room - sum(claim.granted_bytes for claim in claims)
    for claim in claims:
        if free < 0 or claim.most_bytes - claim.granted_bytes > free:
            return False
        free += claim.granted_bytes
    return free >= 0


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), st.integers(0, 30))
def test_all_can_end_where_any_order_lets_them(pairs: list[tuple[int, int]], room: int) -> None:
    claims = [Claim(granted, granted + more) for granted, more in pairs]
    expected = any(ends_one_by_one(order, room) for order in permutations(claims))
    assert can_all_end(claims, room) == expected
