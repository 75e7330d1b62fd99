"""Sources made to hurt: what they get is one line, quickly and in little memory."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import torch

from flashd.errors import ConversionError, FlashdError
from flashd.testing.tiny_checkpoints import (
    LLAMA_CONFIG,
    OPT_CONFIG,
    llama_shapes,
    random_tensors,
    write_llama,
    write_opt,
    write_opt_tokenizer,
)
from flashd.testing.tiny_gguf import write_gguf_llama
from flashd.tools.convert import ConvertOptions, convert
from flashd.tools.convert.sources.torch_zip import TorchZipSource

CONFIG = {**LLAMA_CONFIG, "num_hidden_layers": 1}


def refusal(source, dest, **options):
    """The one line that a conversion ends with."""
    with pytest.raises(FlashdError) as caught:
        convert(source, dest, ConvertOptions(**options))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert not dest.exists()
    return str(caught.value)


# -- sizes ------------------------------------------------------------------------------------------

HUGE = 2147483646


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": HUGE},
        {"hidden_size": HUGE},
        {"hidden_size": HUGE, "num_attention_heads": 1},
        {"intermediate_size": HUGE},
        {"num_attention_heads": HUGE},
        {"num_key_value_heads": HUGE},
    ],
)
def test_sizes_that_no_model_has(tmp_path, changes):
    src = write_llama(tmp_path / "src")
    (src / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **changes}))
    assert f"is {HUGE}, expected at most" in refusal(src, tmp_path / "dst")


@pytest.mark.parametrize("key", ["attention.key_length", "embedding_length", "feed_forward_length"])
def test_sizes_that_no_gguf_model_has(tmp_path, key):
    src = gguf(tmp_path, {})
    number = struct.pack("<II", 4, CONFIG["hidden_size"])
    if key == "attention.key_length":
        src = gguf(tmp_path, {f"llama.{key}": HUGE})
    else:
        raw = bytearray(src.read_bytes())
        at = raw.index(f"llama.{key}".encode()) + len(f"llama.{key}")
        raw[at : at + len(number)] = struct.pack("<II", 4, HUGE)
        src.write_bytes(raw)
    assert f"llama.{key} is {HUGE}, expected at most" in refusal(src, tmp_path / "dst")


def test_planning_makes_nothing_of_the_size_that_a_file_claims(tmp_path, in_a_small_process):
    """Norms without parameters come from no tensor, for as many layers as the file says."""
    config = {
        **OPT_CONFIG, "hidden_size": 1 << 18, "word_embed_proj_dim": 1 << 18, "num_attention_heads": 16,
        "num_hidden_layers": 3000, "layer_norm_elementwise_affine": False,
    }  # fmt: skip
    src = write_opt(tmp_path / "src")
    (src / "config.json").write_text(json.dumps(config))
    printed = in_a_small_process(f"""
        from pathlib import Path
        from flashd.errors import ConversionError
        from flashd.tools.convert import convert
        try:
            convert(Path({str(src)!r}), Path({str(tmp_path / "dst")!r}))
        except ConversionError as exc:
            print(exc)
    """)
    assert "embed_tokens.weight' has shape [300, 32], expected [" in printed


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_side_files_have_a_limit(tmp_path, name):
    src = write_llama(tmp_path / "src")
    with (src / name).open("wb") as file:
        file.truncate(9 << 20)
    assert f"{name}: more than 8388608 bytes" in refusal(src, tmp_path / "dst")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_vocabularies_have_a_limit(tmp_path, name):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    with (src / name).open("wb") as file:
        file.truncate(65 << 20)
    assert f"{name}: more than 67108864 bytes" in refusal(src, tmp_path / "dst")


def test_a_gguf_header_has_a_limit(tmp_path):
    front = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"x", 9, 0, (1 << 22) + 1)
    with (tmp_path / "m.gguf").open("wb") as file:
        file.write(front)
        file.truncate(80 << 20)
    assert "a header of more than 4194304 values" in refusal(tmp_path / "m.gguf", tmp_path / "dst")
    front = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 70 << 20)
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.write(front)
    assert "a header of more than 67108864 bytes" in refusal(tmp_path / "m.gguf", tmp_path / "dst")


# -- types and texts --------------------------------------------------------------------------------


def gguf(folder, metadata, **extra):
    tensors = random_tensors(llama_shapes(CONFIG), seed=1)
    return write_gguf_llama(folder / "m.gguf", CONFIG, tensors, metadata=metadata, extra=extra)


BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    "metadata",
    [
        {"split.count": "many"},
        {"split.count": [1, 2]},
        {"split.count": 1.5},
        {"llama.rope.scaling.factor": "4"},
        {"llama.rope.scaling.factor": [1.0, 2.0]},
        {"llama.rope.scaling.type": [1]},
        {"llama.rope.scale_linear": "4"},
        {"llama.expert_count": [8]},
        {"llama.attention.key_length": [8]},
        {"general.alignment": "x"},
        {**BPE, "tokenizer.ggml.tokens": 5},
        {**BPE, "tokenizer.ggml.tokens": [1, 2]},
        {**BPE, "tokenizer.ggml.merges": [1]},
        {**BPE, "tokenizer.ggml.merges": 1},
        {**BPE, "tokenizer.ggml.merges": ["ab"]},
        {**BPE, "tokenizer.ggml.token_type": 3},
        {**BPE, "tokenizer.ggml.token_type": ["x"]},
        {**BPE, "tokenizer.ggml.pre": [1]},
        {**BPE, "tokenizer.ggml.model": [1]},
        {**BPE, "tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": ""},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": ["x"]},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.scores": 1.0},
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 70_000},
    ],
    ids=str,
)
def test_gguf_metadata_of_other_types(tmp_path, metadata):
    src = gguf(tmp_path, metadata)
    message = refusal(src, tmp_path / "dst")
    assert message.startswith(str(src))
    assert ";" in message


def test_gguf_tensors_of_other_shapes(tmp_path):
    tensors = dict(random_tensors(llama_shapes(CONFIG), seed=1))
    tensors["model.embed_tokens.weight"] = np.ones(3, np.float32)
    src = write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors)
    assert "token_embd.weight of shape [3]" in refusal(src, tmp_path / "dst")
    raw = src.read_bytes()
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight")
    src.write_bytes(raw[:at] + struct.pack("<I", 0) + raw[at + 12 :] + bytes(64))
    assert "token_embd.weight of shape []" in refusal(src, tmp_path / "dst")


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**400},
        {"rope_theta": "1e4"},
        {"rope_theta": [10000.0]},
        {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
        {"rope_scaling": {"rope_type": {"a": 1}}},
        {"model_type": ["llama"], "architectures": None},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": ["x" * 5000]},
        {"model_type": "mistral", "sliding_window": "64"},
        {"hidden_act": "\ud800"},
        {"note": "\udfff"},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_configurations_of_other_types(tmp_path, changes):
    src = write_llama(tmp_path / "src")
    (src / "config.json").write_text(json.dumps({**LLAMA_CONFIG, **changes}))
    assert refusal(src, tmp_path / "dst").startswith(f"{src}/config.json: ")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"chat_template": "\ud800"}),
        ("tokenizer_config.json", {"eos_token": "\ud800"}),
        ("tokenizer_config.json", {"chat_template": 7}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": []}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"²": "x"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: "x"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("added_tokens.json", {"\ud800": 270}),
        ("added_tokens.json", {"x": 1 << 40}),
        ("added_tokens.json", {"a\nb": []}),
        ("special_tokens_map.json", {"bos_token": "\ud800"}),
        ("vocab.json", {"a": "b"}),
        ("vocab.json", {"a": -1}),
        ("vocab.json", {"\ud800": 1}),
        ("vocab.json", {"a": (1 << 31) - 1}),
        ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"a": 1 << 31}, "unk_token": "a"}}),
        ("merges.txt", "#version: 0.2\na b c"),
        ("merges.txt", "a"),
        ("merges.txt", b"\xff \xfe"),
        ("tokenizer.json", b"\xff{}"),
        ("chat_template.jinja", b"\xff"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_tokenizer_files_of_other_types(tmp_path, name, content):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    if name == "special_tokens_map.json":  # read for what the settings don't say
        (src / "tokenizer_config.json").unlink()
    data = json.dumps(content) if isinstance(content, dict) else content
    (src / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert refusal(src, tmp_path / "dst").startswith(f"{src / name}: ")


def test_templates_by_odd_names_and_a_bos_that_means_something_in_one(tmp_path):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    settings = {
        "add_bos_token": True,
        "bos_token": "$A:0 x",
        "chat_template": [{"name": []}, {"name": "default", "template": "d"}],
    }
    (src / "tokenizer_config.json").write_text(json.dumps(settings))
    spec = convert(src, tmp_path / "dst").tokenizer
    assert (spec.bos_token, spec.add_bos, spec.chat_template) == ("$A:0 x", True, "d")


def test_a_source_whose_name_is_no_utf8(tmp_path, bundle):
    name = os.fsdecode(b"mod\xffel")
    src = write_opt(tmp_path / name)
    write_opt_tokenizer(src)
    for store in ("file", "zarr"):
        dest = tmp_path / os.fsdecode(b"d\xff" + store.encode())
        convert(src, dest, ConvertOptions(store=store))
        assert bundle(dest).manifest.provenance["source"] == "mod\N{REPLACEMENT CHARACTER}el"
    tensors = random_tensors(llama_shapes(CONFIG), seed=1)
    write_gguf_llama(tmp_path / "m.gguf", CONFIG, tensors)
    (tmp_path / "m.gguf").rename(tmp_path / f"{name}.gguf")
    convert(tmp_path / f"{name}.gguf", tmp_path / "g")
    torch.save({"x": torch.ones(1)}, tmp_path / "x.bin")
    (tmp_path / "x.bin").rename(tmp_path / f"{name}.bin")
    TorchZipSource({tmp_path / f"{name}.bin": None}).close()


def test_paths_that_the_system_refuses(tmp_path):
    src = write_opt(tmp_path / "src")
    assert "File name too long" in refusal(tmp_path / ("x" * 300), tmp_path / "dst")
    with pytest.raises(ConversionError, match="File name too long"):
        convert(src, tmp_path / ("x" * 300))
