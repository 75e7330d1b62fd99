"""What to read for a layer of what is neither here nor coming. Pure."""

from __future__ import annotations

from flashd.types import I64Array


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
