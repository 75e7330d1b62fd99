"""Tiny GGUF files of architecture llama, written with the ``gguf`` package as llama.cpp does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from flashd.testing.tiny_checkpoints import Tensors, narrowed
from flashd.types import F32Array

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf_llama(
    path: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Tensors | None = None,
) -> Path:
    """A GGUF file of a Llama model given in Hugging Face's names and order.

    Args:
        path: the file.
        config: Hugging Face configuration.
        tensors: Hugging Face tensors, float32.
        kind: ggml type of the matrices, e.g. ``F16`` or ``Q8_0``; vectors are F32.
        metadata: more keys: strings, bools, ints, floats, lists.
        extra: more tensors, under GGUF's names, stored as F32.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, values in tensors.items():
        _add_tensor(writer, gguf_name(name), permuted(name, values, config), kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """Hugging Face's tensor name -> GGUF's."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


def permuted(name: str, values: F32Array, config: Mapping[str, Any]) -> F32Array:
    """llama.cpp's row order of Q and K: the two halves of each head interleaved."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    n_heads = next((count for part, count in heads.items() if f".{part}." in name), None)
    if n_heads is None:
        return values
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: F32Array, kind: str) -> None:
    ggml = gguf.GGMLQuantizationType[kind]
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    elif kind == "BF16":
        writer.add_tensor(name, narrowed(values, "bf16").view(np.uint8), raw_dtype=ggml)
    else:
        writer.add_tensor(name, gguf.quantize(values, ggml), raw_dtype=ggml)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)
