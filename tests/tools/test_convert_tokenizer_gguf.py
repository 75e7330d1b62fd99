"""Tokenizers out of GGUF files: the ids of transformers, or of the model where that is known to err."""

from __future__ import annotations

import json

import pytest
from convert_tokens import TEXTS, byte_bpe, check_equal, spec_and_tokenizer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from flashd.errors import TokenizerError
from flashd.testing.tiny_checkpoints import LLAMA_CONFIG, byte_vocabulary, llama_shapes, random_tensors
from flashd.testing.tiny_gguf import write_gguf_llama
from flashd.tools.convert import ConvertOptions, convert


@pytest.mark.slow
def test_demo_model_equals_transformers(hf_smollm2_tokenizer, smollm2):
    reference = hf_smollm2_tokenizer
    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    chat = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris, since 987."},
        {"role": "user", "content": "And 3 more?"},
    ]
    rendered = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for text in [*TEXTS, rendered]:
        assert ours.encode(text, add_special_tokens=False).ids == reference(text).input_ids, text
    ids = ours.encode(rendered, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == rendered
    assert ours.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
    spec = json.loads((smollm2 / "manifest.json").read_text())["tokenizer"]
    assert spec["chat_template"] == reference.chat_template
    assert (spec["bos_token"], spec["bos_id"]) == ("<|im_start|>", 1)
    assert (spec["eos_token"], spec["eos_ids"]) == ("<|im_end|>", [2])
    assert spec["add_bos"] is False


def test_digits_are_cut_as_the_model_was_trained(smollm2):
    """SmolLM cuts every digit off first (llama.cpp's pre-tokenizer ``smollm``). transformers' GGUF
    reader doesn't know it; the difference shows only in white space before a digit."""
    ours = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert ours.encode("a  12", add_special_tokens=False).tokens == ["a", "ĠĠ", "1", "2"]
    assert ours.encode("\n\n1", add_special_tokens=False).tokens == ["ĊĊ", "1"]


CONFIG = {**LLAMA_CONFIG, "num_hidden_layers": 1}


def gguf(path, metadata):
    tensors = random_tensors(llama_shapes(CONFIG), seed=1)
    return write_gguf_llama(path, CONFIG, tensors, metadata=metadata)


def sentencepiece_metadata(**changes):
    """A vocabulary as SentencePiece trains it: specials, bytes, characters and merged pieces."""
    pieces = [
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "ll",
        "hell",
        "hello",
        "▁▁",
    ]
    letters = list("▁etaoinshrdlucmfwypvbgkqjxzETAOINSHRLDL0123456789.,!?'")
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        *dict.fromkeys(letters),
    ]
    tokens.append("<tool>")
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260) + [4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def test_sentencepiece_gguf_equals_transformers(tmp_path):
    src = gguf(tmp_path / "m.gguf", sentencepiece_metadata())
    convert(src, tmp_path / "dst")
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert spec["add_bos"] is True
    check_equal(ours, AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"), spec)
    ids = ours.encode("the world hello<tool>é", add_special_tokens=False).ids
    assert ours.decode(ids) == "the world hello<tool>é"
    assert "<tool>" in ours.encode("a<tool>").tokens


def test_sentencepiece_without_prefix_space_and_bos(tmp_path):
    changes = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    convert(gguf(tmp_path / "m.gguf", sentencepiece_metadata(**changes)), tmp_path / "dst")
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert spec["add_bos"] is False
    assert ours.encode("hello").tokens == ["hello"]


def bpe_metadata(pre, **changes):
    vocab = [*byte_vocabulary(), "Ġ1", "12", "123", "'s", "ĠĠ", "ĊĊ", "<|eot_id|>", "<think>"]
    types = [3] * 4 + [1] * 262 + [3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["Ġ 1", "1 2", "12 3", "' s", "Ġ Ġ", "Ċ Ċ"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_gguf_equals_transformers(tmp_path, pre):
    src = gguf(tmp_path / "m.gguf", bpe_metadata(pre, **{"tokenizer.ggml.add_bos_token": False}))
    convert(src, tmp_path / "dst")
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    check_equal(ours, AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"), spec)
    assert ours.encode("<think>a<|eot_id|>").tokens == ["<think>", "a", "<|eot_id|>"]
    assert ours.decode(ours.encode("<think>a<|eot_id|>").ids) == "<think>a"


def test_pre_tokenizers_differ_where_they_should(tmp_path):
    tokens = {}
    for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm"):
        convert(gguf(tmp_path / f"{pre}.gguf", bpe_metadata(pre)), tmp_path / pre)
        tokens[pre] = spec_and_tokenizer(tmp_path / pre)[1].encode("x 1234", add_special_tokens=False).tokens
    assert tokens == {
        "gpt-2": ["x", "Ġ1", "2", "3", "4"],
        "llama-bpe": ["x", "Ġ", "123", "4"],
        "qwen2": ["x", "Ġ", "1", "2", "3", "4"],
        "smollm": ["x", "Ġ", "1", "2", "3", "4"],
    }


@pytest.mark.parametrize(("pre", "add_bos"), [("llama-bpe", True), ("gpt-2", False)])
def test_bos_where_older_files_do_not_say(tmp_path, pre, add_bos):
    changes = {"tokenizer.ggml.eot_token_id": 266, "tokenizer.chat_template": "{{ messages }}"}
    spec = convert(gguf(tmp_path / "m.gguf", bpe_metadata(pre, **changes)), tmp_path / "dst").tokenizer
    assert spec is not None
    assert spec.add_bos is add_bos
    assert spec.eos_ids == (2, 266)
    assert spec.chat_template == "{{ messages }}"
    assert (spec.bos_token, spec.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"tokenizer.ggml.pre": "deepseek-llm"},
            r"pre-tokenizer 'deepseek-llm', expected one of default, gpt-2",
        ),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer 'rwkv', expected gpt2 or llama"),
        ({"tokenizer.ggml.merges": ["nosuch pair"]}, "not a usable tokenizer"),
    ],
)
def test_unknown_gguf_tokenizers_have_a_remedy(tmp_path, changes, match):
    src = gguf(tmp_path / "m.gguf", bpe_metadata("gpt-2", **changes))
    with pytest.raises(TokenizerError, match=match):
        convert(src, tmp_path / "dst")
    byte_bpe().save(str(tmp_path / "tokenizer.json"))
    convert(src, tmp_path / "dst", ConvertOptions(tokenizer=tmp_path / "tokenizer.json"))
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert spec["bos_id"] == 0
    assert ours.encode("a").tokens == ["a"]


def test_gguf_without_tokenizer(tmp_path):
    assert convert(gguf(tmp_path / "m.gguf", {}), tmp_path / "dst").tokenizer is None
