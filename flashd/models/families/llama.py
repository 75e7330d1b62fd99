"""Llama (arXiv 2302.13971) and what shares its layers: RMSNorm, RoPE, grouped-query attention,
gated FFN. From Hugging Face checkpoints and from GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from flashd.models.families.base import (
    MAX_FFN,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_SIZE,
    MAX_WIDTH,
    CheckpointPlan,
    Config,
    Family,
    FFNNames,
    TensorRule,
    TensorShapes,
    find_prefix,
    shown,
)
from flashd.models.families.rope import base_frequencies, hf_frequencies, linear_scaled, usable
from flashd.types import F32Array, ModelSpec, WeightArray

# Canonical layer tensor -> Hugging Face's name within a layer, GGUF's name within a block.
_LAYER_NAMES = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "attn.q": ("self_attn.q_proj", "attn_q"),
    "attn.k": ("self_attn.k_proj", "attn_k"),
    "attn.v": ("self_attn.v_proj", "attn_v"),
    "attn.o": ("self_attn.o_proj", "attn_output"),
    "ffn_norm": ("post_attention_layernorm", "ffn_norm"),
    "ffn.up": ("mlp.up_proj", "ffn_up"),
    "ffn.gate": ("mlp.gate_proj", "ffn_gate"),
    "ffn.down": ("mlp.down_proj", "ffn_down"),
}
_HF, _GGUF = 0, 1
# What Hugging Face assumes of a Mistral configuration that doesn't say (null means none).
_MISTRAL_WINDOW = 4096
Namer = Callable[[int, str], str]


def from_hf(config: Config, shapes: TensorShapes) -> CheckpointPlan:
    """Plan of a Hugging Face Llama (or Mistral without sliding window) checkpoint."""
    spec = _hf_spec(config)
    if config.values.get("model_type") == "mistral":
        _refuse_window(config, spec.max_context)
    prefix = find_prefix(shapes, ("model.", ""), "embed_tokens.weight")
    biased = {"attn.": config.flag("attention_bias", False), "ffn.": config.flag("mlp_bias", False)}
    frequencies = hf_frequencies(config, spec.d_head, spec.max_context)
    rope = TensorRule("rope.inv_freq", frequencies.shape, "vector", values=frequencies)

    def name(layer: int, ours: str) -> str:
        return f"{prefix}layers.{layer}.{_LAYER_NAMES[ours][_HF]}"

    def has_bias(layer: int, ours: str) -> bool:
        return any(ours.startswith(part) and wanted for part, wanted in biased.items())

    top = (f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", "lm_head.weight")
    return _plan(spec, top, rope, name, has_bias, permuted=False)


def from_gguf(config: Config, shapes: TensorShapes) -> CheckpointPlan:
    """Plan of a GGUF file of architecture ``llama``.

    llama.cpp stores Q and K with each head's rows interleaved for its own RoPE; the bundle has
    Hugging Face's order (two halves), so the rows are permuted back.
    """
    spec = _gguf_spec(config, shapes)
    frequencies = _gguf_frequencies(config, spec.d_head)
    if "rope_freqs.weight" in shapes:
        # llama.cpp's converter bakes llama3 scaling into this tensor of divisors.
        divide = partial(_divided, frequencies, config.where)
        rope = TensorRule(
            "rope.inv_freq", frequencies.shape, "vector", ("rope_freqs.weight",), transform=divide
        )
    else:
        rope = TensorRule("rope.inv_freq", frequencies.shape, "vector", values=frequencies)

    def name(layer: int, ours: str) -> str:
        return f"blk.{layer}.{_LAYER_NAMES[ours][_GGUF]}"

    def has_bias(layer: int, ours: str) -> bool:
        return f"{name(layer, ours)}.bias" in shapes

    top = ("token_embd.weight", "output_norm.weight", "output.weight")
    return _plan(spec, top, rope, name, has_bias, permuted=True)


def _refuse_window(config: Config, max_context: int) -> None:
    if config.values.get("sliding_window", _MISTRAL_WINDOW) is None:
        return
    window = config.integer("sliding_window", _MISTRAL_WINDOW)
    if window < max_context:
        raise config.refused(f"sliding_window {window}", "full attention (sliding_window null)")


def _gguf_frequencies(config: Config, d_head: int) -> F32Array:
    theta = config.number("llama.rope.freq_base", 10_000.0)
    frequencies = usable(base_frequencies(theta, d_head), config.where, f"llama.rope.freq_base {theta}")
    scaling = config.text("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise config.refused(f"RoPE scaling {shown(scaling)}", "none or linear")
    keys = ("llama.rope.scaling.factor", "llama.rope.scale_linear")
    key = next((key for key in keys if config.values.get(key) is not None), None)
    said = "llama.rope.scaling.type" in config.values
    # Zero is how llama.cpp says none.
    if key is None or config.values[key] == 0 or (said and scaling != "linear"):
        return frequencies
    factor = config.number(key)
    return usable(linear_scaled(frequencies, factor), config.where, f"{key} {factor}")


def _hf_spec(config: Config) -> ModelSpec:
    n_heads = config.integer("num_attention_heads", 32, MAX_HEADS)
    d_model = config.integer("hidden_size", 4096, MAX_WIDTH)
    return _checked(
        config,
        vocab_size=config.integer("vocab_size", 32000),
        d_model=d_model,
        n_layers=config.layers("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", n_heads, MAX_HEADS),
        d_head=config.integer("head_dim", max(d_model // n_heads, 1), MAX_HEAD_SIZE),
        d_ffn=config.integer("intermediate_size", 11008, MAX_FFN),
        max_context=config.integer("max_position_embeddings", 2048),
        activation=config.activation("hidden_act", "silu"),
        norm_eps=config.number("rms_norm_eps", 1e-6, 1.0),
        tied_head=config.flag("tie_word_embeddings", False),
    )


def _gguf_spec(config: Config, shapes: TensorShapes) -> ModelSpec:
    if config.values.get("llama.expert_count"):
        raise config.refused("a mixture of experts (llama.expert_count)", "a dense model")
    n_heads = config.integer("llama.attention.head_count", most=MAX_HEADS)
    d_model = config.integer("llama.embedding_length", most=MAX_WIDTH)
    d_head = config.integer("llama.attention.key_length", max(d_model // n_heads, 1), MAX_HEAD_SIZE)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if config.integer(key, d_head) != d_head:
            raise config.refused(f"{key} {config.values[key]}", f"the head's size {d_head}")
    return _checked(
        config,
        vocab_size=_gguf_vocabulary(config, shapes),
        d_model=d_model,
        n_layers=config.layers("llama.block_count"),
        n_heads=n_heads,
        n_kv_heads=config.integer("llama.attention.head_count_kv", n_heads, MAX_HEADS),
        d_head=d_head,
        d_ffn=config.integer("llama.feed_forward_length", most=MAX_FFN),
        max_context=config.integer("llama.context_length"),
        activation="silu",
        norm_eps=config.number("llama.attention.layer_norm_rms_epsilon", 1e-5, 1.0),
        tied_head="output.weight" not in shapes,
    )


def _gguf_vocabulary(config: Config, shapes: TensorShapes) -> int:
    """Rows of the embedding; the metadata's number is only a fallback, for the error that follows."""
    shape = shapes.get("token_embd.weight")
    if shape is None:
        return config.integer("llama.vocab_size", 1)
    if len(shape) != 2 or not 0 < shape[0] <= MAX_SIZE:
        raise config.refused(f"token_embd.weight of shape {list(shape)}", "a matrix [vocabulary, width]")
    return shape[0]


