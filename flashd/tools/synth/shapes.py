"""The shapes that ``flashd synth`` knows, as their published configurations have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashd.errors import ConfigError
from flashd.models.families import CheckpointPlan, TensorRule, hf_plan


def _opt(d: int, n_layers: int, n_heads: int, **other: int) -> dict[str, Any]:
    sizes = {"hidden_size": d, "word_embed_proj_dim": d, "ffn_dim": 4 * d, "num_hidden_layers": n_layers}
    return {"model_type": "opt", "num_attention_heads": n_heads, "vocab_size": 50272, **sizes, **other}


def _llama(d: int, d_ffn: int, n_layers: int, n_heads: int, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": d, "intermediate_size": d_ffn, "num_hidden_layers": n_layers}
    return {
        "model_type": "llama",
        "num_attention_heads": n_heads,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
        **sizes,
        **other,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "opt-tiny": _opt(128, 4, 4, vocab_size=512, max_position_embeddings=512),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "llama-tiny": _llama(
        128, 384, 4, 4, num_key_value_heads=2, vocab_size=512, max_position_embeddings=512
    ),
    "llama-3.2-1b": _llama(
        2048, 8192, 16, 32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "llama-2-7b": _llama(4096, 11008, 32, 32, vocab_size=32000, max_position_embeddings=4096),
}  # fmt: skip
_POSITION = "position.weight"


def shape_plan(name: str, n_layers: int | None = None) -> CheckpointPlan:
    """What ``flashd convert`` would make of a model of this shape.

    Llama shapes get ReLU and learned positions: the first as in the paper's sparse Llama 2, the second
    because a position is what the made-up activations depend on.

    Args:
        name: one of ``CONFIGS``.
        n_layers: other than the model's own.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in CONFIGS:
        raise ConfigError(f"unknown shape {name!r}; known: {', '.join(CONFIGS)}")
    config = CONFIGS[name] | ({} if n_layers is None else {"num_hidden_layers": n_layers})
    prefix = "model.decoder." if config["model_type"] == "opt" else "model."
    plan = hf_plan(config, {f"{prefix}embed_tokens.weight": ()}, name)
    if not plan.spec.rope:
        return plan
    table = TensorRule(_POSITION, (plan.spec.max_context, plan.spec.d_model), "matrix", (_POSITION,))
    rules = tuple(table if rule.name.startswith("rope.") else rule for rule in plan.rules)
    return replace(plan, spec=replace(plan.spec, rope=False), rules=rules)
