"""Tiny seeded checkpoints as Hugging Face and llama.cpp write them, made with NumPy alone.

For tests of the converter, and for anyone who wants a model of a few kilobytes to try things on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashd.kernels.twin import from_f32
from flashd.layout.safetensors_header import build_header
from flashd.types import NUMPY_DTYPE, SAFETENSORS_DTYPE, DType, F32Array, WeightArray

Tensors = dict[str, F32Array]
NamedShapes = Iterator[tuple[str, tuple[int, ...]]]

OPT_CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 300,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 72,
    "max_position_embeddings": 48,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def opt_shapes(config: Mapping[str, Any], prefix: str = "model.decoder.") -> NamedShapes:
    """Names and shapes of an OPT checkpoint's tensors."""
    d, e, f = config["hidden_size"], config["word_embed_proj_dim"], config["ffn_dim"]
    bias, affine = config.get("enable_bias", True), config.get("layer_norm_elementwise_affine", True)

    def with_bias(name: str, shape: tuple[int, ...]) -> NamedShapes:
        yield f"{name}.weight", shape
        if bias:
            yield f"{name}.bias", shape[:1]

    def norm(name: str) -> NamedShapes:
        if affine:
            yield f"{name}.weight", (d,)
            yield f"{name}.bias", (d,)

    yield f"{prefix}embed_tokens.weight", (config["vocab_size"], e)
    yield f"{prefix}embed_positions.weight", (config["max_position_embeddings"] + 2, d)
    if e != d:
        yield f"{prefix}project_in.weight", (d, e)
        yield f"{prefix}project_out.weight", (e, d)
    if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False):
        yield from norm(f"{prefix}final_layer_norm")
    for layer in range(config["num_hidden_layers"]):
        base = f"{prefix}layers.{layer}."
        yield from norm(f"{base}self_attn_layer_norm")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from with_bias(f"{base}self_attn.{part}", (d, d))
        yield from norm(f"{base}final_layer_norm")
        yield from with_bias(f"{base}fc1", (f, d))
        yield from with_bias(f"{base}fc2", (d, f))
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], e)


def llama_shapes(config: Mapping[str, Any], prefix: str = "model.") -> NamedShapes:
    """Names and shapes of a Llama checkpoint's tensors."""
    d, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    d_head = config.get("head_dim") or d // heads
    q, kv = heads * d_head, config["num_key_value_heads"] * d_head
    yield f"{prefix}embed_tokens.weight", (config["vocab_size"], d)
    yield f"{prefix}norm.weight", (d,)
    for layer in range(config["num_hidden_layers"]):
        base = f"{prefix}layers.{layer}."
        yield f"{base}input_layernorm.weight", (d,)
        yield f"{base}post_attention_layernorm.weight", (d,)
        attention = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        for part, shape in attention.items():
            yield f"{base}self_attn.{part}.weight", shape
            if config.get("attention_bias"):
                yield f"{base}self_attn.{part}.bias", shape[:1]
        for part, shape in {"up_proj": (f, d), "gate_proj": (f, d), "down_proj": (d, f)}.items():
            yield f"{base}mlp.{part}.weight", shape
            if config.get("mlp_bias"):
                yield f"{base}mlp.{part}.bias", shape[:1]
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], d)


def random_tensors(shapes: NamedShapes, seed: int) -> Tensors:
    """Normal values of a size that keeps activations near one."""
    rng = np.random.default_rng(seed)
    scale = np.float32(0.15)
    return {name: rng.standard_normal(shape, np.float32) * scale for name, shape in shapes}


def narrowed(values: F32Array, dtype: DType) -> WeightArray:
    """Values in a checkpoint's dtype (bfloat16 as uint16 bits)."""
    if dtype == "f32":
        return values
    out = np.empty(values.shape, NUMPY_DTYPE[dtype])
    from_f32(np.ascontiguousarray(values), out)
    return out


def write_safetensors(path: Path, tensors: Mapping[str, F32Array], dtype: DType = "f32") -> None:
    """One ``.safetensors`` file."""
    shapes = {name: (SAFETENSORS_DTYPE[dtype], values.shape) for name, values in tensors.items()}
    header, _ = build_header(shapes)
    with path.open("wb") as file:
        file.write(header)
        for values in tensors.values():
            file.write(narrowed(values, dtype).tobytes())


def write_hf(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, dtype: DType = "f32", shards: int = 1
) -> Path:
    """A Hugging Face model directory: ``config.json`` and safetensors, sharded if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_opt(folder: Path, seed: int = 0, dtype: DType = "f32", shards: int = 1, **changes: Any) -> Path:
    """A tiny OPT; ``changes`` go into its configuration."""
    config = {**OPT_CONFIG, **changes}
    return write_hf(folder, config, random_tensors(opt_shapes(config), seed), dtype, shards)


def write_llama(folder: Path, seed: int = 0, dtype: DType = "f32", shards: int = 1, **changes: Any) -> Path:
    """A tiny Llama; ``changes`` go into its configuration."""
    config = {**LLAMA_CONFIG, **changes}
    return write_hf(folder, config, random_tensors(llama_shapes(config), seed), dtype, shards)


def byte_vocabulary() -> dict[str, int]:
    """GPT-2's 256 byte letters, behind four special tokens as OPT has them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(plain)))
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    return {token: index for index, token in enumerate([*specials, *(letters[byte] for byte in range(256))])}


def write_opt_tokenizer(folder: Path) -> None:
    """``vocab.json`` and ``merges.txt`` with a few merges, configured as OPT's."""
    vocab = byte_vocabulary()
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 w", "o r"]
    for merge in merges:
        vocab[merge.replace(" ", "")] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    special = {
        "__type": "AddedToken",
        "lstrip": False,
        "normalized": True,
        "rstrip": False,
        "single_word": False,
    }
    settings = {
        "add_bos_token": True,
        "add_prefix_space": False,
        "bos_token": {**special, "content": "</s>"},
        "eos_token": {**special, "content": "</s>"},
        "unk_token": {**special, "content": "</s>"},
        "pad_token": {**special, "content": "<pad>"},
        "tokenizer_class": "GPT2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
