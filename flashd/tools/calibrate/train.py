"""Training of one low-rank predictor, by torch: ``w2 relu(w1 x + b1) + b2`` (paper, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashd.errors import CalibrationError
from flashd.tools.calibrate.measure import frequency
from flashd.types import F32Array, U8Array, WeightArray

# Small steps, many of them: on a ReLU model (d 256, rank 64, 48,000 tokens, 2 epochs) false positives were
# 15 % with batches of 256 at 0.002, 6 % with these; starting from closed-form solutions (spectral, ridge)
# gave the same 6 % there, and 9-10 instead of 11 % only where 8,000 tokens were seen twice.
BATCH_TOKENS = 64
_LEARNING_RATE = 0.01
_WARM_UP = 0.1
# Without a number of epochs: two, and on short text as many as give so many steps.
_EPOCHS, _STEPS = 2, 1500
_STATISTICS_TOKENS = 4096
_LARGE_NEURONS = 8192


@dataclass(frozen=True)
class Weights:
    """A trained predictor: ``w1 [r, d]`` f16, ``b1 [r]`` f32, ``w2 [n, r]`` f16, ``b2 [n]`` f32."""

    w1: WeightArray
    b1: F32Array
    w2: WeightArray
    b2: F32Array


def use_threads(per_layer: int, n_neurons: int) -> None:
    """Threads of torch for the calling thread's trainings: more than one only where products are large
    enough to be worth waiting for each other."""
    torch.set_num_threads(max(1, per_layer) if n_neurons >= _LARGE_NEURONS else 1)


def default_epochs(tokens: int) -> int:
    """Passes over a text of so many tokens."""
    return max(_EPOCHS, -(-_STEPS * BATCH_TOKENS // max(1, tokens)))


def train(
    x: Any,
    wanted: Any,
    n_neurons: int,
    rank: int,
    *,
    epochs: int,
    seed: int,
    step: Callable[[], None] = lambda: None,
) -> Weights:
    """Fit a mask to the FFN's input, by class-balanced binary cross-entropy.

    Args:
        x: ``[tokens, d]`` f16, may be a memory map.
        wanted: ``[tokens, ceil(n_neurons / 8)]`` uint8, the mask's bits.
        n_neurons: of the layer.
        rank: of the predictor.
        epochs: passes over the tokens; 0: ``default_epochs``.
        seed: of weights and order.
        step: called before every step; what it raises ends the training.

    Raises:
        CalibrationError: the inputs are no numbers.
    """
    tokens = len(x)
    epochs = epochs or default_epochs(tokens)
    often = torch.from_numpy(frequency(wanted, n_neurons))
    share = min(max(float(often.mean()), 1e-6), 1 - 1e-6)
    parameters = _start(x, often, share, rank, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
    n_steps = epochs * -(-tokens // BATCH_TOKENS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=n_steps + 1, pct_start=_WARM_UP
    )
    order = np.random.default_rng(seed)
    for _ in range(epochs):
        permuted = order.permutation(tokens)
        for at in range(0, tokens, BATCH_TOKENS):
            step()
            chosen = np.sort(permuted[at : at + BATCH_TOKENS])
            _set_gradients(parameters, _tensor(x[chosen]), _bits(wanted[chosen], n_neurons), share)
            optimizer.step()
            schedule.step()
    return _rounded(parameters)


def scores(weights: Weights, x: Any) -> F32Array:
    """Scores ``[tokens, n]`` by the rounded weights."""
    parameters = [torch.from_numpy(each).float() for each in (weights.w1, weights.b1, weights.w2, weights.b2)]
    w1, b1, w2, b2 = parameters
    found: F32Array = torch.addmm(b2, torch.relu_(torch.addmm(b1, _tensor(x), w1.T)), w2.T).numpy()
    return found


def _set_gradients(parameters: list[Tensor], x: Tensor, target: Tensor, share: float) -> None:
    """Of class-balanced cross-entropy: what is in the mask and what isn't weigh the same in all.

    Written out, it takes half the time that automatic differentiation needs for so small a network.
    """
    w1, b1, w2, b2 = parameters
    hidden = torch.relu_(torch.addmm(b1, x, w1.T))
    # Of the loss by the scores: probability less truth, each by its class's weight.
    error = torch.sigmoid_(torch.addmm(b2, hidden, w2.T)).sub_(target)
    error.mul_(target.mul_(0.5 / share - 0.5 / (1 - share)).add_(0.5 / (1 - share))).div_(error.numel())
    back = error.mm(w2).mul_(hidden > 0)
    for each, gradient in zip(
        parameters, (back.T.mm(x), back.sum(0), error.T.mm(hidden), error.sum(0)), strict=True
    ):
        each.grad = gradient


def _start(x: Any, often: Tensor, share: float, rank: int, random: torch.Generator) -> list[Tensor]:
    """Random directions on inputs of mean 0 and variance 1, and each neuron's own odds."""
    sample = np.linspace(0, len(x) - 1, min(len(x), _STATISTICS_TOKENS)).astype(np.int64)
    inputs = _tensor(x[sample])
    d, n = inputs.shape[1], len(often)
    mean, spread = inputs.mean(dim=0), inputs.std(dim=0, correction=0) + 1e-6
    w1 = torch.randn(rank, d, generator=random) * d**-0.5 / spread
    w2 = torch.randn(n, rank, generator=random) * rank**-0.5
    b2 = torch.logit(often.clamp(1e-3, 1 - 1e-3)) - torch.logit(torch.tensor(share))
    return [w1, -(w1 @ mean), w2, b2]


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))


def _bits(packed: U8Array, n: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed, axis=1, count=n)).float()


def _rounded(parameters: list[Tensor]) -> Weights:
    w1, b1, w2, b2 = parameters
    halves = [w1.half(), w2.half()]
    if not all(bool(torch.isfinite(each).all()) for each in (b1, b2, *halves)):
        raise CalibrationError("training a predictor led to values that are no numbers; is the model sound?")
    return Weights(halves[0].numpy(), b1.numpy(), halves[1].numpy(), b2.numpy())
