"""What several test files need: tiny Hugging Face checkpoints and a real daemon."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from flashd.types import F32Array, FFNSource

REPO = Path(__file__).resolve().parent.parent
SMOLLM2_GGUF = Path(
    os.environ.get("FLASHD_SMOLLM2_GGUF") or REPO / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
)

CHECKPOINTS = ("opt", "opt_350m_like", "opt_untied", "llama_gqa", "llama_tied")
CONTEXT = 160


def hf_model(kind: str, seed: int = 0) -> Any:
    """A seeded random ``transformers`` model in float32; see ``CHECKPOINTS``."""
    import torch
    import transformers

    torch.manual_seed(seed)
    common = {
        "vocab_size": 515,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    if kind.startswith("opt"):
        config = transformers.OPTConfig(
            **common,
            ffn_dim=200,
            num_attention_heads=4,
            word_embed_proj_dim=32 if kind == "opt_350m_like" else 64,
            do_layer_norm_before=kind != "opt_350m_like",
            tie_word_embeddings=kind != "opt_untied",
            init_std=0.08,
        )
        model = transformers.OPTForCausalLM(config)
    else:
        rope: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
        if kind == "llama_tied":
            rope = {
                "rope_theta": 500000.0,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        config = transformers.LlamaConfig(
            **common,
            intermediate_size=176,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=kind == "llama_tied",
            rope_parameters=rope,
            initializer_range=0.08,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # norms and biases start at one and zero: make them matter
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * (0.1 if "norm" in name else 0.05))
    return model.eval()


def greedy(model: Any, prompt: list[int], n_new: int) -> list[int]:
    """Greedy continuation by ``transformers``, without a KV cache, not stopping at end-of-sequence."""
    return _greedy(model, tuple(prompt), n_new)


@cache
def _greedy(model: Any, prompt: tuple[int, ...], n_new: int) -> list[int]:
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n_new):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@dataclass
class Daemon:
    """A running ``flashd start --foreground``."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: Path
    record: dict[str, Any]

    def http(self, timeout_s: float = 60) -> httpx.Client:
        """Raw HTTP over the socket."""
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://flashd", timeout=timeout_s)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 20) -> int:
        """Send a signal, wait for the end, return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def flashd_command(*args: str) -> list[str]:
    """The command line of the installed program."""
    return [sys.executable, "-P", "-m", "flashd", *args]


def flashd_env(runtime_dir: Path) -> dict[str, str]:
    """An environment without anybody's settings, with directories of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLASHD_")}
    own = {"XDG_CONFIG_HOME": str(runtime_dir / "config"), "XDG_CACHE_HOME": str(runtime_dir / "cache")}
    return {**env, "XDG_RUNTIME_DIR": str(runtime_dir), **own}


def lines_on_a_terminal(columns: int, runtime_dir: Path, *args: str) -> list[str]:
    """What ``flashd ARGS`` prints on a terminal that is so wide."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            flashd_command(*args),
            env=flashd_env(runtime_dir) | {"COLUMNS": str(columns)},
            stdout=theirs,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        os.set_blocking(ours, False)
        return os.read(ours, 1 << 16).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)


@contextmanager
def serving(bundle: Path, runtime_dir: Path, *args: str) -> Iterator[Daemon]:
    """A daemon that is ready when the block begins and gone when it ends."""
    log = runtime_dir / "daemon.log"
    socket = runtime_dir / "flashd" / "flashd.sock"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            flashd_command("start", "--foreground", "--json", "--model", str(bundle), *args),
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=flashd_env(runtime_dir),
        )
    try:
        assert process.stdout is not None
        lines = []
        while (line := process.stdout.readline()) and line != b"}\n":
            lines.append(line)
        assert line, f"the daemon did not get ready: {log.read_text()}"
        record = json.loads(b"".join([*lines, line]))
        yield Daemon(process, socket, log, record)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


def wait_until(condition: Any, timeout_s: float = 10.0, what: str = "condition") -> None:
    """Poll a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


async def ffn(source: FFNSource, layer: int, x: F32Array) -> F32Array:
    """A layer's FFN of an input that is there already."""
    return (await source.apply(layer, lambda: x))()
