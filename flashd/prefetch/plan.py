"""What to read for a layer: wanted - resident - in flight, in order. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashd.types import BoolArray, I64Array

_NOTHING: I64Array = np.empty(0, np.int64)


@dataclass(frozen=True)
class Split:
    """Where the wanted rows of a layer are; every place of the list is in exactly one column.

    Attributes:
        here: places of rows in RAM, ascending.
        coming: places of rows in flight, ascending.
        missing: places of neurons without a row, ascending.
    """

    here: I64Array
    coming: I64Array
    missing: I64Array


def split(rows: I64Array, in_flight: BoolArray | None) -> Split:
    """Sort the wanted rows by where they are.

    Args:
        rows: ``[m]``, row of each wanted neuron, negative where it has none.
        in_flight: by row; None if none of this layer's is.
    """
    there = rows >= 0
    missing = np.flatnonzero(~there)
    here = np.flatnonzero(there)
    if in_flight is None:
        return Split(here, _NOTHING, missing)
    flying = in_flight[rows[here]]
    return Split(here[~flying], here[flying], missing)


def round_end(missing: I64Array, start: int, count: int, room: int) -> int:
    """How far one can get with ``room`` free rows: one past the last place of ``start..count-1`` such
    that no more neurons than that are missing before it. In ascending order, so that the down projection
    sums in one order however many rounds there are.

    Args:
        missing: ``[n]``, places of missing neurons, ascending, all at least ``start``.
        start: first place.
        count: one past the last place.
        room: rows.
    """
    return count if len(missing) <= room else int(missing[room]) if room else int(missing[0])


def worth_reading(guess: I64Array, rows: I64Array, room: int) -> I64Array:
    """Neurons of a guess to read early: those without a row, as many as there is room for.

    Args:
        guess: ``[m]`` ascending.
        rows: ``[m]``, row of each, negative where it has none.
        room: rows that may be read.
    """
    return guess[rows < 0][: max(0, room)]
