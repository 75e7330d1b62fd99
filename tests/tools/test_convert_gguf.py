"""GGUF files: what is expanded, permuted and refused, on tiny files and on the demo model."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from flashd.errors import ConversionError, FlashdError
from flashd.models.families.rope import base_frequencies
from flashd.testing.tiny_checkpoints import LLAMA_CONFIG, llama_shapes, narrowed, random_tensors
from flashd.testing.tiny_gguf import gguf_name, permuted, write_gguf_llama
from flashd.tools.convert import ConvertOptions, convert
from flashd.tools.convert.sources.gguf_file import GGUFSource
from flashd.tools.convert.sources.gguf_header import read_header

CONFIG = {**LLAMA_CONFIG, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def dequantized(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "F32":
        return values
    ggml = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(values, ggml), ggml).reshape(values.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_row_order(tmp_path, bundle, kind, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    tensors = random_tensors(llama_shapes(config), seed=5)
    src = write_gguf_llama(tmp_path / "m.gguf", config, tensors, kind)
    convert(src, tmp_path / "dst", ConvertOptions(dtype="f32"))
    made = bundle(tmp_path / "dst")
    assert made.manifest.model.tied_head is tied
    assert ("head.weight" in made.resident) is not tied
    for i in range(2):
        base = f"model.layers.{i}."
        for part, ours in zip(("up", "gate", "down"), made.parts(i), strict=True):
            held = dequantized(tensors[f"{base}mlp.{part}_proj.weight"], kind)
            assert np.array_equal(ours, held.T if part == "down" else held), part
        for part in "qkvo":
            name = f"{base}self_attn.{part}_proj.weight"
            # Rows are quantised one by one, so Hugging Face's order comes back exactly.
            assert np.array_equal(
                made.resident[f"layers.{i}.attn.{part}.weight"], dequantized(tensors[name], kind)
            )
    held = dequantized(tensors["model.embed_tokens.weight"], kind)
    assert np.array_equal(made.resident["embed.weight"], held)
    assert np.array_equal(made.resident["final_norm.weight"], tensors["model.norm.weight"])
    assert np.array_equal(made.resident["rope.inv_freq"], base_frequencies(10000.0, 64))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16"), ("Q8_0", "f16"), ("Q4_1", "f16")]
)
def test_own_dtype(tmp_path, bundle, kind, dtype):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    src = write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors, kind)
    assert convert(src, tmp_path / "dst").dtype == dtype
    held = dequantized(tensors["model.layers.1.mlp.up_proj.weight"], kind)
    assert np.array_equal(
        narrowed(bundle(tmp_path / "dst").parts(1)[0], dtype), narrowed(np.ascontiguousarray(held), dtype)
    )


K_QUANTS = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_XS",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_XXS",
    "IQ1_M",
    "TQ1_0",
    "MXFP4",
]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_blocks_of_every_kind_are_expanded_as_gguf_does(tmp_path, kind):
    """Types that gguf cannot make but expand: seeded random blocks, any split of the rows."""
    ggml = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[ggml]
    rng = np.random.default_rng(3)
    # Bytes below 0x40 keep every half-float scale finite, wherever in the block it is.
    raw = rng.integers(0, 0x40, (70, 2 * 256 // block * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(raw, ggml)
    source = GGUFSource(tmp_path / "m.gguf")
    try:
        assert source.tensors["x"].shape == expected.shape == (70, 512)
        assert source.tensors["x"].quantized
        for start, stop in ((0, 70), (0, 1), (17, 18), (3, 69)):
            assert np.array_equal(source.read_rows("x", start, stop), expected[start:stop])
    finally:
        source.close()


def test_biases_of_rotated_heads_are_permuted_too(tmp_path, bundle):
    config = {**CONFIG, "attention_bias": True}
    tensors = random_tensors(llama_shapes(config), seed=6)
    src = write_gguf_llama(tmp_path / "m.gguf", config, tensors)
    convert(src, tmp_path / "dst")
    resident = bundle(tmp_path / "dst").resident
    for part in "qkv":
        expected = tensors[f"model.layers.1.self_attn.{part}_proj.bias"]
        assert np.array_equal(resident[f"layers.1.attn.{part}.bias"], expected)


def test_rope_divisors_are_applied(tmp_path, bundle):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    src = write_gguf_llama(
        tmp_path / "m.gguf", {**CONFIG, "rope_theta": 500000.0}, tensors, extra={"rope_freqs.weight": factors}
    )
    convert(src, tmp_path / "dst")
    found = bundle(tmp_path / "dst").resident["rope.inv_freq"]
    assert np.array_equal(found, base_frequencies(500000.0, 64) / factors)


def test_linear_rope_scaling(tmp_path, bundle):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    src = write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors, metadata=scaling)
    convert(src, tmp_path / "dst")
    found = bundle(tmp_path / "dst").resident["rope.inv_freq"]
    assert np.array_equal(found, base_frequencies(10000.0, 64) / np.float32(4))


def test_a_directory_with_one_file_and_with_two(tmp_path, bundle):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    (tmp_path / "src").mkdir()
    write_gguf_llama(tmp_path / "src/m.gguf", CONFIG, tensors)
    convert(tmp_path / "src", tmp_path / "dst")
    bundle(tmp_path / "dst")
    write_gguf_llama(tmp_path / "src/n.gguf", CONFIG, tensors)
    with pytest.raises(ConversionError, match="holds 2 GGUF files"):
        convert(tmp_path / "src", tmp_path / "other")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count 16"),
        ({"llama.attention.value_length": 32}, "value_length 32"),
        ({"split.count": 3}, "one of 3 parts.*llama-gguf-split --merge"),
    ],
)
def test_refused_settings(tmp_path, metadata, message):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    src = write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors, metadata=metadata)
    with pytest.raises(ConversionError, match=message):
        convert(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match=r"m\.gguf: unknown architecture 'falcon'"):
        convert(tmp_path / "m.gguf", tmp_path / "dst")


def patched_type(path: Path, name: str, ggml_type: int) -> None:
    """Give one tensor another type number, in place."""
    raw = path.read_bytes()
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", raw, at)
    at += 4 + 8 * dims
    path.write_bytes(raw[:at] + struct.pack("<I", ggml_type) + raw[at + 4 :])


@pytest.mark.parametrize(("number", "named"), [(9, "q8_1"), (26, "i32"), (9999, "ggml type 9999")])
def test_unreadable_types_are_named(tmp_path, number, named):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    src = write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors)
    patched_type(src, gguf_name("model.layers.1.mlp.up_proj.weight"), number)
    with pytest.raises(
        ConversionError, match=rf"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' is stored as {named}"
    ):
        convert(src, tmp_path / "dst")


def test_truncated_anywhere_is_an_error_and_never_a_bundle(tmp_path):
    tensors = random_tensors(llama_shapes(CONFIG), seed=5)
    src = write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors, "Q8_0")
    raw = src.read_bytes()
    header = GGUFSource(src)._table["token_embd.weight"].offset_bytes
    rng = np.random.default_rng(1)
    cuts = [0, 1, 4, 23, 24, header - 1, header, len(raw) - 1, *rng.integers(0, header, 20)]
    for cut in map(int, cuts):
        src.write_bytes(raw[:cut])
        with pytest.raises(ConversionError, match=r"m\.gguf: .*(truncated|not a GGUF).*download it again"):
            convert(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.slow
def test_damaged_headers_raise_only_our_error(tmp_path):
    tensors = random_tensors(llama_shapes({**CONFIG, "num_hidden_layers": 1}), seed=5)
    src = write_gguf_llama(
        tmp_path / "m.gguf",
        {**CONFIG, "num_hidden_layers": 1},
        tensors,
        metadata={"tokenizer.ggml.tokens": ["a", "b"]},
    )
    raw = bytearray(src.read_bytes())
    end = read_header(src).tensors[0].offset_bytes
    rng = np.random.default_rng(2)
    messages = []
    for _ in range(300):
        bad = bytearray(raw)
        for at in rng.integers(4, end, 3):
            bad[at] = rng.integers(0, 256)
        src.write_bytes(bad)
        try:
            convert(src, tmp_path / "dst", ConvertOptions(overwrite=True))
        except FlashdError as exc:
            messages.append(str(exc))
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


@pytest.mark.parametrize(
    ("version", "named"), [(1, "version 1"), (4, "version 4"), (0x03000000, "big-endian")]
)
def test_other_versions(tmp_path, version, named):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ConversionError, match=f"GGUF {named}, expected little-endian version 2 or 3"):
        convert(tmp_path / "m.gguf", tmp_path / "dst")


def test_permutation_is_llama_cpps():
    """The rotation of interleaved pairs on permuted rows is the rotation of halves on ours."""
    d_head, heads = 8, 2
    config = {"num_attention_heads": heads, "num_key_value_heads": heads}
    rows = np.arange(heads * d_head, dtype=np.float32)
    interleaved = permuted("model.layers.0.self_attn.q_proj.weight", rows, config)
    pairs = interleaved.reshape(heads, d_head // 2, 2)
    halves = rows.reshape(heads, 2, d_head // 2)
    assert np.array_equal(pairs[..., 0], halves[:, 0])
    assert np.array_equal(pairs[..., 1], halves[:, 1])


@pytest.mark.slow
def test_demo_model_equals_transformers_bit_for_bit(smollm2_f32, hf_smollm2, bundle):
    made, model = bundle(smollm2_f32), hf_smollm2
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert np.array_equal(made.resident["embed.weight"], state["model.embed_tokens.weight"])
    assert np.array_equal(made.resident["final_norm.weight"], state["model.norm.weight"])
    assert np.array_equal(made.resident["rope.inv_freq"], model.model.rotary_emb.inv_freq.numpy())
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
    for i in range(made.manifest.model.n_layers):
        base = f"model.layers.{i}."
        for ours, theirs in names.items():
            assert np.array_equal(made.resident[f"layers.{i}.{ours}.weight"], state[f"{base}{theirs}.weight"])
        up, gate, down = made.parts(i)
        assert np.array_equal(up, state[f"{base}mlp.up_proj.weight"])
        assert np.array_equal(gate, state[f"{base}mlp.gate_proj.weight"])
        assert np.array_equal(down, state[f"{base}mlp.down_proj.weight"].T)
    spec, config = made.manifest.model, model.config
    assert (spec.n_heads, spec.n_kv_heads, spec.vocab_size, spec.max_context, spec.norm_eps) == (
        config.num_attention_heads, config.num_key_value_heads, config.vocab_size,
        config.max_position_embeddings, config.rms_norm_eps,
    )  # fmt: skip
