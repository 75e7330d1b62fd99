"""Measure a checkpoint on held-out text: loss of each domain, and how many FFN neurons fire.

    python measure.py MODEL [--texts DIR]

prints JSON. MODEL is a folder with an OPT checkpoint that ``transformers`` loads.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import SEPARATOR
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Runs of consecutive tokens for which the union of the neurons that fire is measured.
RUNS = (5, 30)


def read_ids(tokenizer: Any, path: Path) -> Tensor:
    """A text's token ids (tokens,), </s> in front of each document."""
    documents = path.read_text(encoding="utf-8").split(SEPARATOR.strip())
    ids = [
        tokenizer(document.strip(), verbose=False)["input_ids"] for document in documents if document.strip()
    ]
    return torch.from_numpy(np.concatenate(ids).astype(np.int64))


class Counts:
    """Which neurons of each layer fire, counted over windows of text; hooks on a model's FFNs fill it."""

    def __init__(self, model: Any) -> None:
        self.layers = model.model.decoder.layers
        n_layers, ffn = len(self.layers), self.layers[0].fc1.out_features
        self.fired = torch.zeros(n_layers, ffn, dtype=torch.int64)
        self.unions = torch.zeros(n_layers, len(RUNS), dtype=torch.float64)
        self.tokens = self.windows = 0
        for index, layer in enumerate(self.layers):
            layer.fc1.register_forward_hook(lambda module, given, out, index=index: self.add(index, out))

    def add(self, index: int, before_relu: Tensor) -> None:
        """Count one window of one layer, (1, tokens, ffn)."""
        fires = before_relu.reshape(-1, before_relu.shape[-1]) > 0
        self.fired[index] += fires.float().sum(0).long()
        for column, run in enumerate(RUNS):
            whole = len(fires) // run * run
            self.unions[index, column] += fires[:whole].view(-1, run, fires.shape[1]).any(1).double().mean()
        if index == 0:
            self.tokens += len(fires)
            self.windows += 1

    def describe(self) -> list[dict[str, float]]:
        """For each layer: shares of its neurons per token and per run, never, and the hot ones' part.

        ``hot_tenth`` is the part of all firings that the tenth of the neurons that fire most have.
        """
        described = []
        for fired, unions in zip(self.fired, self.unions, strict=True):
            shares = fired.double() / self.tokens
            hot = shares.sort(descending=True).values[: len(shares) // 10]
            layer = {"per_token": float(shares.mean())}
            layer |= {f"per_{run}": float(u) / self.windows for run, u in zip(RUNS, unions, strict=True)}
            layer |= {
                "never": float((fired == 0).double().mean()),
                "hot_tenth": float(hot.sum() / shares.sum()),
            }
            described.append({name: round(value, 4) for name, value in layer.items()})
        return described


@torch.inference_mode()
def measure(model_dir: Path, texts: list[Path], n_tokens: int | None = None) -> dict[str, Any]:
    """Loss per domain (nats per token, bits per byte) and activity per layer, in float32.

    Each text is cut into windows as long as the model takes; of ``n_tokens``, only that many are read.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    window = model.config.max_position_embeddings
    counts, domains = Counts(model), {}
    for path in texts:
        ids = read_ids(tokenizer, path)[:n_tokens]
        total, predicted = 0.0, 0
        for part in ids.split(window):
            if len(part) > 1:
                logits = model(input_ids=part[None]).logits[0, :-1]
                total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
                predicted += len(part) - 1
        domains[path.stem] = {"tokens": len(ids), "loss": round(total / predicted, 4)}
        if n_tokens is None:
            bits = total / predicted * len(ids) / math.log(2) / path.stat().st_size
            domains[path.stem]["bits_per_byte"] = round(bits, 4)
    return {"domains": domains, "layers": counts.describe()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, default=Path(__file__).parent / "held_out")
    args = parser.parse_args()
    print(json.dumps(measure(args.model, sorted(args.texts.glob("*.txt"))), indent=1))


if __name__ == "__main__":
    main()
