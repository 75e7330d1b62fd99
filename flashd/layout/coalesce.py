"""Fewer, larger reads out of many neuron ids (LLM in a flash, section 4.1). Pure.

Neighbours merge into one read; a small gap between two wanted neurons is read over, because one
longer read is cheaper than two. Each row still lands in its own place::

    ids         7  4  5  9            file    . . . . 4 5 . 7 . 9 . . .
    rows        0  1  2  3            read            [===========]        max_gap_neurons=1
                                      lands in rows   1 2 - 0 - 3          -: GAP, thrown away
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashd.types import BoolArray, I64Array

# Destination row of neurons that are read and thrown away.
GAP = -1
# The search for a curve's best line takes memory with the third power of its sizes: 3 MiB with so many.
MAX_CURVE_SIZES = 64


@dataclass(frozen=True)
class RowPlan:
    """``n`` reads into ``m`` places, in ascending order of neurons; units are neurons and rows.

    Attributes:
        neuron: ``[n]`` int64, first neuron of each read.
        first: ``[n]`` int64, ascending from 0: index of each read's first place. A read goes on through
            its places without a gap in the file; it begins and ends with a wanted neuron.
        count: ``[m]`` int64, neurons for each place, at least one.
        row: ``[m]`` int64, destination row of each place's first neuron (its others follow), or ``GAP``.
    """

    neuron: I64Array
    first: I64Array
    count: I64Array
    row: I64Array

    def __len__(self) -> int:
        return len(self.neuron)


def plan_rows(ids: I64Array, rows: I64Array, *, max_gap_neurons: int = 0, max_run_neurons: int) -> RowPlan:
    """Reads that bring every neuron of ``ids`` into its row.

    Two wanted neurons share a read when at most ``max_gap_neurons`` lie between them, unless the read
    would get longer than ``max_run_neurons``: then it is cut into the fewest parts of even length. An id
    that is repeated starts another read.

    Args:
        ids: ``[k]`` int64 neuron ids >= 0, any order, repeats allowed. Ascending ids are planned fastest.
        rows: ``[k]`` int64, destination row >= 0 of each.
        max_gap_neurons: longest gap to read over; 0 merges neighbours only.
        max_run_neurons: longest read, gaps included. No read has more places than that, so that it bounds
            the list of destinations as well.

    Raises:
        ValueError: arrays that do not match, a negative row, or a limit out of range.
    """
    for name, column in (("ids", ids), ("rows", rows)):
        if column.dtype != np.int64 or column.shape != (len(ids),):
            raise ValueError(f"{name} is {column.dtype}{list(column.shape)}, expected int64[{len(ids)}]")
    if max_gap_neurons < 0 or max_run_neurons < 1:
        raise ValueError(f"gaps of {max_gap_neurons} (want >= 0) in reads of {max_run_neurons} (want >= 1)")
    if not len(ids):
        nothing = np.empty(0, np.int64)
        return RowPlan(nothing, nothing, nothing, nothing)
    if int(rows.min()) < 0:
        raise ValueError(f"destination row {int(rows.min())}, expected 0 or more")
    step = np.diff(ids)
    if len(step) and int(step.min()) < 0:
        ids, rows = _sorted(ids, rows)
        step = np.diff(ids)
    joined = _joined(ids, step, max_gap_neurons, max_run_neurons)
    place_at = _starts(~joined | (step != 1) | (np.diff(rows) != 1))
    before = place_at[1:] - 1
    new_read = ~joined[before]
    neuron = ids[np.append(0, place_at[1:][new_read])]
    count, row = np.diff(place_at, append=len(ids)), rows[place_at]
    if max_gap_neurons:
        gap = np.where(new_read, 0, step[before] - 1)
        new_read, count, row = _insert_gaps(new_read, gap, count, row)
    return RowPlan(neuron, _starts(new_read), count, row)


def _sorted(ids: I64Array, rows: I64Array) -> tuple[I64Array, I64Array]:
    """Both in ascending order of ids, repeats in the order given.

    Sorting values is several times faster than sorting indices, so the index rides in the low bits.
    """
    bits = len(ids).bit_length()
    if int(ids.min()) < 0 or int(ids.max()) >> (62 - bits):
        raise ValueError(f"ids {int(ids.min())}..{int(ids.max())} are not neurons")
    key = np.sort((ids << bits) | np.arange(len(ids)))
    return key >> bits, rows[key & ((1 << bits) - 1)]


def _starts(new: BoolArray) -> I64Array:
    """Index of each group's first element, given whether each element but the first starts one."""
    return np.append(0, np.flatnonzero(new) + 1)


