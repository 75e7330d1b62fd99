"""In which order a layer's neurons may lie on flash, and what each order costs. Pure.

A read of the device has a price beside that of its bytes, so neurons that are often wanted by the same
token should be neighbours: they become one read. An order is a permutation: ``order[i]`` is the neuron
that lies at place ``i``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashd.layout.coalesce import plan_rows
from flashd.types import BoolArray, F32Array, I64Array, U8Array

# Of each neuron, the most similar ones that it may be linked with.
_NEIGHBOURS = 32
# Neurons and tokens that are compared at a time; with 16384 neurons that is 64 MiB of products each.
_BLOCK = 1024


@dataclass(frozen=True)
class Cost:
    """Reads of flash per token, in the mean; of one layer, or summed over layers.

    Attributes:
        missing: neurons wanted that are not in RAM.
        reads: of the device.
        nbytes: that they read, gaps included.
    """

    missing: float
    reads: float
    nbytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.missing + other.missing, self.reads + other.reads, self.nbytes + other.nbytes)

    def weighed_bytes(self, read_bytes: int) -> float:
        """Bytes, where each read costs as much as ``read_bytes`` more: the device's time, times its speed."""
        return self.nbytes + self.reads * read_bytes


def by_frequency(fired: U8Array, n_neurons: int) -> I64Array:
    """What fires most comes first.

    Args:
        fired: ``[tokens, ceil(n_neurons / 8)]``, bits.
        n_neurons: of the layer.
    """
    return np.argsort(-_counts(fired, n_neurons), kind="stable")


def by_coactivation(fired: U8Array, n_neurons: int) -> I64Array:
    """Chains of neurons that fire together, those that fire most first.

    The most similar pairs (cosine of their firings) are linked first; a neuron has two neighbours at most,
    and no chain becomes a ring.

    Args:
        fired: ``[tokens, ceil(n_neurons / 8)]``, bits.
        n_neurons: of the layer.
    """
    counts = _counts(fired, n_neurons)
    links: list[list[int]] = [[] for _ in range(n_neurons)]
    chain = np.arange(n_neurons)
    for one, other in _pairs(fired, counts):
        if len(links[one]) < 2 and len(links[other]) < 2:
            first, last = _end(chain, one), _end(chain, other)
            if first != last:
                chain[first] = last
                links[one].append(other)
                links[other].append(one)
    chains = sorted(_walk(links), key=lambda ids: -float(counts[ids].mean()))
    return np.concatenate(chains).astype(np.int64)


def _counts(fired: U8Array, n_neurons: int) -> F32Array:
    counts = np.zeros(n_neurons, np.float32)
    for start in range(0, len(fired), _BLOCK):
        counts += np.unpackbits(fired[start : start + _BLOCK], axis=1, count=n_neurons).sum(axis=0)
    return counts


def _pairs(fired: U8Array, counts: F32Array) -> list[list[int]]:
    """Pairs of neurons that fire together, the most similar first."""
    n = len(counts)
    scale = 1 / np.sqrt(counts + 1)  # what hardly ever fires must not look like anything's twin
    k = min(_NEIGHBOURS, n - 1)
    pairs, weights = [], []
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        together = np.zeros((stop - start, n), np.float32)
        for low in range(0, len(fired), _BLOCK):
            block = np.unpackbits(fired[low : low + _BLOCK], axis=1, count=n).astype(np.float32)
            together += block[:, start:stop].T @ block
        together *= scale[start:stop, None] * scale
        together[np.arange(stop - start), np.arange(start, stop)] = 0
        near = np.argpartition(-together, k - 1, axis=1)[:, :k]
        pairs.append(np.stack([np.repeat(np.arange(start, stop), k), near.reshape(-1)], axis=1))
        weights.append(np.take_along_axis(together, near, axis=1).reshape(-1))
    pair, weight = np.concatenate(pairs), np.concatenate(weights)
    pair, weight = pair[weight > 0], weight[weight > 0]
    best: list[list[int]] = pair[np.argsort(-weight, kind="stable")].tolist()
    return best


def _end(chain: I64Array, neuron: int) -> int:
    """What all neurons of a chain lead to."""
    while chain[neuron] != neuron:
        chain[neuron] = chain[chain[neuron]]
        neuron = int(chain[neuron])
    return neuron


def _walk(links: list[list[int]]) -> Iterator[list[int]]:
    """The chains, each from one of its ends."""
    seen = [False] * len(links)
    for start, neighbours in enumerate(links):
        if seen[start] or len(neighbours) == 2:
            continue
        chain, here = [], start
        while here >= 0:
            seen[here] = True
            chain.append(here)
            here = next((other for other in links[here] if not seen[other]), -1)
        yield chain


def missing(fired: U8Array, n_neurons: int, capacity: int) -> BoolArray:
    """Which neurons each token would read, with so many rows of the layer in RAM, least recently used out.

    Args:
        fired: ``[tokens, ceil(n_neurons / 8)]``, bits.
        n_neurons: of the layer.
        capacity: rows in RAM. What one token wants is there at once, however much it is.

    Returns:
        ``[tokens, n_neurons]``.
    """
    last = np.full(n_neurons, -1, np.int64)
    there = np.zeros(n_neurons, np.bool_)
    wanted = np.unpackbits(fired, axis=1, count=n_neurons).astype(np.bool_)
    missed = np.empty_like(wanted)
    for token, ids in enumerate(wanted):
        np.logical_and(ids, ~there, out=missed[token])
        there |= ids
        last[ids] = token
        over = int(there.sum()) - max(capacity, int(ids.sum()))
        if over > 0:
            kept = np.flatnonzero(there)
            there[kept[np.argpartition(last[kept], over - 1)[:over]]] = False
    return missed


def cost(missed: BoolArray, order: I64Array, stride_bytes: int, max_gap: int, max_run: int) -> Cost:
    """What reading costs per token with an order of neurons.

    Args:
        missed: ``[tokens, n_neurons]``, what each token reads.
        order: ``[n_neurons]``.
        stride_bytes: of a row.
        max_gap: neurons between two wanted ones that are read over.
        max_run: longest read in neurons.
    """
    reads = nbytes = total = 0
    for wanted in missed[:, order]:
        ids = np.flatnonzero(wanted)
        plan = plan_rows(ids, np.arange(len(ids)), max_gap_neurons=max_gap, max_run_neurons=max_run)
        reads += len(plan)
        nbytes += int(plan.count.sum()) * stride_bytes
        total += len(ids)
    tokens = max(1, len(missed))
    return Cost(total / tokens, reads / tokens, nbytes / tokens)