def _checked(config: Config, **sizes: Any) -> ModelSpec:
    spec = ModelSpec(
        family="llama",
        d_embed=sizes["d_model"],
        gated=True,
        norm="rmsnorm",
        norm_first=True,
        final_norm=True,
        rope=True,
        **sizes,
    )
    if spec.n_heads % spec.n_kv_heads:
        raise config.refused(f"{spec.n_heads} heads with {spec.n_kv_heads} KV heads", "a multiple")
    if spec.d_head % 2:
        raise config.refused(f"a head of {spec.d_head}", "an even size, for rotary positions")
    return spec


def _plan(
    spec: ModelSpec,
    top: tuple[str, str, str],
    rope: TensorRule,
    name: Namer,
    has_bias: Callable[[int, str], bool],
    permuted: bool,
) -> CheckpointPlan:
    embed, norm, head = top
    shape = (spec.vocab_size, spec.d_model)
    # A tied checkpoint may have kept the shared matrix under the head's name only.
    rules = [TensorRule("embed.weight", shape, "matrix", (embed, head) if spec.tied_head else (embed,))]
    if not spec.tied_head:
        rules.append(TensorRule("head.weight", shape, "matrix", (head,)))
    rules += [TensorRule("final_norm.weight", (spec.d_model,), "vector", (norm,)), rope]
    for layer in range(spec.n_layers):
        rules += _layer(spec, layer, partial(name, layer), partial(has_bias, layer), permuted)
    ffn = tuple(
        FFNNames(
            up=f"{name(layer, 'ffn.up')}.weight",
            gate=f"{name(layer, 'ffn.gate')}.weight",
            down=f"{name(layer, 'ffn.down')}.weight",
        )
        for layer in range(spec.n_layers)
    )
    return CheckpointPlan(spec, tuple(rules), ffn)


