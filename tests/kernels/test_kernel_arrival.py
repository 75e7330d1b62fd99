"""The FFN of a layer has the same bits for every order in which its rows arrive from flash."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from kernels import reference
from kernels.strategies import BATCHES, DTYPES, EXAMPLES, PROMPTS, SEEDS, THREADS

I64 = npt.NDArray[np.int64]


class Layer(NamedTuple):
    """A layer's neurons in ascending id, and who uses which."""

    rows: npt.NDArray[np.uint8]
    dtype: str
    d: int
    gated: bool
    activation: str
    threshold: float
    up_bias: npt.NDArray[np.float32]
    gate_bias: npt.NDArray[np.float32] | None
    x: npt.NDArray[np.float32]
    start: npt.NDArray[np.float32]
    mask: npt.NDArray[np.bool_]

    def of(self, sequences: Any) -> Layer:
        """The same layer for some of the sequences."""
        return self._replace(x=self.x[sequences], start=self.start[sequences], mask=self.mask[sequences])

    def window(self, rng: np.random.Generator) -> tuple[Layer, I64]:
        """The rows at random places of a window full of NaN, and those places."""
        m = len(self.rows)
        size = m + int(rng.integers(0, m + 3))
        places = rng.permutation(size)[:m]
        rows = np.full((size, self.rows.shape[1]), 0xFF, np.uint8)
        rows[places] = self.rows
        biases = []
        for bias in (self.up_bias, self.gate_bias):
            spread = np.full(size, np.nan, np.float32)
            if bias is not None:
                spread[places] = bias
            biases.append(None if bias is None else spread)
        return self._replace(rows=rows, up_bias=biases[0], gate_bias=biases[1]), places


def layer_of(
    rng: np.random.Generator, m: int, d: int, batch: int, dtype: str, gated: bool, activation: str
) -> Layer:
    rows, *_ = reference.rows_of(rng, m, d, gated, dtype, int(rng.integers(0, 40)))
    return Layer(
        rows, dtype, d, gated, activation, float(rng.choice([0.0, 0.2])),
        reference.normal(rng, m), reference.normal(rng, m) if gated else None,
        reference.normal(rng, batch, d), reference.normal(rng, batch, d), rng.random((batch, m)) < 0.7,
    )  # fmt: skip


def dots(verbs: ModuleType, layer: Layer, out: npt.NDArray[np.float32], index: Any, slots: Any) -> I64:
    fired: I64 = verbs.ffn_dots(
        layer.rows, layer.dtype, layer.d, layer.gated, layer.activation, layer.x, out,
        layer.up_bias, layer.gate_bias,
        index=index, slots=slots, mask=layer.mask, threshold=layer.threshold,
    )  # fmt: skip
    return fired


def at_once(verbs: ModuleType, layer: Layer) -> tuple[Any, Any, Any]:
    """Hidden units, outputs and fired columns, all rows in one call."""
    h, acc = np.empty(layer.mask.shape, np.float32), layer.start.copy()
    fired = dots(verbs, layer, h, None, None)
    verbs.ffn_down(layer.rows, layer.dtype, layer.d, layer.gated, h, acc)
    return h, acc, fired


def as_they_arrive(verbs: ModuleType, layer: Layer, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """The same through a window: groups of any size in any order, then down over what fired."""
    window, places = layer.window(rng)
    m = len(layer.rows)
    h, acc = np.full(layer.mask.shape, np.nan, np.float32), layer.start.copy()
    cuts = np.sort(rng.integers(0, m + 1, int(rng.integers(0, 6))))
    fired = []
    for group in np.split(rng.permutation(m), cuts):
        slots = np.sort(group)
        fired.append(dots(verbs, window, h, places[slots], slots))
    ids = np.sort(np.concatenate(fired))
    down = np.ascontiguousarray(h[:, ids])
    cut = int(rng.integers(0, len(ids) + 1))  # the down projection may be cut as well
    for part in (slice(0, cut), slice(cut, None)):
        verbs.ffn_down(
            window.rows, layer.dtype, layer.d, layer.gated,
            np.ascontiguousarray(down[:, part]), acc, places[ids[part]],
        )  # fmt: skip
    return h, acc, ids


def compare(got: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        reference.same(mine, theirs)


@EXAMPLES
@given(
    m=st.integers(1, 120),
    d=st.integers(1, 300),
    batch=BATCHES,
    dtype=DTYPES,
    gated=st.booleans(),
    activation=st.sampled_from(reference.ACTIVATIONS),
    seed=SEEDS,
)
def test_any_order_of_arrival(
    verbs: ModuleType, m: int, d: int, batch: int, dtype: str, gated: bool, activation: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer = layer_of(rng, m, d, batch, dtype, gated, activation)
    verbs.set_threads(1)
    expected = at_once(verbs, layer)
    for _ in range(3):
        verbs.set_threads(int(rng.choice(THREADS)))
        compare(as_they_arrive(verbs, layer, rng), expected)
    some = rng.permutation(batch)[: int(rng.integers(1, batch + 1))]
    h, acc, _ = as_they_arrive(verbs, layer.of(some), rng)
    reference.same(h, expected[0][some])
    reference.same(acc, expected[1][some])


@EXAMPLES
@given(
    m=st.integers(1, 90), d=st.integers(1, 200), tokens=PROMPTS, dtype=DTYPES, gated=st.booleans(), seed=SEEDS
)
def test_any_order_of_arrival_for_a_prompt(
    verbs: ModuleType, m: int, d: int, tokens: int, dtype: str, gated: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layer = layer_of(rng, m, d, tokens, dtype, gated, "relu")
    verbs.set_threads(1)
    expected = at_once(verbs, layer)
    for _ in range(2):
        verbs.set_threads(int(rng.choice(THREADS)))
        compare(as_they_arrive(verbs, layer, rng), expected)
    some = rng.permutation(tokens)[: int(rng.integers(17, tokens + 1))]
    h, acc, _ = as_they_arrive(verbs, layer.of(some), rng)
    reference.same(h, expected[0][some])
    reference.same(acc, expected[1][some])
