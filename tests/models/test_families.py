"""Families: what they make of configurations, compared with transformers' own models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from flashd.errors import ConversionError
from flashd.models.families import FAMILIES, gguf_plan, hf_plan
from flashd.models.families.rope import base_frequencies
from flashd.testing.tiny_checkpoints import LLAMA_CONFIG, OPT_CONFIG, llama_shapes, opt_shapes

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def opt(**changes):
    config = {**OPT_CONFIG, **changes}
    return hf_plan(config, dict(opt_shapes(config)), "config.json")


def llama(**changes):
    config = {**LLAMA_CONFIG, **changes}
    return hf_plan(config, dict(llama_shapes(config)), "config.json")


def inv_freq(plan):
    return next(rule.values for rule in plan.rules if rule.name == "rope.inv_freq")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"enable_bias": False, "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 8},
    ],
)
def test_opt_rules_cover_the_model_of_transformers(changes):
    """Every parameter is used once, in its shape; nothing that doesn't exist is asked for."""
    config = {**OPT_CONFIG, **changes}
    removed = config.pop("_remove_final_layer_norm", False)
    model_config = transformers.OPTConfig(**config)
    model_config._remove_final_layer_norm = removed
    model = transformers.OPTForCausalLM(model_config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plan = hf_plan({**config, "_remove_final_layer_norm": removed}, shapes, "config.json")
    check_cover(plan, shapes, tied=config["tie_word_embeddings"])
    assert plan.spec.final_norm == (config["do_layer_norm_before"] and not removed)
    assert plan.spec.norm_eps == 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_key_value_heads": 4},
        {"head_dim": 12},
    ],
)
def test_llama_rules_cover_the_model_of_transformers(changes):
    config = {**LLAMA_CONFIG, **changes}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    plan = hf_plan(config, shapes, "config.json")
    check_cover(plan, shapes, tied=config["tie_word_embeddings"])
    assert plan.spec.d_head == changes.get("head_dim", 8)
    assert np.array_equal(inv_freq(plan), model.model.rotary_emb.inv_freq.numpy())


def check_cover(plan, shapes, tied):
    used = {rule.sources[0]: rule.shape for rule in plan.rules if rule.values is None}
    for names in plan.ffn:
        for name in (names.up, names.gate):
            if name is not None:
                used[name] = (plan.spec.d_ffn, plan.spec.d_model)
        used[names.down] = (plan.spec.d_model, plan.spec.d_ffn)
    expected = {name: shape for name, shape in shapes.items() if not (tied and name == "lm_head.weight")}
    assert used == expected
    assert len({rule.name for rule in plan.rules}) == len(plan.rules)


def test_opt_norms_without_parameters_are_ones_and_zeros():
    rules = {rule.name: rule for rule in opt(layer_norm_elementwise_affine=False).rules}
    assert (rules["final_norm.weight"].values == 1).all()
    assert (rules["layers.2.attn_norm.bias"].values == 0).all()
    assert rules["layers.2.ffn_norm.bias"].values.shape == (32,)


@pytest.mark.parametrize("prefix", ["model.decoder.", "decoder.", ""])
def test_opt_prefixes(prefix):
    plan = hf_plan(OPT_CONFIG, dict(opt_shapes(OPT_CONFIG, prefix)), "config.json")
    assert plan.rules[0].sources[0] == f"{prefix}embed_tokens.weight"
    assert plan.ffn[2].down == f"{prefix}layers.2.fc2.weight"


@pytest.mark.parametrize(
    ("name", "ours"),
    [("relu", "relu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("silu", "silu"), ("swish", "silu")],
)
def test_activations(name, ours):
    assert opt(activation_function=name).spec.activation == ours


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
def test_the_tanh_approximations_are_one_function(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 999)
    assert torch.allclose(ACT2FN[name](x), torch.nn.functional.gelu(x, approximate="tanh"), atol=1e-6)


ROPES = {
    "theta": {"rope_theta": 500000.0},
    "v5 default": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "linear v5": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 131072},
    "llama3 v5": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}, "max_position_embeddings": 131072},
    "llama3 by context": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "rope_theta": 10000.0,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("d_head", [8, 64, 128])
def test_rope_equals_transformers_bit_for_bit(name, d_head):
    config = {**LLAMA_CONFIG, "hidden_size": 4 * d_head, **ROPES[name]}
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    expected = rotary(transformers.LlamaConfig(**{k: v for k, v in config.items() if v is not None}))
    plan = hf_plan(config, dict(llama_shapes(config)), "config.json")
    assert np.array_equal(inv_freq(plan), expected.inv_freq.numpy())
    assert inv_freq(plan).dtype == np.float32


