"""Which rows a token lacks, for a window of any size, from what a bundle's calibration knows. Pure.

The calibration keeps how often each neuron is requested, and what share is requested by any of k tokens in a
row (LLM in a flash, section 3.1), but no trace. So a trace is made that has both: a neuron is requested while
a Gaussian process of its own is above the quantile of its frequency. The process is a mixture of a fast and a
slow one; how much of each, and how fast, is fitted to the usage curve. The daemon's own window then
is run over the trace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from flashd.layout.coalesce import plan_rows
from flashd.memory.eviction import make_policy
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.types import BoolArray, F32Array, I64Array

# Shares of the slow process that are tried, and its correlation from one token to the next.
_SLOW_SHARES = (0.0, 0.25, 0.5, 0.75)
_SLOW = 0.98
# Windows whose usage the choice among these goes by.
_FIT_K = (4, 16, 64)
_TRACE_TOKENS = 96
_WARM_TOKENS = 48
_GRID = NormalDist()
_SHARES = np.linspace(0.0005, 0.9995, 1000)
_QUANTILES = np.array([_GRID.inv_cdf(share) for share in _SHARES])
_ANGLES = 64
_BINS = 400


@dataclass(frozen=True)
class Usage:
    """What a token asks of an average masked layer while it decodes. Rows are per layer and token.

    Attributes:
        requested: rows that the predictor asks for.
        demand: of these, rows that are read when they are needed.
        ahead: rows that are read on a guess before.
        reads: device reads that they take.
        read_rows: rows that these bring, those of gaps among them.
        upkeep_s: what the window's tables take, in seconds per layer.
    """

    requested: float
    demand: float
    ahead: float
    reads: float
    read_rows: float
    upkeep_s: float


def both_shares(share: F32Array, correlation: float) -> F32Array:
    """Probability ``[n]`` that two tokens request a neuron with these shares.

    Args:
        share: ``[n]``, share of tokens that request each.
        correlation: of the neuron's process at the two tokens: the orthant of a bivariate normal
            distribution, by Plackett's integral.
    """
    quantile = np.interp(1 - share, _SHARES, _QUANTILES)
    angle = np.linspace(0, math.asin(min(max(correlation, -0.999), 0.999)), _ANGLES)
    inside = np.exp(-(quantile[:, None] ** 2) / (1 + np.sin(angle)[None, :])) / (2 * math.pi)
    both: F32Array = share**2 + np.trapezoid(inside, angle, axis=1)
    return both


def correlation_of(share: F32Array, used_by_two: float) -> float:
    """Correlation from one token to the next with which two tokens request ``used_by_two`` of all neurons.

    Args:
        share: ``[n]``, share of tokens that request each neuron.
        used_by_two: mean share requested by any of two tokens in a row.
    """
    # Neurons with nearly the same share are one: thousands of them take no longer than a few.
    count, _ = np.histogram(share, _BINS, (0.0, 1.0))
    total, _ = np.histogram(share, _BINS, (0.0, 1.0), weights=share)
    some = count > 0
    typical = (total[some] / count[some]).astype(np.float32)
    low, high = -0.9, 0.999
    for _ in range(16):
        middle = (low + high) / 2
        used = float(np.average(2 * typical - both_shares(typical, middle), weights=count[some]))
        low, high = (middle, high) if used > used_by_two else (low, middle)
    return (low + high) / 2


def make_trace(
    share: F32Array, first: float, slow_share: float, n_tokens: int, rng: np.random.Generator
) -> BoolArray:
    """``[n_tokens, n]``, which token requests which neuron.

    Args:
        share: ``[n]``, share of tokens that request each.
        first: correlation of the processes from one token to the next.
        slow_share: of their variance, what changes slowly.
        n_tokens: length.
        rng: random numbers.
    """
    fast_share = 1 - slow_share
    fast = max(-0.95, min(0.999, (first - slow_share * _SLOW) / fast_share))
    quantile = np.interp(1 - share, _SHARES, _QUANTILES).astype(np.float32)
    parts = [rng.standard_normal(len(share), np.float32) for _ in range(2)]
    weights = [math.sqrt(fast_share), math.sqrt(slow_share)]
    trace = np.empty((n_tokens, len(share)), np.bool_)
    for token in range(n_tokens):
        trace[token] = weights[0] * parts[0] + weights[1] * parts[1] > quantile
        for part, rho in enumerate((fast, _SLOW)):
            if weights[part]:
                noise = rng.standard_normal(len(share), np.float32)
                parts[part] = np.float32(rho) * parts[part] + np.float32(math.sqrt(1 - rho * rho)) * noise
    return trace


def usage_of(trace: BoolArray, k: int) -> float:
    """Mean share of neurons that any of ``k`` tokens in a row requests."""
    starts = range(0, len(trace) - k + 1, max(1, k // 4))
    return float(np.mean([trace[start : start + k].any(axis=0).mean() for start in starts]))


def traces_of(
    frequency: Sequence[F32Array], s_agg: Sequence[Sequence[float]], seed: int = 0
) -> list[BoolArray]:
    """A trace ``[tokens, n]`` for each layer, whose usage curve is as near to the measured one as it gets.

    Args:
        frequency: per layer ``[n]``, share of tokens that request each neuron.
        s_agg: per layer, share requested by any of 1, 2, ... tokens in a row; empty: nothing is known, and
            tokens have nothing in common but the frequencies.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    firsts = [
        correlation_of(share, curve[1]) if len(curve) > 1 else 0.0
        for share, curve in zip(frequency, s_agg, strict=True)
    ]

    def error(slow: float) -> float:
        trace = make_trace(frequency[0], firsts[0], slow, _TRACE_TOKENS, rng)
        curve = s_agg[0]
        return sum(abs(math.log(usage_of(trace, k) / max(curve[k - 1], 1e-6))) for k in _FIT_K)

    slow = 0.0
    if len(s_agg[0]) >= _FIT_K[-1]:
        # A slow process alone correlates tokens more than they are: its share is bounded by that.
        tried = [share for share in _SLOW_SHARES if share * _SLOW <= max(firsts[0], 0) or share == 0]
        slow = min(tried, key=error)
    return [
        make_trace(share, first, min(slow, max(first, 0.0)), _TRACE_TOKENS, rng)
        for share, first in zip(frequency, firsts, strict=True)
    ]


