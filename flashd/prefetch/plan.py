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
