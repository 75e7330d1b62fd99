"""ffn_dots and ffn_down against float64, with lists of rows, columns, masks and thresholds."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import BATCHES, COUNTS, DTYPES, EXAMPLES, PROMPTS, SEEDS, SIZES

UNTOUCHED = np.float32(12345.5)


class Shape(NamedTuple):
    """What rows, and for how many tokens."""

    n: int
    d: int
    batch: int
    dtype: str
    gated: bool
    padding: int


SHAPES = st.builds(
    Shape, COUNTS, SIZES, st.one_of(BATCHES, PROMPTS), DTYPES, st.booleans(), st.integers(0, 64)
)


def choose(rng: np.random.Generator, listed: bool, spread: bool, n: int) -> tuple[Any, Any, int]:
    """``index`` (any order, also twice), ``slots`` and the number of columns."""
    index = rng.integers(0, n, int(rng.integers(0, n + 4)) if n else 0) if listed else None
    count = n if index is None else len(index)
    columns = count + (int(rng.integers(0, 5)) if spread else 0)
    slots = np.sort(rng.permutation(columns)[:count]) if spread else None
    return index, slots, columns


@EXAMPLES
@given(
    shape=SHAPES,
    activation=st.sampled_from(reference.ACTIVATIONS),
    threshold=st.sampled_from([0.0, 0.0, 0.3, 2.5]),
    biased=st.booleans(),
    listed=st.booleans(),
    spread=st.booleans(),
    masked=st.booleans(),
    seed=SEEDS,
)
def test_ffn_dots(
    verbs: ModuleType,
    shape: Shape,
    activation: str,
    threshold: float,
    biased: bool,
    listed: bool,
    spread: bool,
    masked: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    n, d, batch, dtype, gated, padding = shape
    rows, up, gate, _ = reference.rows_of(rng, n, d, gated, dtype, padding)
    x = reference.normal(rng, batch, d)
    up_bias = reference.normal(rng, n) if biased else None
    gate_bias = reference.normal(rng, n) if biased and gated else None
    index, slots, columns = choose(rng, listed, spread, n)
    mask = rng.random((batch, columns)) < 0.6 if masked else None
    out = np.full((batch, columns), UNTOUCHED)
    fired = verbs.ffn_dots(
        rows, dtype, d, gated, activation, x, out, up_bias, gate_bias,
        index=index, slots=slots, mask=mask, threshold=threshold,
    )  # fmt: skip

    at = slice(None) if index is None else index
    used = np.arange(columns) if slots is None else slots
    ups = reference.linear(up[at], x, up_bias[at] if biased else None)
    gates = reference.linear(gate[at], x, None if gate_bias is None else gate_bias[at]) if gated else None
    expected = reference.hidden(activation, threshold, ups, gates)
    got = out[:, used]
    if mask is not None:
        keep = mask[:, used]
        reference.same(got[~keep], np.zeros((~keep).sum(), np.float32))
        expected = reference.Near(np.where(keep, expected.value, 0), np.where(keep, expected.error, 0))
    expected.check(got)
    assert (np.delete(out, used, axis=1) == UNTOUCHED).all()
    assert fired.dtype == np.int64
    np.testing.assert_array_equal(fired, used[(got != 0).any(axis=0)])


@EXAMPLES
@given(shape=SHAPES, listed=st.booleans(), seed=SEEDS)
def test_ffn_down(verbs: ModuleType, shape: Shape, listed: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, d, batch, dtype, gated, padding = shape
    rows, _, _, down = reference.rows_of(rng, n, d, gated, dtype, padding)
    index, _, columns = choose(rng, listed, False, n)
    h = reference.normal(rng, batch, columns)
    h[rng.random(h.shape) < 0.5] = 0
    start = reference.normal(rng, batch, d)
    acc = start.copy()
    verbs.ffn_down(rows, dtype, d, gated, h, acc, index)
    used = down if index is None else down[index]
    size = np.abs(start) + np.abs(h) @ np.abs(used)
    error = reference.EPS * np.sqrt(columns + 1) * size
    reference.Near(start + h.astype(np.float64) @ used, error).check(acc)


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_activations_keep_their_tails(verbs: ModuleType, activation: str, batch: int) -> None:
    """Relative to the value, however small it is.

    The normal distribution falls so steeply that a rounding of z changes gelu by z**2 roundings; in
    gelu_tanh it changes the exponent by its own size. Its float64 formula cancels on the left.
    """
    z = np.concatenate([np.linspace(-12, 12, 961), [-1e30, -90, -30, 30, 90, 1e15]]).astype(np.float32)
    rows = np.stack([z, np.zeros_like(z)], axis=1).view(np.uint8)
    out = np.empty((batch, len(z)), np.float32)
    verbs.ffn_dots(rows, "f32", 1, False, activation, np.ones((batch, 1), np.float32), out)
    with np.errstate(over="ignore"):
        expected = reference.activate(activation, z.astype(np.float64))
    error = 4e-6 * np.abs(expected) + 1e-37
    if activation == "gelu":
        error += 2e-7 * np.square(np.clip(z, -40, 0)) * np.abs(expected)
    if activation == "gelu_tanh":
        exponent = 1.6 * np.abs(z + 0.044715 * np.clip(z, -20, 20).astype(np.float64) ** 3)
        error += 2e-7 * np.minimum(exponent, 200) * np.abs(expected) + 1e-16 * np.minimum(np.abs(z), 20)
    for row in out:
        reference.Near(expected, error).check(row)


@pytest.mark.parametrize("batch", [1, 5, 16, 40])
def test_any_byte_but_zero_is_true_in_a_mask(verbs: ModuleType, batch: int) -> None:
    """NumPy keeps whatever bytes another type's view has."""
    rows = np.ones((256, 2), np.float32).view(np.uint8)
    mask = np.tile(np.arange(256, dtype=np.uint8), (batch, 1)).view(np.bool_)
    out = np.empty((batch, 256), np.float32)
    verbs.ffn_dots(rows, "f32", 1, False, "relu", np.ones((batch, 1), np.float32), out, mask=mask)
    np.testing.assert_array_equal(out, np.tile(np.arange(256) > 0, (batch, 1)).astype(np.float32))


