"""What to read, and whether reading ahead pays: pure decisions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.prefetch.benefit import (
    FIRST_HOLD_STEPS,
    MAX_HOLD_STEPS,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    PrefetchBenefit,
)
from flashd.prefetch.plan import round_end

rows_of_a_layer = st.lists(st.integers(-1, 20), max_size=30).map(lambda some: np.array(some, np.int64))


@settings(max_examples=60, deadline=None, database=None)
@given(rows_of_a_layer, st.integers(0, 31))
def test_a_round_goes_as_far_as_there_is_room(rows: np.ndarray, room: int) -> None:
    missing = np.flatnonzero(rows < 0)
    stop = round_end(missing, 0, len(rows), room)
    assert np.count_nonzero(rows[:stop] < 0) == min(room, len(missing))
    assert stop == len(rows) or rows[stop] < 0


def run(chooser: PrefetchBenefit, steps: int, cost: Callable[[bool], float], tokens: int = 1) -> list[bool]:
    """Steps that take so long with and without reading ahead; what was done in each."""
    done = []
    for _ in range(steps):
        done.append(chooser.active)
        chooser.step_done(int(cost(chooser.active) * 1e6), tokens)
    return done


ONE_ROUND = WARM_UP_STEPS + TRIAL_STEPS + FIRST_HOLD_STEPS


def test_on_and_off_are_what_they_say() -> None:
    for mode in ("on", "off"):
        chooser = PrefetchBenefit(mode, [1, 2], 3)
        chooser.observe(1, 1000, 0)
        assert run(chooser, 700, lambda on: 2.0 if on else 1.0) == [mode == "on"] * 700
        assert [chooser.wants(layer) for layer in range(3)] == [False, mode == "on", mode == "on"]


def test_it_turns_itself_off_where_steps_get_longer_and_on_again() -> None:
    chooser = PrefetchBenefit("auto", [1, 2], 3)
    done = run(chooser, ONE_ROUND, lambda on: 1.1 if on else 1.0)
    assert not chooser.preferred
    assert done[-FIRST_HOLD_STEPS:] == [False] * FIRST_HOLD_STEPS
    # Times have changed: the next trial finds out.
    done = run(chooser, TRIAL_STEPS + FIRST_HOLD_STEPS, lambda on: 0.9 if on else 1.0)
    assert done[-FIRST_HOLD_STEPS + 1 :] == [True] * (FIRST_HOLD_STEPS - 1)


def test_what_was_confirmed_is_tried_less_often_and_what_was_changed_soon() -> None:
    chooser = PrefetchBenefit("auto", [1], 2)
    done = run(chooser, 4000, lambda on: 0.9 if on else 1.0)
    # Half of a trial's steps are without.
    assert done[-2 * MAX_HOLD_STEPS :].count(False) <= TRIAL_STEPS
    run(chooser, 2 * MAX_HOLD_STEPS, lambda on: 1.1 if on else 1.0)
    assert not chooser.preferred
    run(chooser, TRIAL_STEPS + 3 * FIRST_HOLD_STEPS, lambda on: 0.9 if on else 1.0)
    assert chooser.preferred


def test_a_machine_that_gets_slower_does_not_turn_it_off() -> None:
    """Drift hits both settings alike, and one long disturbance is one pair's."""
    chooser = PrefetchBenefit("auto", [1], 2)
    clock = iter(range(10**6))
    run(chooser, 2000, lambda on: 1 + 0.01 * next(clock))
    assert chooser.preferred
    times = iter(range(10**6))
    run(chooser, 2000, lambda on: 3.0 if next(times) % 97 < 8 else 1.0)
    assert chooser.preferred


def test_noise_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    chooser = PrefetchBenefit("auto", [1], 2)
    run(chooser, 5 * ONE_ROUND, lambda on: 1 + 0.02 * float(rng.random()) + (rng.random() < 0.1) * 5.0)
    assert chooser.preferred


def test_a_layer_that_guesses_badly_is_left_out_until_the_next_trial() -> None:
    chooser = PrefetchBenefit("auto", [1, 2], 3)
    for _ in range(4):
        chooser.observe(1, 30, 2)
        chooser.observe(2, 30, 25)
    assert [chooser.wants(layer) for layer in range(3)] == [False, False, True]
    assert chooser.layers == 1
    assert chooser.precision(1) == pytest.approx(2 / 30)
    run(chooser, WARM_UP_STEPS, lambda on: 1.0)
    assert chooser.wants(1)


def test_a_batch_of_another_size_is_not_compared() -> None:
    """Longer steps because of more sequences are not the fault of reading ahead."""
    chooser = PrefetchBenefit("auto", [1], 2)
    run(chooser, WARM_UP_STEPS, lambda on: 1.0)
    for i in range(40):
        run(chooser, 3, lambda on: 9.0 if on else 1.0, tokens=1 + i % 2)
    assert chooser.preferred


def test_without_a_layer_to_guess_there_is_nothing_to_try() -> None:
    chooser = PrefetchBenefit("auto", [], 3)
    assert run(chooser, 100, lambda on: 1.0) == [False] * 100
