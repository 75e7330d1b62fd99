"""What a number of bytes buys: resident layers, rows of the window, spare rows. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flashd.errors import ConfigError
from flashd.layout.calibration import MAX_WINDOW
from flashd.types import FFNGeometry

# Rows below which a model with masks is not worth starting: every layer would take many rounds.
MIN_POOL_ROWS = 64
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")
# More than any machine has: a number with hundreds of digits is an infinite float.
_MOST_BYTES = 1 << 62
# Of the rows, at most so much is kept free for reads on their way.
_MAX_SPARE_SHARE = 1 / 8


@dataclass(frozen=True)
class Demand:
    """What a model would like to have in RAM.

    Attributes:
        geometry: of the rows.
        fixed_bytes: weights that are always in RAM, and predictors.
        ring_bytes: stream buffers.
        masked: per layer, whether it has a mask.
        capacity_rows: per layer, rows requested by any of k steps, for k = 1, 2, ...; empty: not known.
    """

    geometry: FFNGeometry
    fixed_bytes: int
    ring_bytes: int
    masked: Sequence[bool]
    capacity_rows: Sequence[Sequence[int]] = ()

    @property
    def everything_bytes(self) -> int:
        """Bytes with which nothing is ever read twice."""
        layers_bytes = self.geometry.n_layers * self.geometry.layer_bytes
        spare = self.spare_rows(self.geometry.n_layers * self.geometry.n_neurons) if any(self.masked) else 0
        return self.fixed_bytes + self.ring_bytes + layers_bytes + spare * self.geometry.stride_bytes

    @property
    def least_rows(self) -> int:
        """Rows of the window below which a model with masks is not started."""
        return min(MIN_POOL_ROWS, sum(self.masked) * self.geometry.n_neurons)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that ``allocate`` accepts."""
        return self.fixed_bytes + self.ring_bytes + self.least_rows * self.geometry.stride_bytes

    def wanted_rows(self, layer: int, k: int) -> int:
        """Rows that a masked layer needs so that what k steps request stays."""
        if not self.masked[layer]:
            return 0
        n = self.geometry.n_neurons
        known = self.capacity_rows[layer] if self.capacity_rows else ()
        if not known:  # no measurements: evenly
            return max(1, n * k // MAX_WINDOW)
        return min(n, max(1, known[min(k, len(known)) - 1]))

    def spare_rows(self, n_rows: int) -> int:
        """Of so many rows, how many are kept free for reads on their way: half of what a step requests."""
        one_step = max(self.wanted_rows(layer, 1) for layer in range(self.geometry.n_layers))
        return int(min(one_step // 2 + MIN_POOL_ROWS // 2, max(1, n_rows * _MAX_SPARE_SHARE)))


@dataclass(frozen=True)
class Allocation:
    """What the budget is spent on.

    Attributes:
        budget_bytes: the budget.
        resident_layers: layers without a mask that are in RAM whole.
        n_rows: of the pool, spare ones included; 0 for a model without masks.
        capacity: rows that each layer may keep.
        k: longest window whose requests fit; 0 if not even one step's do.
    """

    budget_bytes: int
    resident_layers: tuple[int, ...]
    n_rows: int
    capacity: tuple[int, ...]
    k: int


def parse_budget(text: str, whole_bytes: int, auto_bytes: int) -> int:
    """Bytes of a budget as people write it: ``auto``, ``4GiB``, ``55%``.

    Args:
        text: the setting.
        whole_bytes: what 100 % is.
        auto_bytes: what ``auto`` is.

    Raises:
        ConfigError: none of these.
    """
    if text.strip().lower() == "auto":
        return auto_bytes
    match = _SIZE.fullmatch(text)
    number, unit = (match[1], match[2].lower()) if match else ("", "?")
    if unit != "%" and unit not in _UNITS:
        raise ConfigError(f"budget is {text!r}, expected auto, a size such as 4GiB, or a share such as 55%")
    of_bytes = whole_bytes / 100 if unit == "%" else _UNITS[unit]
    return int(min(float(number) * of_bytes, _MOST_BYTES))


def allocate(budget_bytes: int, demand: Demand, k: int = 0) -> Allocation:
    """Spend a budget: first what must be in RAM, then layers without a mask (each of their bytes saves a
    byte a step), as long as one step's requests of the others fit, then the window.

    Args:
        budget_bytes: for everything.
        demand: of the model.
        k: window length in steps to buy and no more; 0: as much as there is room for.

    Raises:
        ConfigError: the budget does not even hold what must be in RAM.
    """
    geometry, masked = demand.geometry, demand.masked
    stride, layers = geometry.stride_bytes, range(geometry.n_layers)
    total_rows = sum(masked) * geometry.n_neurons
    least_rows = demand.least_rows
    left = budget_bytes - demand.least_bytes
    if left < 0:
        # In bytes where somebody may have forgotten the unit.
        given = f"{budget_bytes / 1e6:.1f} MB" if budget_bytes >= 50_000 else f"{budget_bytes} bytes"
        raise ConfigError(
            f"a budget of {given} is too small: resident weights and predictors take "
            f"{demand.fixed_bytes / 1e6:.1f} MB, stream buffers {demand.ring_bytes / 1e6:.1f} MB, and the "
            f"window at least {least_rows * stride / 1e6:.1f} MB; give it "
            f"{demand.least_bytes / 1e6:.1f} MB or more"
        )
    first_step = sum(demand.wanted_rows(layer, 1) for layer in layers)
    room = left - max(0, first_step - least_rows) * stride
    whole = tuple(layer for layer in layers if not masked[layer])[: max(0, room // geometry.layer_bytes)]
    n_rows = least_rows + (left - len(whole) * geometry.layer_bytes) // stride
    if not total_rows:
        return Allocation(budget_bytes, whole, 0, (0,) * geometry.n_layers, 0)
    spare = demand.spare_rows(n_rows)
    capacity, fits = _capacities(demand, min(n_rows - spare, total_rows), k)
    if (k and fits == k) or sum(capacity) == total_rows:  # no use for more
        n_rows = min(n_rows, sum(capacity) + spare)
    return Allocation(budget_bytes, whole, n_rows, capacity, fits)


def _capacities(demand: Demand, n_rows: int, k: int) -> tuple[tuple[int, ...], int]:
    """Rows for each layer, and the longest window that fits into them."""
    layers = range(demand.geometry.n_layers)

    def wanted(steps: int) -> list[int]:
        return [demand.wanted_rows(layer, steps) if steps else 0 for layer in layers]

    longest = min(k, MAX_WINDOW) or MAX_WINDOW  # what more steps request is not known
    fits = max(steps for steps in range(longest + 1) if sum(wanted(steps)) <= n_rows)
    low = wanted(fits)
    if k and fits == longest:
        return tuple(low), k
    n = demand.geometry.n_neurons
    # Between two windows, or between the longest one and everything, all layers go the same share of the way.
    high = wanted(fits + 1) if fits < longest else [n if masked else 0 for masked in demand.masked]
    share = min(1.0, (n_rows - sum(low)) / max(1, sum(high) - sum(low)))
    return tuple(int(a + (b - a) * share) for a, b in zip(low, high, strict=True)), fits
