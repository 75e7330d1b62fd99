"""OPT (arXiv 2205.01068): learned positions, LayerNorm, two-matrix FFN with ReLU.

OPT-350m differs: norms after the residual, no final norm, and embeddings narrower than the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flashd.models.families.base import (
    MAX_FFN,
    MAX_HEADS,
    MAX_WIDTH,
    CheckpointPlan,
    Config,
    Family,
    FFNNames,
    TensorRule,
    TensorShapes,
    find_prefix,
)
from flashd.types import ModelSpec

# Rows that OPT's position table has before position 0 (padding_idx + 1, a fairseq habit).
POSITION_OFFSET = 2
# torch.nn.LayerNorm's default; OPT has no setting for it.
NORM_EPS = 1e-5
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def from_hf(config: Config, shapes: TensorShapes) -> CheckpointPlan:
    """Plan of a Hugging Face OPT checkpoint, with or without a language-model head around it."""
    spec = _spec(config)
    prefix = find_prefix(shapes, ("model.decoder.", "decoder.", ""), "embed_tokens.weight")
    bias = config.flag("enable_bias", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    rules = [*_embeddings(spec, prefix, affine)]
    for layer in range(spec.n_layers):
        rules += _layer(spec, layer, f"{prefix}layers.{layer}.", bias, affine)
    names = [f"{prefix}layers.{layer}." for layer in range(spec.n_layers)]
    ffn = tuple(FFNNames(up=f"{name}fc1.weight", down=f"{name}fc2.weight") for name in names)
    return CheckpointPlan(spec, tuple(rules), ffn)


def _spec(config: Config) -> ModelSpec:
    d_model = config.integer("hidden_size", 768, MAX_WIDTH)
    n_heads = config.integer("num_attention_heads", 12, MAX_HEADS)
    if d_model % n_heads:
        raise config.refused(f"hidden_size {d_model} with {n_heads} heads", "a multiple of the heads")
    norm_first = config.flag("do_layer_norm_before", True)
    return ModelSpec(
        family="opt",
        vocab_size=config.integer("vocab_size", 50272),
        d_model=d_model,
        d_embed=config.integer("word_embed_proj_dim", d_model, MAX_WIDTH),
        n_layers=config.layers("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        d_ffn=config.integer("ffn_dim", 3072, MAX_FFN),
        max_context=config.integer("max_position_embeddings", 2048),
        activation=config.activation("activation_function", "relu"),
        gated=False,
        norm="layernorm",
        norm_eps=NORM_EPS,
        norm_first=norm_first,
        final_norm=norm_first and not config.flag("_remove_final_layer_norm", False),
        rope=False,
        tied_head=config.flag("tie_word_embeddings", True),
    )


def _embeddings(spec: ModelSpec, prefix: str, affine: bool) -> Iterator[TensorRule]:
    d, e, vocab = spec.d_model, spec.d_embed, spec.vocab_size
    embed = (f"{prefix}embed_tokens.weight",)
    # A tied checkpoint may have kept the shared matrix under the head's name only.
    sources = (*embed, "lm_head.weight") if spec.tied_head else embed
    yield TensorRule("embed.weight", (vocab, e), "matrix", sources)
    yield TensorRule(
        "position.weight",
        (spec.max_context + POSITION_OFFSET, d),
        "matrix",
        (f"{prefix}embed_positions.weight",),
        skip_rows=POSITION_OFFSET,
    )
    if e != d:
        yield TensorRule("project_in.weight", (d, e), "matrix", (f"{prefix}project_in.weight",))
        yield TensorRule("project_out.weight", (e, d), "matrix", (f"{prefix}project_out.weight",))
    if not spec.tied_head:
        yield TensorRule("head.weight", (vocab, e), "matrix", ("lm_head.weight",))
    if spec.final_norm:
        yield from _norm("final_norm", f"{prefix}final_layer_norm", d, affine)


def _layer(spec: ModelSpec, layer: int, source: str, bias: bool, affine: bool) -> Iterator[TensorRule]:
    d, name = spec.d_model, f"layers.{layer}."
    yield from _norm(f"{name}attn_norm", f"{source}self_attn_layer_norm", d, affine)
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
        yield TensorRule(
            f"{name}attn.{ours}.weight", (d, d), "matrix", (f"{source}self_attn.{theirs}.weight",)
        )
        if bias:
            yield TensorRule(f"{name}attn.{ours}.bias", (d,), "vector", (f"{source}self_attn.{theirs}.bias",))
    yield from _norm(f"{name}ffn_norm", f"{source}final_layer_norm", d, affine)
    if bias:
        yield TensorRule(f"{name}ffn.up.bias", (spec.d_ffn,), "vector", (f"{source}fc1.bias",))
        yield TensorRule(f"{name}ffn.down.bias", (d,), "vector", (f"{source}fc2.bias",))


def _norm(name: str, source: str, d: int, affine: bool) -> Iterator[TensorRule]:
    """A norm without parameters becomes ones and zeros, so that the decoder knows one kind."""
    for part, neutral in (("weight", _ONE), ("bias", _ZERO)):
        if affine:
            yield TensorRule(f"{name}.{part}", (d,), "vector", (f"{source}.{part}",))
        else:
            # One number that looks like ``d``: nothing is made before the tensors are known to fit.
            yield TensorRule(f"{name}.{part}", (d,), "vector", values=np.broadcast_to(neutral, (d,)))


FAMILY = Family(
    name="opt",
    architectures=("OPTForCausalLM", "OPTModel"),
    model_types=("opt",),
    gguf_architectures=(),
    from_hf=from_hf,
)