def _layer(
    spec: ModelSpec, layer: int, name: Callable[[str], str], has_bias: Callable[[str], bool], permuted: bool
) -> Iterator[TensorRule]:
    d, q_rows, kv_rows = spec.d_model, spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head
    ours = f"layers.{layer}."
    yield TensorRule(f"{ours}attn_norm.weight", (d,), "vector", (f"{name('attn_norm')}.weight",))
    shapes = {"attn.q": (q_rows, d), "attn.k": (kv_rows, d), "attn.v": (kv_rows, d), "attn.o": (d, q_rows)}
    for part, shape in shapes.items():
        rotated = permuted and part in ("attn.q", "attn.k")
        transform = partial(_halves_from_pairs, spec.d_head) if rotated else None
        block_rows = spec.d_head if rotated else 1
        source = name(part)
        yield TensorRule(
            f"{ours}{part}.weight", shape, "matrix", (f"{source}.weight",), 0, transform, block_rows
        )
        if has_bias(part):
            yield TensorRule(
                f"{ours}{part}.bias", shape[:1], "vector", (f"{source}.bias",), 0, transform, block_rows
            )
    yield TensorRule(f"{ours}ffn_norm.weight", (d,), "vector", (f"{name('ffn_norm')}.weight",))
    for part, size in (("ffn.up", spec.d_ffn), ("ffn.gate", spec.d_ffn), ("ffn.down", d)):
        if has_bias(part):
            yield TensorRule(f"{ours}{part}.bias", (size,), "vector", (f"{name(part)}.bias",))


def _halves_from_pairs(d_head: int, rows: WeightArray) -> WeightArray:
    """Undo llama.cpp's row order within each head: pairs side by side -> two halves."""
    pairs = rows.reshape(-1, d_head // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _divided(frequencies: F32Array, where: str, factors: WeightArray) -> WeightArray:
    with np.errstate(all="ignore"):
        divided = np.asarray(frequencies / factors.astype(np.float32), np.float32)
    return usable(divided, where, "tensor 'rope_freqs.weight'")


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LlamaModel", "MistralForCausalLM", "MistralModel"),
    model_types=("llama", "mistral"),
    gguf_architectures=("llama",),
    from_hf=from_hf,
    from_gguf=from_gguf,
)