def _joined(ids: I64Array, step: I64Array, max_gap: int, max_run: int) -> BoolArray:
    """Whether each of the ascending ids but the last shares a read with the next one, ``[k - 1]``."""
    joined = (step > 0) & (step <= max_gap + 1)
    start = _starts(~joined)
    length = np.diff(start, append=len(ids))
    span = ids[start + length - 1] - ids[start] + 1
    if int(span.max()) > max_run:
        # A grid of equal cells over every run, not one cut after another: no loop, even reads.
        cell = -(-span // -(-span // max_run))
        place = (ids - np.repeat(ids[start], length)) // np.repeat(cell, length)
        joined &= np.diff(place) == 0
    return joined


def _insert_gaps(
    new_read: BoolArray, gap: I64Array, count: I64Array, row: I64Array
) -> tuple[BoolArray, I64Array, I64Array]:
    """Put a place of ``gap[i]`` neurons between places ``i`` and ``i + 1`` wherever that is not 0.

    ``new_read`` says of each place but the first whether a read starts there.
    """
    counts, rows = np.empty(2 * len(count) - 1, np.int64), np.full(2 * len(count) - 1, GAP, np.int64)
    starts = np.zeros(2 * len(count) - 1, np.bool_)
    counts[0::2], counts[1::2] = count, gap
    rows[0::2], starts[2::2] = row, new_read
    kept = np.flatnonzero(counts)
    return starts[kept[1:]], counts[kept], rows[kept]


def break_even_gap_bytes(size_bytes: npt.ArrayLike, read_s: npt.ArrayLike) -> int:
    """Longest gap that is worth reading over, out of a measured curve.

    With a full queue a read of ``s`` bytes takes about ``a + b * s``: reading over ``g`` bytes costs
    ``b * g`` and saves one ``a``, so the limit is ``a / b``. Of all lines through two of the points the
    one with the least sum of relative errors (logarithms of ratios) is taken: one odd point does not
    bend it, and large reads do not drown small ones.

    Args:
        size_bytes: ``[n]`` sizes of reads. Of more than ``MAX_CURVE_SIZES`` so many are used, evenly chosen
            from the smallest to the largest.
        read_s: ``[n]`` time the device needs for a read of that size: elapsed time through reads done.

    Returns:
        0 to the largest size; 0 with less than three different sizes, which say nothing about a line.

    Raises:
        ValueError: sizes or times that are not finite and positive.
    """
    size, time = np.asarray(size_bytes, np.float64), np.asarray(read_s, np.float64)
    if size.shape != time.shape or size.ndim != 1:
        raise ValueError(f"{list(size.shape)} sizes and {list(time.shape)} times, expected one time a size")
    if not (np.isfinite(size) & np.isfinite(time) & (size > 0) & (time > 0)).all():
        raise ValueError("a size or time is not a positive number")
    if len(size) > MAX_CURVE_SIZES:
        kept = np.linspace(0, len(size) - 1, MAX_CURVE_SIZES).round().astype(np.int64)
        kept = np.argsort(size, kind="stable")[kept]
        size, time = size[kept], time[kept]
    if len(set(size.tolist())) < 3:
        return 0
    i, j = np.triu_indices(len(size), 1)
    i, j = i[size[i] != size[j]], j[size[i] != size[j]]
    slope = (time[j] - time[i]) / (size[j] - size[i])
    base = time[i] - slope * size[i]
    ratio = (base[:, None] + slope[:, None] * size) / time
    # A line that passes below zero is out: the logarithm of next to nothing is worse than any error.
    best = int(np.abs(np.log(np.maximum(ratio, 1e-300))).sum(axis=1).argmin())
    a, b, largest = float(base[best]), float(slope[best]), int(size.max())
    if a <= 0:
        return 0
    return largest if b * largest <= a else int(a / b)
