"""Fewer, larger reads out of many neuron ids. Pure."""

from __future__ import annotations

import numpy as np

from flashd.types import I64Array


def coalesce_runs(ids: I64Array) -> tuple[I64Array, I64Array]:
    """Runs of neighbouring neurons in the order given.

    Neighbours that follow each other in ``ids`` lie side by side on flash and in the
    destination, so each run is one read.

    Args:
        ids: ``[n]`` neuron ids, any order, repeats allowed.

    Returns:
        Index into ``ids`` of every run's first neuron, and every run's length; both ``[runs]``.
    """
    if not len(ids):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1).astype(np.int64)
    return first, np.diff(first, append=len(ids)).astype(np.int64)
