"""What a token costs, from what was measured and what a budget buys. Pure.

A layer with a mask, while the next one's guessed rows are read::

    lane  : [compute i ........................][wait: what is left of ahead i+1][wait: demand i+1]
    flash : [ahead i+1 .........................................................][demand i+1      ]

Compute and flash share CPUs and memory: together both are slower than alone, by shares that were measured.
A layer that is streamed was measured as it is, its reads overlapped with its own computing.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashd.tools.plan.facts import Measured, RowTimes, Times
from flashd.tools.plan.usage import Usage

_BISECTIONS = 40


@dataclass(frozen=True)
class TokenCost:
    """Of a token while decoding.

    Attributes:
        times: by kind; their sum is the time per token.
        flash_s: with at least one read outstanding; runs beside the others.
    """

    times: Times
    flash_s: float


def together(compute_s: float, flash_s: float, compute_share: float, flash_share: float) -> float:
    """Seconds in which both run, until the shorter is done.

    Args:
        compute_s: time of computing alone.
        flash_s: time of the reads alone.
        compute_share: speed of computing beside reads, of its own.
        flash_share: speed of reads beside computing, of their own.
    """
    return min(compute_s / compute_share, flash_s / flash_share)


def masked_layer(measured: Measured, usage: Usage) -> TokenCost:
    """A layer with a mask.

    Args:
        measured: of this machine, ``masked`` among it.
        usage: rows that it reads.
    """
    alone = measured.masked
    assert alone is not None, "a model with masked layers is measured with one"
    # The miniature appends to a KV cache and finds all rows; the tables of rows that come and go are on top.
    # Looking up counts twice: a step finds these tables cold, and the run over traces finds them warm.
    memory_s = alone.memory_s + usage.upkeep_s
    rows = measured.rows or RowTimes((1,), (0.0,), 0.0)
    demand_s, ahead_s = rows.at(usage.demand), rows.at(usage.ahead)
    # Starting a read is the lane's own work, even if all of the read is hidden.
    handling_s = rows.handling_s * min(1.0, usage.ahead)
    hidden_s = max(0.0, ahead_s - handling_s)
    lane_s = alone.compute_s + memory_s
    both_s = together(lane_s, hidden_s, measured.compute_share, measured.flash_share)
    slower_s = (1 - measured.compute_share) * both_s
    left_s = hidden_s - measured.flash_share * both_s
    wait_s = handling_s + max(0.0, left_s) + demand_s
    times = Times(wait_s, memory_s, alone.compute_s + slower_s, alone.overhead_s)
    return TokenCost(times, handling_s + both_s + max(0.0, left_s) + demand_s)


@dataclass(frozen=True)
class Layers:
    """How many layers go which way.

    Attributes:
        masked: over predicted neurons.
        resident: without a mask, in RAM.
        streamed: without a mask, streamed.
    """

    masked: int
    resident: int
    streamed: int


def token_cost(measured: Measured, layers: Layers, usage: Usage | None) -> TokenCost:
    """A token, all layers.

    Args:
        measured: of this machine.
        layers: of the model, by what a budget buys.
        usage: of the masked ones; None without any.
    """
    times, flash_s = measured.step, 0.0
    if layers.masked and usage is not None:
        layer = masked_layer(measured, usage)
        times, flash_s = times + layer.times * layers.masked, flash_s + layer.flash_s * layers.masked
    if layers.resident and measured.resident is not None:
        times = times + measured.resident * layers.resident
    if layers.streamed and measured.streamed is not None:
        times = times + measured.streamed * layers.streamed
        flash_s += measured.streamed_busy_s * layers.streamed
    return TokenCost(times, flash_s)


def break_even_share(rows: RowTimes, stream_s: float, n_neurons: int) -> float:
    """Share of a layer's neurons above which reading all of it in one go is as fast as one by one.

    Args:
        rows: what scattered rows take.
        stream_s: what the whole layer takes.
        n_neurons: of the layer.

    Returns:
        0 to 1; 1 where scattered reads never take as long.
    """
    if rows.at(n_neurons) <= stream_s:
        return 1.0
    low, high = 0.0, float(n_neurons)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rows.at(middle) < stream_s else (low, middle)
    return high / n_neurons