@pytest.mark.parametrize("theta", [10000.0, 25000.0, 130000.0, 500000.0, 1e6, 8e6])
def test_rope_is_within_torchs_own_rounding(theta):
    """torch's vectorised power differs by a unit in the last place between CPUs; ours doesn't."""
    for d_head in (16, 64, 80, 96, 128, 256):
        theirs = 1.0 / (theta ** (torch.arange(0, d_head, 2).float() / d_head))
        np.testing.assert_array_max_ulp(base_frequencies(theta, d_head), theirs.numpy(), maxulp=2)
        exact = np.float64(theta) ** -(np.arange(0, d_head, 2) / d_head)
        np.testing.assert_allclose(base_frequencies(theta, d_head), exact, rtol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "relu6"}, "'relu6'.*silu"),
        ({"num_key_value_heads": 3}, "4 heads with 3 KV heads"),
        ({"head_dim": 7}, "a head of 7"),
        ({"hidden_size": "big"}, "hidden_size is 'big', expected a positive whole number"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, expected at most"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoint"),
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'.*OPTForCausalLM, LlamaForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "unknown architecture 'bert'"),
        ({"architectures": None, "model_type": None}, "unknown architecture None"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32},
            "sliding_window 32",
        ),
    ],
)  # fmt: skip
def test_refusals_name_what_was_got(changes, message):
    config = {**LLAMA_CONFIG, **changes}
    with pytest.raises(ConversionError, match=message) as caught:
        hf_plan(config, {}, "config.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1e-300}, "rope_theta is 1e-300, expected a number from"),
        ({"rope_theta": 1e308}, "rope_theta is 1e\\+308"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "factor is 1e-300"),
        ({"rope_scaling": {"type": "linear", "factor": 5e-324}}, "factor is 5e-324"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor is 1e\\+300"),
        ({"rope_scaling": {"type": "linear", "factor": 3e-38}, "rope_theta": 0.01}, "factor 3e-38 gives"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 1e-300}}, "low_freq_factor is 1e-300"),
        (
            {"rope_scaling": {**LLAMA3, "factor": 3e38, "low_freq_factor": 1e38}},
            "factor 3e\\+38, low_freq_factor 1e\\+38, high_freq_factor 4.0 gives",
        ),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e\\+300"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300"),
    ],
    ids=str,
)
def test_numbers_that_float32_makes_nothing_of_are_refused_by_name(changes, message):
    """No warning of NumPy's either: they are errors here."""
    config = {**LLAMA_CONFIG, **changes}
    with pytest.raises(ConversionError, match=message) as caught:
        hf_plan(config, {}, "config.json")
    assert str(caught.value).startswith("config.json: ")


GGUF = {
    "general.architecture": "llama",
    "llama.attention.head_count": 4,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.context_length": 64,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.freq_base": 1e-300}, "llama.rope.freq_base is 1e-300"),
        ({"llama.rope.scaling.factor": 1e300}, "llama.rope.scaling.factor is 1e\\+300"),
        ({"llama.rope.scaling.factor": float("nan")}, "llama.rope.scaling.factor is nan"),
        (
            {"llama.rope.scale_linear": 2e38, "llama.rope.freq_base": 1e9},
            "llama.rope.scale_linear 2e\\+38 gives",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "rms_epsilon is inf"),
    ],
    ids=str,
)
def test_gguf_numbers_that_float32_makes_nothing_of(changes, message):
    with pytest.raises(ConversionError, match=message):
        gguf_plan({**GGUF, **changes}, {}, "x.gguf")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_rope_divisors_that_give_no_frequency(bad):
    plan = gguf_plan(GGUF, {"rope_freqs.weight": (4,)}, "x.gguf")
    divide = next(rule.transform for rule in plan.rules if rule.name == "rope.inv_freq")
    factors = np.ones(4, np.float32)
    assert np.array_equal(divide(factors), base_frequencies(10000.0, 8))
    factors[2] = bad
    with pytest.raises(ConversionError, match=r"x\.gguf: tensor 'rope_freqs\.weight' gives rotary freq"):
        divide(factors)


def test_what_comes_from_no_tensor_is_not_made_beforehand():
    changes = {"hidden_size": 1 << 18, "num_attention_heads": 16, "layer_norm_elementwise_affine": False}
    rules = [rule for rule in opt(**changes).rules if rule.values is not None]
    assert {rule.values.shape for rule in rules} == {(1 << 18,)}
    assert {rule.values.strides for rule in rules} == {(0,)}


@pytest.mark.parametrize("value", ["x" * 10_000, [[[[[1] * 99]]]] * 99, {"a": {"b": {"c": "d" * 999}}}])
def test_hostile_values_stay_short_in_messages(value):
    for changes in ({"hidden_size": value}, {"architectures": [value]}, {"hidden_act": value}):
        with pytest.raises(ConversionError) as caught:
            hf_plan({**LLAMA_CONFIG, **changes}, {}, "config.json")
        assert len(str(caught.value)) < 500


def test_opt_heads_must_divide():
    with pytest.raises(ConversionError, match="hidden_size 32 with 5 heads"):
        opt(num_attention_heads=5)


@pytest.mark.parametrize("window", [None, 4096, 64])
def test_mistral_with_full_attention(window):
    plan = llama(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)
    assert plan.spec.family == "llama"


def test_model_type_counts_when_no_architecture_is_named():
    assert llama(architectures=None).spec.family == "llama"
    assert opt(architectures=[]).spec.family == "opt"


def test_unknown_gguf_architecture():
    with pytest.raises(
        ConversionError, match=r"unknown architecture 'falcon'.*GGUF files of architecture llama"
    ):
        gguf_plan({"general.architecture": "falcon"}, {}, "x.gguf")


def test_every_family_is_complete():
    assert set(FAMILIES) == {"opt", "llama"}
    for name, family in FAMILIES.items():
        assert family.name == name
        assert family.architectures
