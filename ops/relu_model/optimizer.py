"""Muon for the layers' matrices, Adam for embeddings, norms and biases, shared by worker processes.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest semi-orthogonal one. In a
training this short it reaches a loss for which Adam needs about twice the tokens.

The workers are processes of one thread each: on a machine that does other work too, two threads wait for
each other at every operation, two processes only twice per step. Parameters and the optimizer's state lie
in shared memory, and each worker steps its part of the matrices, so nothing is computed twice.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

# The quintic whose iteration brings all singular values near 1, from Muon's reference implementation.
QUINTIC = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
BETAS = (0.9, 0.95)
N_FIGURES = 16


class Barrier(Protocol):
    """What the workers meet at."""

    def wait(self) -> int:
        """Return once every worker has come here."""


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices of (n, rows, columns), rows <= columns, roughly."""
    a, b, c = QUINTIC
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x


def flat(matrix: Tensor) -> Tensor:
    """The matrix, transposed if it has more rows than columns."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


class Optimizer:
    """Steps a network whose parameters lie in shared memory; rates are relative to their peak."""

    def __init__(self, network: nn.Module, workers: int, muon: float, adam: float) -> None:
        named = dict(network.named_parameters())
        matrices = [name for name, p in named.items() if p.ndim == 2 and "embed" not in name]
        # Of one shape together, so that one batched product serves them all; fc2 lies down like fc1.
        square = [name for name in matrices if named[name].shape[0] == named[name].shape[1]]
        self.groups = [square, [name for name in matrices if name not in square]]
        self.rest = [name for name in named if name not in matrices]
        self.muon_rate, self.adam_rate = muon, adam
        self.state = {name: torch.zeros_like(named[name].data) for name in matrices}
        for name in self.rest:
            self.state[name] = torch.zeros(2, *named[name].shape)
        for tensor in self.state.values():
            tensor.share_memory_()
        self.gradients = {name: torch.zeros(workers, *p.shape).share_memory_() for name, p in named.items()}
        self.figures = torch.zeros(workers, N_FIGURES).share_memory_()

    @torch.no_grad()
    def step(
        self, network: nn.Module, worker: int, barrier: Barrier, rate: float, step: int, figures: Tensor
    ) -> Tensor:
        """Average the workers' gradients and apply them; ``rate`` in 0..1 scales the peak rates.

        Returns the mean of the workers' ``figures``, at most N_FIGURES numbers.
        """
        named = dict(network.named_parameters())
        for name, parameter in named.items():
            self.gradients[name][worker].copy_(parameter.grad)
            parameter.grad = None
        self.figures[worker, : len(figures)] = figures
        barrier.wait()
        workers = len(self.figures)
        mean = self.figures.mean(0)[: len(figures)]
        for group in self.groups:
            self._muon([(name, named[name]) for name in group[worker::workers]], self.muon_rate * rate)
        self._adam([(name, named[name]) for name in self.rest[worker::workers]], self.adam_rate * rate, step)
        barrier.wait()
        return mean

    def _muon(self, parameters: list[tuple[str, nn.Parameter]], rate: float) -> None:
        if not parameters:
            return
        directions = []
        for name, _ in parameters:
            gradient, momentum = self.gradients[name].mean(0), self.state[name]
            momentum.lerp_(gradient, 1 - MOMENTUM)
            directions.append(flat(gradient.lerp_(momentum, MOMENTUM)))
        for (_, parameter), update in zip(parameters, orthogonal(torch.stack(directions)), strict=True):
            tall = parameter.shape[0] > parameter.shape[1]
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.add_(update.mT if tall else update, alpha=-rate * scale)

    def _adam(self, parameters: list[tuple[str, nn.Parameter]], rate: float, step: int) -> None:
        for name, parameter in parameters:
            gradient, (first, second) = self.gradients[name].mean(0), self.state[name]
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square_(), 1 - BETAS[1])
            size = (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
            parameter.addcdiv_(first / (1 - BETAS[0] ** step), size, value=-rate)
