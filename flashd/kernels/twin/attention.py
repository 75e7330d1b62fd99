"""Attention over a KV cache, and the rotary position embeddings of its queries and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashd.kernels import check
from flashd.kernels.twin.common import widen
from flashd.types import F32Array


def attention(
    q: F32Array, k: npt.NDArray[Any], v: npt.NDArray[Any], length: int, scale: float, out: F32Array
) -> None:
    """Causal attention of the newest T tokens over the first ``length`` positions of a KV cache.

    Query t attends to the first ``length - T + 1 + t`` positions: all before it, and its own.
    Positions behind those are not read. Up to 16 queries, each has the bits that it has alone;
    more are a prompt's: bits independent of T and of the query's place (the two may differ).

    Args:
        q: ``[T, H, hd]``.
        k, v: ``[n_kv, capacity, hd]`` float32 or float16, the same; H is a multiple of n_kv and
            query head i reads KV head ``i // (H // n_kv)`` (GQA, arXiv 2305.13245).
        length: positions that the last query attends to, T..capacity.
        scale: factor of the scores, commonly ``hd ** -0.5``.
        out: ``[T, H, hd]``, overwritten.

    Raises:
        TypeError, ValueError: as ``check.array`` says; H no multiple of n_kv; length out of range.
    """
    verb = "attention"
    check.array(verb, "q", q, check.F32, (check.TOKENS, "H", "hd"))
    tokens, heads, width = q.shape
    check.array(verb, "k", k, ("float32", "float16"), ("n_kv", "capacity", width))
    check.array(verb, "v", v, (k.dtype.name,), k.shape)
    check.array(verb, "out", out, check.F32, q.shape, writeable=True)
    n_kv, capacity = k.shape[:2]
    if n_kv < 1 or heads % n_kv:
        raise ValueError(f"{verb}: {heads} query heads, expected a multiple of the {n_kv} KV heads")
    check.within(verb, "length", length, tokens, capacity)
    group = heads // n_kv
    with np.errstate(all="ignore"):
        factor = np.float32(scale)
        for kv_head in range(n_kv):
            keys = widen(k[kv_head, :length])
            values = widen(v[kv_head, :length])
            for head in range(kv_head * group, (kv_head + 1) * group):
                for t in range(tokens):
                    seen = length - tokens + 1 + t
                    scores = np.einsum("tk,k->t", keys[:seen], q[t, head]) * factor
                    weights = np.exp(scores - np.fmax.reduce(scores))
                    out[t, head] = np.einsum("t,tk->k", weights, values[:seen]) / weights.sum()


def rope(x: F32Array, cos: F32Array, sin: F32Array) -> None:
    """Turn queries or keys by their positions, in place (RoFormer, arXiv 2104.09864).

    Element i of a head's first half is paired with element i of its second half, as Hugging Face
    does: ``(low * cos - high * sin, high * cos + low * sin)``.

    Args:
        x: ``[T, heads, hd]``, hd even, T any; overwritten.
        cos: ``[T, hd / 2]``.
        sin: ``[T, hd / 2]``.

    Raises:
        TypeError, ValueError: as ``check.array`` says; an odd hd.
    """
    check.array("rope", "x", x, check.F32, ("T", "heads", "hd"), writeable=True)
    tokens, _, width = x.shape
    if width % 2:
        raise ValueError(f"rope: x has a head width of {width}, expected an even number")
    half = width // 2
    check.array("rope", "cos", cos, check.F32, (tokens, half))
    check.array("rope", "sin", sin, check.F32, (tokens, half))
    c, s = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :half], x[..., half:]
    with np.errstate(all="ignore"):
        turned = low * c - high * s
        high[...] = high * c + low * s
        low[...] = turned
