"""Which neuron has which row of a pool: looking rows up, and choosing those that go."""

from __future__ import annotations

import numpy as np

from flashd.kernels import check
from flashd.types import BoolArray, F32Array, I32Array, I64Array


def find_rows(
    ids: I64Array, row_of: I32Array, in_flight: BoolArray
) -> tuple[I64Array, I64Array, I64Array, I64Array]:
    """Look up neurons' rows, and sort them by where they are.

    Args:
        ids: ``[m]``, neurons.
        row_of: ``[n]`` int32, the row of each neuron; negative: it has none.
        in_flight: ``[n]``, whether its row is still being read.

    Returns:
        Their rows, ``[m]``; the places ``0..m-1``, ascending, of those that are here, that are coming, and
        that are missing.

    Raises:
        TypeError, ValueError: as ``check.array`` says; an id out of range.
    """
    verb = "find_rows"
    check.array(verb, "ids", ids, ("int64",), ("m",))
    check.array(verb, "row_of", row_of, ("int32",), ("n",))
    check.array(verb, "in_flight", in_flight, ("bool",), (len(row_of),))
    check.below(verb, "ids", ids, len(row_of))
    rows = row_of[ids].astype(np.int64)
    there = rows >= 0
    coming = there & in_flight[ids]
    return rows, np.flatnonzero(there & ~coming), np.flatnonzero(coming), np.flatnonzero(~there)


def request_rows(
    ids: I64Array,
    step: int,
    last: I32Array,
    guessed: BoolArray,
    row_of: I32Array,
    in_flight: BoolArray,
    count: F32Array | None = None,
    credit: float = 0.0,
) -> tuple[int, I64Array, I64Array, I64Array, I64Array]:
    """Note that neurons are requested, and look them up as ``find_rows`` does.

    Args:
        ids: ``[m]``, all different.
        step: when.
        last: ``[n]`` int32, when each neuron was requested last: ``step`` now.
        guessed: ``[n]``, whether nobody has asked for it so far: no longer.
        row_of, in_flight: as for ``find_rows``.
        count: ``[n]``, grows by ``credit``.
        credit: in float32.

    Returns:
        How many of them were guessed; what ``find_rows`` returns.

    Raises:
        TypeError, ValueError: as ``check.array`` says; an id out of range.
    """
    verb = "request_rows"
    check.array(verb, "ids", ids, ("int64",), ("m",))
    check.array(verb, "last", last, ("int32",), ("n",), writeable=True)
    n = len(last)
    check.array(verb, "guessed", guessed, ("bool",), (n,), writeable=True)
    check.array(verb, "row_of", row_of, ("int32",), (n,))
    check.array(verb, "in_flight", in_flight, ("bool",), (n,))
    check.optional(verb, "count", count, check.F32, (n,), writeable=True)
    check.below(verb, "ids", ids, n)
    last[ids] = step
    were_guessed = int(np.count_nonzero(guessed[ids]))
    guessed[ids] = False
    if count is not None:
        count[ids] += np.float32(credit)
    return were_guessed, *find_rows(ids, row_of, in_flight)


def evict_rows(
    row_of: I32Array,
    in_flight: BoolArray,
    last: I32Array,
    step: int,
    value: F32Array | I32Array,
    guessed: BoolArray,
    k: int,
    owner: I64Array,
    free: I64Array,
    n_free: int,
) -> tuple[int, int]:
    """Take the rows that are worth least away from their neurons, of those that may go.

    A guessed one is worth less than any other; among equals the lower neuron goes, and NaN is worth most.

    Args:
        row_of: ``[n]`` int32, the row of each neuron; negative: it has none. Becomes -1 where it goes.
        in_flight: ``[n]``, whether its row is still being read; then it stays.
        last: ``[n]`` int32, when each neuron was requested last.
        step: what was requested then stays.
        value: ``[n]`` float32 or int32, what each is worth.
        guessed: ``[n]``, whether nobody has asked for it so far; False where it goes.
        k: how many, at most.
        owner, free, n_free: as for ``drop_rows``.

    Returns:
        How many have gone, and how many of them were guessed.

    Raises:
        TypeError, ValueError: as ``check.array`` says; a negative k; as ``drop_rows``.
    """
    verb = "evict_rows"
    check.array(verb, "row_of", row_of, ("int32",), ("n",), writeable=True)
    n = len(row_of)
    check.array(verb, "in_flight", in_flight, ("bool",), (n,))
    check.array(verb, "last", last, ("int32",), (n,))
    check.array(verb, "value", value, ("float32", "int32"), (n,))
    check.array(verb, "guessed", guessed, ("bool",), (n,), writeable=True)
    check.array(verb, "owner", owner, ("int64",), ("rows",), writeable=True)
    check.array(verb, "free", free, ("int64",), (len(owner),), writeable=True)
    if k < 0:
        raise ValueError(f"{verb}: k is {k}, expected at least 0")
    ids = np.flatnonzero((row_of >= 0) & (last != step) & ~in_flight)
    worth = np.where(guessed[ids], value.dtype.type(0), value[ids])
    # The last key decides first, and the sort is stable.
    order = np.lexsort((worth, np.isnan(worth), ~guessed[ids]))
    gone = np.sort(ids[order[:k]])
    _drop(verb, gone, row_of, owner, free, n_free)
    were_guessed = int(np.count_nonzero(guessed[gone]))
    guessed[gone] = False
    return len(gone), were_guessed