@pytest.mark.parametrize("batch", [1, 16, 40])
def test_thresholds_cut_what_is_not_above(verbs: ModuleType, batch: int) -> None:
    z = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(1)), -0.25, 0.25, 2, -3, np.nan], np.float32)
    x = np.ones((batch, 1), np.float32)

    def dots(activation: str, gated: bool, threshold: float) -> Any:
        parts = [np.full_like(z, 3), z, z] if gated else [z, z]
        rows = np.stack(parts, axis=1).view(np.uint8)
        out = np.empty((batch, len(z)), np.float32)
        fired = verbs.ffn_dots(rows, "f32", 1, gated, activation, x, out, threshold=threshold)
        for row in out[1:]:
            reference.same(row, out[0])
        return out[0], fired.tolist()

    out, fired = dots("relu", False, 0.5)
    np.testing.assert_array_equal(out, [0, z[1], 0, 0, 2, 0, np.nan])
    assert fired == [1, 4, 6]
    out, fired = dots("relu", True, 0.5)
    np.testing.assert_array_equal(out, [0, 3 * z[1], 0, 0, 6, 0, np.nan])
    assert fired == [1, 4, 6]
    out, fired = dots("relu2", False, 0.25)  # the value counts, not what was squared
    np.testing.assert_array_equal(out, [0, z[1] * z[1], 0, 0, 4, 0, np.nan])
    out, fired = dots("silu", False, 0.1)  # silu(-3) = -0.142, silu(-0.25) = -0.109, silu(0.25) = 0.14
    assert fired == [0, 1, 2, 3, 4, 5, 6]
    out, fired = dots("silu", False, 0.125)
    assert fired == [0, 1, 3, 4, 5, 6]
    assert out[2] == 0
    assert dots("gelu", False, 1e30)[1] == [6]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
