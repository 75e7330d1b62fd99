"""Train the model for a given time, on the CPU.

    python train.py --hours 1.75 --data DIR --out DIR [--resume]

``--data`` is what corpus.py left. ``--out`` gets ``checkpoint.pt`` every few minutes, from which
``--resume`` goes on, and ``log.jsonl``. export.py makes the HF checkpoint of it. The learning rate follows
the share of the time that has passed, so a busy machine trains on fewer tokens, but to the end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import torch
from corpus import SOURCES
from network import LAYERS, POSITIONS, VOCAB, Network
from optimizer import Barrier, Optimizer
from tokens import prepare
from torch import Tensor

# Of one worker in one step.
BATCH_TOKENS = 2560
SHORT = 256
# After this share of the time, sequences are as long as the model takes.
LONG_FROM = 0.6
WARM_UP = 0.02
# Shares of neurons that fire per token, to which training steers each layer.
TARGETS = (0.12, *[0.08] * (LAYERS - 1))
SAVE_SECONDS, LOOK_SECONDS = 300, 300


class Corpus:
    """Token streams of the sources, and random sequences of them."""

    def __init__(self, data: Path, seed: int) -> None:
        self.streams = [np.load(data / "tokens" / f"train-{source.name}.npy") for source in SOURCES]
        sizes = [len(s) * source.weight for s, source in zip(self.streams, SOURCES, strict=True)]
        self.shares = np.asarray(sizes) / sum(sizes)
        self.random = np.random.default_rng(seed)

    def batch(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids and targets (n, length), and first positions (n,), together BATCH_TOKENS tokens or nearly."""
        count = max(1, round(BATCH_TOKENS / length))
        rows = []
        for which in self.random.choice(len(self.streams), size=count, p=self.shares):
            at = self.random.integers(len(self.streams[which]) - length)
            rows.append(self.streams[which][at : at + length + 1])
        block = torch.from_numpy(np.stack(rows).astype(np.int64))
        # Short sequences lie anywhere in the window, every fourth at its begin, where prompts lie.
        start = self.random.integers(POSITIONS - length + 1, size=count) * (self.random.random(count) > 0.25)
        return block[:, :-1], block[:, 1:], torch.from_numpy(start)


class Steering:
    """A factor for each layer on the mean activation, raised while too many neurons fire."""

    def __init__(self) -> None:
        self.factors = torch.full((LAYERS,), 0.02)
        self.shares = torch.full((LAYERS,), 0.5)

    def penalty(self, means: Tensor) -> Tensor:
        """What to add to the loss: the factors times the layers' mean activations."""
        return (self.factors * means).sum()

    def steer(self, shares: Tensor) -> None:
        """Adapt the factors to the shares of neurons that fired in a step."""
        self.shares.lerp_(shares, 0.05)
        wanted = torch.tensor(TARGETS)
        self.factors *= torch.exp(0.02 * ((self.shares - wanted) / wanted).clamp(-1, 1))
        self.factors.clamp_(1e-3, 20.0)


@torch.no_grad()
def held_out_loss(network: Network, data: Path, n_tokens: int) -> dict[str, float]:
    """Mean loss per domain in nats per token over its first tokens, in windows of POSITIONS."""
    losses = {}
    for path in sorted((data / "tokens").glob("held_out-*.npy")):
        ids = torch.from_numpy(np.load(path).astype(np.int64))
        windows = min(n_tokens, len(ids) - 1) // POSITIONS
        total = 0.0
        for at in range(0, windows * POSITIONS, POSITIONS):
            block = ids[at : at + POSITIONS + 1][None]
            total += float(network(block[:, :-1], block[:, 1:], torch.zeros(1, dtype=torch.long))[0])
        losses[path.stem.removeprefix("held_out-")] = round(total / windows, 4)
    return losses


def learning_rate(progress: float) -> float:
    """Share of the peak rate: a short rise, then a line to nothing."""
    return min(progress / WARM_UP, 1.0) * (1 - progress)


