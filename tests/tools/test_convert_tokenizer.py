"""Token ids are those of transformers; BOS, EOS and chat template come along."""

from __future__ import annotations

import json

import pytest
from convert_tokens import BOS, byte_bpe, check_equal, spec_and_tokenizer
from transformers import AutoTokenizer

from flashd.errors import ConversionError, TokenizerError
from flashd.testing.tiny_checkpoints import write_llama, write_opt, write_opt_tokenizer
from flashd.tools.convert import ConvertOptions, convert


def test_opt_from_vocab_and_merges(tmp_path):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    convert(src, tmp_path / "dst")
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert spec == {
        "bos_id": 2, "eos_ids": [2], "add_bos": True, "chat_template": None,
        "bos_token": "</s>", "eos_token": "</s>",
    }  # fmt: skip
    check_equal(ours, AutoTokenizer.from_pretrained(src), spec)
    assert "hello" in ours.encode("hello").tokens


def test_opt_without_tokenizer_config_still_adds_bos(tmp_path):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    (src / "tokenizer_config.json").unlink()
    convert(src, tmp_path / "dst")
    spec, _ = spec_and_tokenizer(tmp_path / "dst")
    assert (spec["add_bos"], spec["bos_id"], spec["bos_token"]) == (True, 2, "</s>")


def test_opt_that_does_not_want_bos(tmp_path):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    settings = json.loads((src / "tokenizer_config.json").read_text())
    (src / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": False}))
    convert(src, tmp_path / "dst")
    assert spec_and_tokenizer(tmp_path / "dst")[0]["add_bos"] is False


def test_added_tokens_and_special_tokens_map(tmp_path):
    src = write_opt(tmp_path / "src")
    write_opt_tokenizer(src)
    (src / "tokenizer_config.json").write_text("{}")
    (src / "added_tokens.json").write_text(json.dumps({"<tool>": 267, "<extra>": 266}))
    (src / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<extra>"}, "bos_token": "</s>"})
    )
    convert(src, tmp_path / "dst")
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert ours.encode("a<tool><extra>", add_special_tokens=False).ids[1:] == [267, 266]
    assert ours.decode([267, 266], skip_special_tokens=True) == "<tool>"
    assert spec["eos_ids"] == [2, 266]


@pytest.mark.parametrize(
    ("post", "settings", "add_bos"),
    [
        (None, {}, False),
        (BOS, {}, True),
        # With a tokenizer.json its post-processor decides, as in transformers 5.
        (None, {"add_bos_token": True}, False),
        (BOS, {"add_bos_token": False}, True),
    ],
)
def test_bos_is_added_once_or_not_at_all(tmp_path, post, settings, add_bos):
    src = write_llama(tmp_path / "src", bos_token_id=0)
    byte_bpe(post).save(str(src / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        **settings,
    }
    (src / "tokenizer_config.json").write_text(json.dumps(config))
    convert(src, tmp_path / "dst")
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert spec["add_bos"] is add_bos
    check_equal(ours, AutoTokenizer.from_pretrained(src), spec)


def test_truncation_and_padding_of_training_are_dropped(tmp_path):
    src = write_llama(tmp_path / "src")
    tokenizer = byte_bpe()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(src / "tokenizer.json"))
    convert(src, tmp_path / "dst")
    _, ours = spec_and_tokenizer(tmp_path / "dst")
    assert len(ours.encode("a" * 20).ids) == 20
    assert len(ours.encode("a").ids) == 1


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 8}, [7, 8, 2]),
        ({}, {"eos_token_id": [5, 6]}, [5, 6, 2]),
        ({"eos_token_id": 7}, {"eos_token_id": None}, [7, 2]),
    ],
)
def test_all_ends_of_text_count(tmp_path, generation, config, expected):
    src = write_llama(tmp_path / "src", **config)
    byte_bpe().save(str(src / "tokenizer.json"))
    (src / "generation_config.json").write_text(json.dumps(generation))
    (src / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    convert(src, tmp_path / "dst")
    spec, _ = spec_and_tokenizer(tmp_path / "dst")
    assert spec["eos_ids"] == expected
    assert spec["eos_token"] == "</s>"


@pytest.mark.parametrize(
    ("settings", "jinja", "expected"),
    [
        ({"chat_template": "{{ a }}"}, None, "{{ a }}"),
        ({"chat_template": "{{ a }}"}, "{{ ü }}", "{{ ü }}"),
        (
            {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]},
            None,
            "d",
        ),
        ({}, None, None),
    ],
)
def test_chat_template(tmp_path, settings, jinja, expected):
    src = write_llama(tmp_path / "src")
    byte_bpe().save(str(src / "tokenizer.json"))
    (src / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (src / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    convert(src, tmp_path / "dst")
    assert spec_and_tokenizer(tmp_path / "dst")[0]["chat_template"] == expected


def test_no_tokenizer_keeps_the_ids(tmp_path):
    src = write_llama(tmp_path / "one")
    spec = convert(src, tmp_path / "dst").tokenizer
    assert spec is not None
    assert (spec.bos_id, spec.eos_ids, spec.add_bos) == (1, (2,), False)
    assert not (tmp_path / "dst/tokenizer.json").exists()
    src = write_llama(tmp_path / "two", bos_token_id=None, eos_token_id=None)
    assert convert(src, tmp_path / "none").tokenizer is None


def test_sentencepiece_model_alone_is_refused_with_remedies(tmp_path):
    src = write_llama(tmp_path / "src")
    (src / "tokenizer.model").write_bytes(b"\x0a\x0b")
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.model: a SentencePiece model.*save_pretrained.*--tokenizer"
    ):
        convert(src, tmp_path / "dst")
    byte_bpe(BOS).save(str(tmp_path / "other.json"))
    convert(src, tmp_path / "dst", ConvertOptions(tokenizer=tmp_path / "other.json"))
    spec, ours = spec_and_tokenizer(tmp_path / "dst")
    assert ours.encode("a", add_special_tokens=False).tokens == ["a"]
    assert spec["eos_ids"] == [2]


def test_given_tokenizer_as_directory_with_its_settings(tmp_path):
    src = write_llama(tmp_path / "src")
    other = tmp_path / "other"
    other.mkdir()
    byte_bpe(BOS).save(str(other / "tokenizer.json"))
    (other / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>"}))
    convert(src, tmp_path / "dst", ConvertOptions(tokenizer=other))
    spec, _ = spec_and_tokenizer(tmp_path / "dst")
    assert (spec["add_bos"], spec["bos_id"]) == (True, 0)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}', "\x00"])
def test_unusable_tokenizer_json(tmp_path, content):
    src = write_llama(tmp_path / "src")
    (src / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a usable tokenizer") as caught:
        convert(src, tmp_path / "dst")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_given_tokenizer_that_is_not_there(tmp_path):
    src = write_llama(tmp_path / "src")
    with pytest.raises(TokenizerError, match="nope: no such file; give a tokenizer with --tokenizer"):
        convert(src, tmp_path / "dst", ConvertOptions(tokenizer=tmp_path / "nope"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match=r"empty: holds no tokenizer\.json"):
        convert(src, tmp_path / "dst", ConvertOptions(tokenizer=tmp_path / "empty"))


def test_corrupt_side_file(tmp_path):
    src = write_llama(tmp_path / "src")
    byte_bpe().save(str(src / "tokenizer.json"))
    (src / "generation_config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"generation_config\.json: not valid JSON"):
        convert(src, tmp_path / "dst")
