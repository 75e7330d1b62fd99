"""Make the HF checkpoint of a training: float16 weights, tokenizer, and a card with measured figures.

    python export.py --data DIR --out DIR [--to MODEL]

``--data`` and ``--out`` are those of train.py. The figures are measured on the weights as written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RUNS, measure
from network import CONFIG
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokens import save_tokenizer

HERE = Path(__file__).parent
# Of each domain, measured apart: so few that a test can repeat it.
CHECK_TOKENS = 512
GENERATION = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}


def write_json(path: Path, value: object) -> None:
    """Indented, as transformers writes it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def card(figures: dict[str, Any], sources: list[dict[str, Any]], training: dict[str, Any]) -> str:
    """The model card: the template with the figures in their places."""
    data = table(
        ["text", "package", "version", "MB", "documents", "drawn", "licence"],
        [
            [
                s["name"],
                f"`{s['package']}`",
                s["version"],
                f"{s['megabytes']:.1f}",
                f"{s['documents']:,}",
                f"x {s['weight']}",
                s["licence"],
            ]
            for s in sources
        ],
    )
    loss = table(
        ["domain", "tokens", "nats per token", "bits per byte"],
        [
            [name, f"{d['tokens']:,}", f"{d['loss']:.3f}", f"{d.get('bits_per_byte', 0):.3f}"]
            for name, d in figures["domains"].items()
        ],
    )
    layers = table(
        ["layer", "per token", *[f"in {run} tokens" for run in RUNS], "never", "hot tenth"],
        [
            [str(i), *[f"{100 * value:.1f} %" for value in row.values()]]
            for i, row in enumerate(figures["layers"])
        ],
    )
    places = {"DATA": data, "LOSS": loss, "LAYERS": layers}
    places |= {name.upper(): str(value) for name, value in training.items()}
    text = (HERE / "card.md").read_text(encoding="utf-8")
    for name, value in places.items():
        text = text.replace("{" + name + "}", value)
    return text


def export(data: Path, out: Path, to: Path, n_tokens: int | None) -> dict[str, Any]:
    """Write the checkpoint's folder ``to``; the figures measured on ``n_tokens`` of each domain, or all."""
    to.mkdir(parents=True, exist_ok=True)
    state = torch.load(out / "checkpoint.pt", weights_only=True, map_location="cpu")
    # contiguous() keeps a view of shared memory out of the file; the head is the embedding, tied.
    weights = {name: tensor.to(torch.float16).contiguous() for name, tensor in state["network"].items()}
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    write_json(to / "config.json", CONFIG)
    write_json(to / "generation_config.json", GENERATION)
    save_tokenizer(Tokenizer.from_file(str(data / "tokenizer.json")), to)
    texts = sorted((data / "held_out").glob("*.txt"))
    figures = measure(to, texts, n_tokens)
    parameters = sum(tensor.numel() for tensor in weights.values())
    size = (to / "model.safetensors").stat().st_size
    corpus_tokens = sum(len(np.load(path, mmap_mode="r")) for path in (data / "tokens").glob("train-*.npy"))
    training = {
        "parameters": f"{parameters:,}",
        "megabytes": f"{size / 1e6:.2f}",
        "steps": f"{state['step']:,}",
        "tokens": f"{state['tokens'] / 1e6:.1f}",
        "minutes": f"{state['seconds'] / 60:.0f}",
        "rate": f"{state['tokens'] / state['seconds']:,.0f}",
        "corpus": f"{corpus_tokens / 1e6:.1f}",
    }
    check = measure(to, texts, CHECK_TOKENS)
    write_json(to / "measured.json", {"parameters": parameters, "bytes": size, **figures, "check": check})
    text = card(figures, json_of(data / "sources.json"), training)
    (to / "README.md").write_text(text, encoding="utf-8")
    return figures


def json_of(path: Path) -> Any:
    """A JSON file's value."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what corpus.py left")
    parser.add_argument("--out", type=Path, required=True, help="what train.py left")
    parser.add_argument("--to", type=Path, default=HERE / "opt-relu-6m", help="folder of the checkpoint")
    parser.add_argument("--tokens", type=int, help="measure on so many of each domain (default all)")
    args = parser.parse_args()
    print(json.dumps(export(args.data, args.out, args.to, args.tokens), indent=1))


if __name__ == "__main__":
    main()
