"""What is known of one layer while it is computed over predicted neurons, and who computes prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from flashd.prefetch.scheduler import RowRead
from flashd.types import BoolArray, F32Array, I64Array

_NOTHING: I64Array = np.empty(0, np.int64)


def _nothing() -> I64Array:
    return _NOTHING


@dataclass(eq=False)
class Work:
    """A layer of one step. Places are indices into ``ids``, and columns of ``hidden``.

    Attributes:
        layer: layer index.
        x: FFN input, ``[B, d_model]``.
        ids: ``[m]`` ascending, requested neurons.
        mask: ``[B, m]``, by which sequence; None where there is one.
        hidden: ``[B, m]``.
        acc: ``[B, d_model]``, the sum so far.
        loop: the store's.
        number: of all works so far; only the last one's rows are where it says.
        rows: ``[m]``, their rows, up to ``stop``.
        start, stop: places of this round.
        coming: places of this round whose rows a guess is bringing.
        missing: places of this round that ``demand`` is bringing.
        demand: this round's read of what was missing.
        waits: other reads to wait for.
    """

    layer: int
    x: F32Array
    ids: I64Array
    mask: BoolArray | None
    hidden: F32Array
    acc: F32Array
    loop: asyncio.AbstractEventLoop
    number: int = 0
    rows: I64Array = field(default_factory=_nothing)
    start: int = 0
    stop: int = 0
    coming: I64Array = field(default_factory=_nothing)
    missing: I64Array = field(default_factory=_nothing)
    demand: RowRead | None = None
    waits: list[RowRead] = field(default_factory=list)


class PromptSource(Protocol):
    """The FFN of a prompt's chunk."""

    async def apply(self, layer: int, x: Callable[[], F32Array]) -> Callable[[], F32Array]:
        """As ``FFNSource.apply``, for more than ``MAX_BATCH`` tokens."""
        ...