def take_rows(
    ids: I64Array,
    most: int,
    first: int,
    row_of: I32Array,
    in_flight: BoolArray,
    owner: I64Array,
    free: I64Array,
    n_free: int,
    guessed: BoolArray | None = None,
) -> tuple[I64Array, I64Array]:
    """Give rows of a pool to those neurons of a layer that have none; both ascend, and the rows are about to
    be read.

    Args:
        ids: ``[m]``, ascending.
        most: how many may get one: the lower ones do.
        first: the layer's first neuron, in the numbering of ``owner``.
        row_of: ``[n]`` int32, the layer's rows; negative: none.
        in_flight: ``[n]``, True now for those that get one.
        owner: ``[rows]``, whose each row is; -1: nobody's.
        free: ``[rows]``, of which the first ``n_free`` are the numbers of nobody's rows; the last go first.
        n_free: at least ``most``.
        guessed: ``[n]``, likewise.

    Returns:
        Neurons that have got a row, and their rows.

    Raises:
        TypeError, ValueError: as ``check.array`` says; a number out of range or of order.
    """
    verb = "take_rows"
    check.array(verb, "ids", ids, ("int64",), ("m",))
    check.array(verb, "row_of", row_of, ("int32",), ("n",), writeable=True)
    n = len(row_of)
    check.array(verb, "in_flight", in_flight, ("bool",), (n,), writeable=True)
    check.array(verb, "owner", owner, ("int64",), ("rows",), writeable=True)
    check.array(verb, "free", free, ("int64",), (len(owner),))
    check.optional(verb, "guessed", guessed, ("bool",), (n,), writeable=True)
    check.within(verb, "n_free", n_free, 0, len(owner))
    check.within(verb, "most", most, 0, n_free)
    check.ascending(verb, "ids", ids, n)
    taken = ids[row_of[ids] < 0][:most]
    rows = np.sort(free[n_free - len(taken) : n_free])
    if len(rows) and (rows[0] < 0 or rows[-1] >= len(owner)):
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise ValueError(f"{verb}: free has {wrong}, expected 0..{len(owner) - 1}")
    owner[rows] = taken + first
    row_of[taken] = rows
    in_flight[taken] = True
    if guessed is not None:
        guessed[taken] = True
    return taken, rows


def drop_rows(ids: I64Array, row_of: I32Array, owner: I64Array, free: I64Array, n_free: int) -> None:
    """Take the rows of neurons away from them; the other way round than ``take_rows``.

    Args:
        ids: ``[m]``, ascending, each with a row.
        row_of: ``[n]`` int32, the layer's rows: those of ``ids`` become -1.
        owner: ``[rows]``, whose each row is; -1: nobody's.
        free: ``[rows]``, of which the first ``n_free`` are the numbers of nobody's rows; m are added.
        n_free: as above.

    Raises:
        TypeError, ValueError: as ``check.array`` says; a number out of range or of order.
    """
    verb = "drop_rows"
    check.array(verb, "ids", ids, ("int64",), ("m",))
    check.array(verb, "row_of", row_of, ("int32",), ("n",), writeable=True)
    check.array(verb, "owner", owner, ("int64",), ("rows",), writeable=True)
    check.array(verb, "free", free, ("int64",), (len(owner),), writeable=True)
    check.ascending(verb, "ids", ids, len(row_of))
    _drop(verb, ids, row_of, owner, free, n_free)


def _drop(verb: str, ids: I64Array, row_of: I32Array, owner: I64Array, free: I64Array, n_free: int) -> None:
    check.within(verb, "n_free", n_free, 0, len(owner) - len(ids))
    rows = row_of[ids]
    if (wrong := np.flatnonzero((rows < 0) | (rows >= len(owner)))).size:
        at = wrong[0]
        raise ValueError(f"{verb}: row_of is {rows[at]} at {ids[at]}, expected 0..{len(owner) - 1}")
    owner[rows] = -1
    free[n_free : n_free + len(ids)] = rows
    row_of[ids] = -1