class Run:
    """A training as its workers share it: network, optimizer, steering, and how far they are."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.data, self.out, self.seed, self.total = args.data, args.out, args.seed, 3600 * args.hours
        self.network = Network().share_memory()
        self.optimizer = Optimizer(self.network, args.workers, args.muon, args.adam)
        self.steering = Steering()
        # Seconds that have passed, as the first worker's clock has it for all.
        self.seconds = torch.zeros(1, dtype=torch.float64).share_memory_()
        self.step, self.tokens = 0, 0
        if args.resume and (self.out / "checkpoint.pt").exists():
            self.load()

    def load(self) -> None:
        """Go on from the checkpoint."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.network.load_state_dict(state["network"])
        for name, tensor in state["optimizer"].items():
            self.optimizer.state[name].copy_(tensor)
        self.steering.factors, self.steering.shares = state["factors"], state["shares"]
        self.seconds[0], self.step, self.tokens = state["seconds"], state["step"], state["tokens"]

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is whole."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state,
            "factors": self.steering.factors,
            "shares": self.steering.shares,
            "seconds": float(self.seconds),
            "step": self.step,
            "tokens": self.tokens,
        }
        torch.save(state, self.out / "checkpoint.tmp")
        os.replace(self.out / "checkpoint.tmp", self.out / "checkpoint.pt")

    def log(self, loss: float, n_tokens: int) -> None:
        """A line of the log, on the terminal too."""
        line = {
            "minutes": round(float(self.seconds) / 60, 1),
            "step": self.step,
            "tokens": self.tokens,
            "loss": round(loss, 4),
            "held_out": held_out_loss(self.network, self.data, n_tokens),
            "shares": [round(float(s), 3) for s in self.steering.shares],
            "factors": [round(float(f), 3) for f in self.steering.factors],
        }
        print(json.dumps(line), flush=True)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def train(self, worker: int, workers: int, barrier: Barrier) -> None:
        """One worker's part, until the time is over. The first one keeps the time, the log and the files."""
        torch.set_num_threads(1)
        corpus = Corpus(self.data, self.seed + worker + workers * self.step)
        began, saved, looked = time.monotonic() - float(self.seconds), time.monotonic(), 0.0
        smooth = 0.0
        while (progress := float(self.seconds) / self.total) < 1:
            ids, targets, start = corpus.batch(POSITIONS if progress >= LONG_FROM else SHORT)
            loss, shares, means = self.network(ids, targets, start)
            (loss + self.steering.penalty(means)).backward()
            figures = torch.cat([loss.detach()[None], shares])
            self.step, self.tokens = self.step + 1, self.tokens + workers * ids.numel()
            rate = learning_rate(progress)
            figures = self.optimizer.step(self.network, worker, barrier, rate, self.step, figures)
            self.steering.steer(figures[1:])
            smooth = float(figures[0]) if smooth == 0.0 else 0.98 * smooth + 0.02 * float(figures[0])
            if worker == 0:
                self.seconds[0] = time.monotonic() - began
                if time.monotonic() - looked > LOOK_SECONDS:
                    self.log(smooth, 4 * POSITIONS)
                    looked = time.monotonic()
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
            # All read the same time.
            barrier.wait()
        if worker == 0:
            self.save()
            self.log(smooth, 10**9)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, required=True, help="time to train, all resumed runs together")
    parser.add_argument("--data", type=Path, required=True, help="what corpus.py left")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and log")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread")
    parser.add_argument(
        "--muon", type=float, default=0.02, help="peak rate for matrices (default %(default)s)"
    )
    parser.add_argument(
        "--adam", type=float, default=0.003, help="peak rate for the rest (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args.data, VOCAB)
    run = Run(args)
    barrier = multiprocessing.get_context("spawn").Barrier(args.workers)
    torch.multiprocessing.spawn(work, args=(run, args.workers, barrier), nprocs=args.workers)


def work(worker: int, run: Run, workers: int, barrier: Barrier) -> None:
    """Entry of a worker process."""
    run.train(worker, workers, barrier)


if __name__ == "__main__":
    main()