@dataclass(frozen=True)
class WindowShape:
    """A window to try.

    Attributes:
        capacity: rows that each of the layers may keep.
        spare: rows beside them.
        eviction: name of the policy.
        k: its window's length.
        ahead_rows: rows that may be read on a guess at a time; 0: nothing is guessed.
        max_gap: longest gap of neurons that is read over.
        max_run: longest read, in neurons.
    """

    capacity: tuple[int, ...]
    spare: int
    eviction: str
    k: int
    ahead_rows: int
    max_gap: int
    max_run: int


def run_window(traces: Sequence[BoolArray], frequency: Sequence[F32Array], shape: WindowShape) -> Usage:
    """Run the daemon's window over traces as a decoding step does, and count.

    Guesses are right: what a lookahead misses is read on demand, and nobody has measured how much that is.

    Args:
        traces: per layer ``[tokens, n]``.
        frequency: per layer ``[n]``, what the policy knows beforehand.
        shape: of the window.
    """
    n_layers, n = len(traces), traces[0].shape[1]
    n_rows = sum(shape.capacity) + shape.spare
    policy = make_policy(shape.eviction, n_layers, n, max(1, shape.k), np.stack(frequency))
    pool = RowPool(np.zeros((n_rows, 1), np.uint8), n_rows)
    window = Window(pool, n_layers, n, shape.capacity, policy)
    for layer, share in enumerate(frequency):  # as a prompt leaves it, or nearly
        most = np.sort(np.argsort(share)[::-1][: window.capacity[layer]])
        window.insert(layer, most)
        window.settle(layer, most)
    run = _Run(window, shape)
    for token in range(_TRACE_TOKENS):
        if token == _WARM_TOKENS:
            window.balance()
            run.restart()
        for layer in range(n_layers):
            following = traces[layer + 1][token] if layer + 1 < n_layers else None
            if layer == 0:
                run.guess(0, np.flatnonzero(traces[0][token]))
            run.layer(layer, np.flatnonzero(traces[layer][token]), following, token + 1)
    return run.usage((_TRACE_TOKENS - _WARM_TOKENS) * n_layers)


class _Run:
    """Steps over a window, and what they counted."""

    def __init__(self, window: Window, shape: WindowShape) -> None:
        self._window = window
        self._shape = shape
        self._coming: tuple[int, I64Array] | None = None
        self.restart()

    def restart(self) -> None:
        self._requested = self._demand = self._ahead = self._reads = self._read_rows = 0
        self._spent_s = 0.0

    def guess(self, layer: int, ids: I64Array) -> None:
        """Read ahead into half of the rows that are free, as ``SparseFFN`` does."""
        window = self._window
        began_s = time.perf_counter()
        room = min(self._shape.ahead_rows, window.pool.n_free // 2)
        taken = window.guess(layer, ids, room)[0] if room > 0 else ids[:0]
        self._spent_s += time.perf_counter() - began_s
        self._coming = (layer, taken)
        self._ahead += len(taken)
        self._read(taken)

    def layer(self, layer: int, ids: I64Array, following: BoolArray | None, step: int) -> None:
        """One layer of one step."""
        window = self._window
        upcoming = None if following is None else np.flatnonzero(following)
        began_s = time.perf_counter()
        if self._coming is not None:
            window.settle(*self._coming)
            self._coming = None
        window.trim(layer - 1 if layer else len(window.used) - 1)
        parts = window.request(layer, ids, step)[2]
        window.make_room(layer, len(parts.missing))
        missing = ids[parts.missing]
        fits = missing[: window.pool.n_free]  # what is too much takes rounds, but no other reads
        window.insert(layer, fits)
        self._spent_s += time.perf_counter() - began_s
        if upcoming is not None:
            self.guess(layer + 1, upcoming)
        window.settle(layer, fits)
        self._requested += len(ids)
        self._demand += len(missing)
        self._read(missing)

    def _read(self, ids: I64Array) -> None:
        shape = self._shape
        plan = plan_rows(
            ids, np.arange(len(ids)), max_gap_neurons=shape.max_gap, max_run_neurons=shape.max_run
        )
        self._reads += len(plan)
        self._read_rows += int(plan.count.sum())

    def usage(self, n: int) -> Usage:
        """What was counted, per layer and token."""
        return Usage(
            self._requested / n, self._demand / n, self._ahead / n, self._reads / n, self._read_rows / n,
            self._spent_s / n,
        )  # fmt: skip
