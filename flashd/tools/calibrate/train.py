"""Training of one low-rank predictor, by torch: ``w2 relu(w1 x + b1) + b2`` (paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashd.errors import CalibrationError
from flashd.types import F32Array, U8Array, WeightArray

_BATCH_TOKENS = 256


@dataclass(frozen=True)
class Weights:
    """A trained predictor: ``w1 [r, d]`` f16, ``b1 [r]`` f32, ``w2 [n, r]`` f16, ``b2 [n]`` f32."""

    w1: WeightArray
    b1: F32Array
    w2: WeightArray
    b2: F32Array

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return len(self.w1)


def train(
    x: Any,
    fired: Any,
    n_neurons: int,
    rank: int,
    *,
    epochs: int,
    seed: int,
    step: Callable[[], None] = lambda: None,
    init: str = "spectral",
    lr: float = 2e-3,
    batch: int = _BATCH_TOKENS,
) -> Weights:
    """Fit which neurons fire to the FFN's input.

    Args:
        x: ``[tokens, d]`` f16, may be a memory map.
        fired: ``[tokens, ceil(n_neurons / 8)]`` uint8, bits.
        n_neurons: of the layer.
        rank: of the predictor.
        epochs: passes over the tokens.
        seed: of weights and order.
        step: called before every step; what it raises ends the training.
    """
    random = torch.Generator().manual_seed(seed)
    tokens, d = x.shape
    base = share_fired(fired, n_neurons)
    parameters = _start(init, x, fired, n_neurons, rank, base, random)
    optimizer = torch.optim.Adam(parameters, lr=lr)
    n_steps = epochs * -(-tokens // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=n_steps + 1, pct_start=0.1)
    share = float(base.mean())
    # Class-balanced: neurons that fire and those that don't weigh the same in all.
    weight_fired, weight_idle = 0.5 / max(share, 1e-6), 0.5 / max(1 - share, 1e-6)
    order = np.random.default_rng(seed)
    for _ in range(epochs):
        permuted = order.permutation(tokens)
        for at in range(0, tokens, batch):
            chosen = np.sort(permuted[at : at + batch])
            inputs, target = _tensor(x[chosen]), _bits(fired[chosen], n_neurons)
            logits = forward(parameters, inputs)
            weight = torch.where(target > 0, weight_fired, weight_idle)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target, weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step()
    return _rounded(parameters)


def forward(parameters: list[Tensor], x: Tensor) -> Tensor:
    w1, b1, w2, b2 = parameters
    return torch.addmm(b2, torch.relu(torch.addmm(b1, x, w1.T)), w2.T)


def scores(weights: Weights, x: Any) -> F32Array:
    """Scores ``[tokens, n]`` by the rounded weights."""
    parameters = [torch.from_numpy(each).float() for each in (weights.w1, weights.b1, weights.w2, weights.b2)]
    with torch.no_grad():
        found: F32Array = forward(parameters, _tensor(x)).numpy()
    return found


def share_fired(fired: Any, n_neurons: int) -> F32Array:
    """Share of tokens in which each neuron fires."""
    counts = np.zeros(n_neurons, np.int64)
    for at in range(0, len(fired), 1024):
        counts += np.unpackbits(fired[at : at + 1024], axis=1, count=n_neurons).sum(axis=0, dtype=np.int64)
    return (counts / max(1, len(fired))).astype(np.float32)


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


def _bits(packed: U8Array, n: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed, axis=1, count=n)).float()


def _start(init, x, fired, n, rank, base, random) -> list[Tensor]:
    d = x.shape[1]
    prior = torch.logit(torch.from_numpy(base).clamp(1e-4, 1 - 1e-4)) * 0.3
    sample = np.linspace(0, len(x) - 1, min(len(x), 16384)).astype(np.int64)
    inputs = _tensor(x[sample])
    mean, std = inputs.mean(0), inputs.std(0) + 1e-6
    if init == "random":
        w1 = torch.randn(rank, d, generator=random) * d**-0.5 / std
        b1 = -(w1 @ mean)
        w2 = torch.randn(n, rank, generator=random) * rank**-0.5 * 0.3
        b2 = prior
        return [t.detach().clone().requires_grad_() for t in (w1, b1, w2, b2)]
    target = _bits(fired[sample], n)
    # reduced-rank regression of labels on inputs
    centered = inputs - mean
    cov = centered.T @ centered / len(sample)
    cov += 1e-3 * cov.diagonal().mean() * torch.eye(d)
    cross = centered.T @ (target - target.mean(0)) / len(sample)  # d,n
    lam, vec = torch.linalg.eigh(cov)
    white = vec * lam.rsqrt()  # d,d : columns
    m = white.T @ cross  # d,n
    if init == "spectral":
        u, s, _ = torch.linalg.svd(m @ m.T)
        dirs = (white @ u).T  # rows: unit variance directions in order
        half = dirs[: -(-rank // 2)]
        w1 = torch.cat([half, -half])[:rank]
        b1 = -(w1 @ mean)
    elif init == "mixed":
        u, s, _ = torch.linalg.svd(m @ m.T)
        dirs = (white @ u).T
        scale = s.sqrt().sqrt()
        q = min(d, rank * 2)
        mix = torch.randn(rank, q, generator=random) * scale[:q]
        mix /= mix.norm(dim=1, keepdim=True)
        w1 = mix @ dirs[:q]
        b1 = -(w1 @ mean)
    # ridge for w2
    h = torch.relu(inputs @ w1.T + b1)
    h1 = torch.cat([h, torch.ones(len(h), 1)], 1)
    gram = h1.T @ h1
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(rank + 1)
    share = target.mean()
    y = torch.where(target > 0, 1.0, -1.0)
    sol = torch.linalg.solve(gram, h1.T @ y)  # r+1, n
    w2, b2 = sol[:-1].T * 2, sol[-1] * 2
    return [t.detach().clone().contiguous().requires_grad_() for t in (w1, b1, w2, b2)]


def _rounded(parameters: list[Tensor]) -> Weights:
    w1, b1, w2, b2 = (p.detach() for p in parameters)
    if not all(torch.isfinite(each).all() for each in (w1, b1, w2, b2)):
        raise CalibrationError("training a predictor led to values that are no numbers")
    return Weights(w1.half().numpy(), b1.numpy(), w2.half().numpy(), b2.numpy())
