"""What masks are like: errors against the truth, and how many rows a window of tokens needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashd import kernels
from flashd.disk.buffers import aligned_empty
from flashd.layout.calibration import MAX_WINDOW
from flashd.layout.geometry import LAYER_ALIGN_BYTES
from flashd.store.base import WeightStore
from flashd.types import Activation, BoolArray, F32Array, I64Array, U8Array

_BLOCK_TOKENS = 256
_READ_BYTES = 8 << 20
CAPACITY_PERCENTILE = 99.0


@dataclass(frozen=True)
class Quality:
    """Errors of a mask, pooled over tokens.

    Attributes:
        false_negative: missed / fired.
        false_positive: requested in vain / not fired.
        requested: share of neurons per token.
        fired: likewise.
    """

    false_negative: float
    false_positive: float
    requested: float
    fired: float

    @property
    def precision(self) -> float:
        """Share of the requested that fired."""
        hits = self.fired * (1 - self.false_negative)
        return hits / self.requested if self.requested else 1.0


def bits(packed: Any, n: int) -> BoolArray:
    """``[tokens, ceil(n / 8)]`` uint8 -> ``[tokens, n]``."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, count=n).view(np.bool_)


def quality(requested: Any, fired: Any, n: int) -> Quality:
    """Compare two masks, as packed bits of the same tokens."""
    hits = n_requested = n_fired = 0
    for at in range(0, len(fired), _BLOCK_TOKENS):
        wanted, truth = bits(requested[at : at + _BLOCK_TOKENS], n), bits(fired[at : at + _BLOCK_TOKENS], n)
        hits += int(np.count_nonzero(wanted & truth))
        n_requested += int(np.count_nonzero(wanted))
        n_fired += int(np.count_nonzero(truth))
    total = len(fired) * n
    return Quality(
        (n_fired - hits) / max(1, n_fired),
        (n_requested - hits) / max(1, total - n_fired),
        n_requested / max(1, total),
        n_fired / max(1, total),
    )


def frequency(mask: Any, n: int) -> F32Array:
    """Share of tokens that has each neuron in its mask (packed bits)."""
    counts = np.zeros(n, np.int64)
    for at in range(0, len(mask), _BLOCK_TOKENS):
        counts += bits(mask[at : at + _BLOCK_TOKENS], n).sum(axis=0)
    return (counts / max(1, len(mask))).astype(np.float32)


def threshold_for(scores_of_fired: F32Array, fn_target: float, highest: float) -> float:
    """The score above which all but a share ``fn_target`` of the fired neurons are.

    Args:
        scores_of_fired: of every fired neuron of every token.
        fn_target: share that may be missed.
        highest: of all scores: what is returned where nothing fires.
    """
    if not len(scores_of_fired):
        return float(highest)
    place = min(len(scores_of_fired) - 1, int(fn_target * len(scores_of_fired)))
    kept = np.partition(scores_of_fired, place)[place]
    return float(np.nextafter(np.float32(kept), np.float32(-np.inf)))


@dataclass(frozen=True)
class Usage:
    """Rows that a window of k tokens in a row needs, for k = 1..64.

    Attributes:
        s_agg: mean share of the neurons that any of the tokens has in its mask (paper, section 3.3).
        capacity_rows: 99th percentile of their number (the paper's Req_i).
    """

    s_agg: tuple[float, ...]
    capacity_rows: tuple[int, ...]


def usage(sequences: Iterable[Any], n: int) -> Usage:
    """Measure it over sequences of masks (packed bits); a window lies inside one sequence.

    Windows longer than any sequence count as the longest that there is.
    """
    per_token = [_rows_by_window(bits(sequence, n)) for sequence in sequences]
    shares, capacity = [0.0], [0]
    for k in range(1, MAX_WINDOW + 1):
        rows = np.concatenate([counts[k - 1 :, k - 1] for counts in per_token])
        if len(rows):
            shares.append(float(rows.mean()) / n)
            capacity.append(int(np.percentile(rows, CAPACITY_PERCENTILE, method="higher")))
        else:
            shares.append(shares[-1])
            capacity.append(capacity[-1])
    # Other tokens count for other k: the curve must rise all the same.
    s_agg = np.minimum(1.0, np.maximum.accumulate(shares[1:]))
    return Usage(tuple(s_agg.tolist()), tuple(np.maximum.accumulate(capacity[1:]).tolist()))


def _rows_by_window(mask: BoolArray) -> I64Array:
    """``[tokens, 64]``: neurons in the mask of any of the last k tokens."""
    tokens, n = mask.shape
    counts = np.empty((tokens, MAX_WINDOW), np.int64)
    last = np.full(n, -MAX_WINDOW, np.int32)
    for token in range(tokens):
        last[mask[token]] = token
        age = np.minimum(token - last, MAX_WINDOW)
        counts[token] = np.cumsum(np.bincount(age, minlength=MAX_WINDOW + 1)[:MAX_WINDOW])
    return counts


async def missed_norm(
    store: WeightStore,
    layer: int,
    activation: Activation,
    biases: tuple[F32Array | None, F32Array | None],
    threshold: float,
    x: F32Array,
    requested: U8Array,
) -> float:
    """Share of the norm of an FFN's output that lies in the neurons that are not requested.

    Args:
        store: the rows.
        layer: index.
        activation: of the hidden units.
        biases: of up and gate.
        threshold: activations up to it count as zero.
        x: ``[tokens, d]``, more than 16 tokens.
        requested: their masks as packed bits.

    Returns:
        Sum over tokens of ``|output of the missed|``, by that of ``|output|``.
    """
    geometry = store.geometry
    n, d = geometry.n_neurons, geometry.d_model
    step = min(n, max(1, _READ_BYTES // geometry.stride_bytes))
    buffer = aligned_empty(step * geometry.stride_bytes, max(LAYER_ALIGN_BYTES, store.alignment_bytes))
    wanted = bits(requested, n)
    whole, missed = np.zeros((2, len(x), d), np.float32)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        rows = buffer[: (part.stop - start) * geometry.stride_bytes].reshape(-1, geometry.stride_bytes)
        await store.read_range(layer, start, part.stop, rows)
        layout = (rows, geometry.dtype, d, geometry.gated)
        hidden = np.empty((len(x), len(rows)), np.float32)
        up, gate = (None if bias is None else bias[part] for bias in biases)
        kernels.ffn_dots(*layout, activation, x, hidden, up, gate, threshold=threshold)
        kernels.ffn_down(*layout, hidden, whole)
        hidden[wanted[:, part]] = 0
        kernels.ffn_down(*layout, hidden, missed)
    norms = [float(np.linalg.norm(each.astype(np.float64), axis=1).sum()) for each in (missed, whole)]
    return min(1.0, norms[0] / norms[1]) if norms[1] else 0.0