@pytest.mark.parametrize("batch", [1, 2, 16, 40])
def test_nan_and_inf(verbs: ModuleType, value: float, place: int, batch: int) -> None:
    x = np.ones((batch, 37), np.float32)
    rows = np.ones((7, 3 * 37), np.float16)
    rows[3, place] = value  # up
    out = np.zeros((batch, 7), np.float32)
    verbs.ffn_dots(rows[:, : 2 * 37].copy().view(np.uint8), "f16", 37, False, "relu", x, out)
    np.testing.assert_array_equal(out[:, 3], np.full(batch, 0.0 if value == -np.inf else value))
    np.testing.assert_array_equal(np.delete(out, 3, axis=1), np.full((batch, 6), 37))
    for activation in reference.ACTIVATIONS:
        fired = verbs.ffn_dots(rows.view(np.uint8), "f16", 37, True, activation, x, out)
        np.testing.assert_array_equal(out[:, 3], np.full(batch, value))
        assert np.isfinite(np.delete(out, 3, axis=1)).all()
        assert fired.tolist() == list(range(7))
    rows[3, [place, 37 + place]] = 1, value  # gate
    for activation in reference.ACTIVATIONS:
        verbs.ffn_dots(rows.view(np.uint8), "f16", 37, True, activation, x, out, threshold=0.5)
        if value == -np.inf:  # 0 in the limit; NaN where the formula multiplies it by infinity
            assert ((out[:, 3] == 0) | np.isnan(out[:, 3])).all()
        else:
            np.testing.assert_array_equal(out[:, 3], np.full(batch, value))
        assert np.isfinite(np.delete(out, 3, axis=1)).all()

    h = np.ones((batch, 7), np.float32)
    h[0, 3] = value
    acc = np.zeros((batch, 37), np.float32)
    verbs.ffn_down(np.ones((7, 74), np.float16).view(np.uint8), "f16", 37, False, h, acc)
    np.testing.assert_array_equal(acc[0], np.full(37, value))
    np.testing.assert_array_equal(acc[1:], np.full((batch - 1, 37), 7))
    h[1:, 3] = 0  # and where no other token makes the row be read
    acc[:] = 0
    verbs.ffn_down(np.ones((7, 74), np.float16).view(np.uint8), "f16", 37, False, h, acc)
    np.testing.assert_array_equal(acc[0], np.full(37, value))


@pytest.mark.parametrize("batch", [1, 2, 16, 40])
@pytest.mark.parametrize("gated", [False, True])
def test_a_mask_hides_whatever_a_row_holds(verbs: ModuleType, gated: bool, batch: int) -> None:
    rows = np.full((3, 48), np.nan, np.float32)
    rows[1] = 1
    mask = np.zeros((batch, 3), np.bool_)
    mask[:, 1] = True
    out = np.full((batch, 3), np.nan, np.float32)
    x = np.full((batch, 16), 0.5, np.float32)
    fired = verbs.ffn_dots(rows.view(np.uint8), "f32", 16, gated, "silu", x, out, mask=mask)
    reference.same(out[:, [0, 2]], np.zeros((batch, 2), np.float32))
    assert (out[:, 1] > 0).all()
    assert fired.tolist() == [1]
    mask[0, 2] = True
    assert verbs.ffn_dots(rows.view(np.uint8), "f32", 16, gated, "silu", x, out, mask=mask).tolist() == [1, 2]
    assert np.isnan(out[0, 2])
    reference.same(out[1:, 2], np.zeros(batch - 1, np.float32))


@pytest.mark.parametrize("batch", [2, 16])
def test_rows_that_did_not_fire_are_not_read(verbs: ModuleType, batch: int) -> None:
    rows = np.full((5, 32), np.nan, np.float32)
    rows[1] = 1.0
    h = np.zeros((batch, 5), np.float32)
    h[0, 1] = 2.0
    h[1, 3] = -0.0
    acc = np.zeros((batch, 16), np.float32)
    verbs.ffn_down(rows.view(np.uint8), "f32", 16, False, h, acc)
    np.testing.assert_array_equal(acc[0], np.full(16, 2.0))
    np.testing.assert_array_equal(acc[1:], np.zeros((batch - 1, 16)))


def test_rows_that_fired_for_no_token_are_not_read(verbs: ModuleType) -> None:
    rows = np.full((5, 32), np.nan, np.float32)
    rows[[1, 2]] = 1.0
    h = np.zeros((40, 5), np.float32)
    h[7, 1], h[8, 2] = 2, 3
    acc = np.zeros((40, 16), np.float32)
    verbs.ffn_down(rows.view(np.uint8), "f32", 16, False, h, acc)
    expected = np.zeros((40, 16))
    expected[7], expected[8] = 2, 3
    np.testing.assert_array_equal(acc, expected)


@pytest.mark.parametrize("batch", [1, 40])
def test_an_empty_list(verbs: ModuleType, batch: int) -> None:
    rows, none = np.full((3, 64), 0xFF, np.uint8), np.empty(0, np.int64)
    out = np.full((batch, 2), UNTOUCHED)
    x = np.ones((batch, 8), np.float32)
    assert verbs.ffn_dots(rows, "f32", 8, False, "relu", x, out, index=none, slots=none).tolist() == []
    assert (out == UNTOUCHED).all()
    acc = np.full((batch, 8), UNTOUCHED)
    verbs.ffn_down(rows, "f32", 8, False, np.empty((batch, 0), np.float32), acc, none)
    assert (acc == UNTOUCHED).all()
