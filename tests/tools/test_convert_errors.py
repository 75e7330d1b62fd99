"""What cannot be converted: one line that names the file and the remedy, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

from flashd.errors import ConversionError, OutOfSpaceError
from flashd.layout.safetensors_header import build_header
from flashd.testing.tiny_checkpoints import (
    OPT_CONFIG,
    opt_shapes,
    random_tensors,
    write_hf,
    write_llama,
    write_opt,
    write_safetensors,
)
from flashd.tools.convert import ConvertOptions, convert


@pytest.fixture
def refused(tmp_path):
    """``refused(src, match)``: the conversion fails with one line, leaving nothing."""

    def check(src, match, error=ConversionError, **options):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(error, match=match) as caught:
            convert(src, tmp_path / "dst", ConvertOptions(**options))
        assert "\n" not in str(caught.value)
        assert sorted(tmp_path.iterdir()) == before

    return check


@pytest.fixture
def sharded(tmp_path):
    return write_opt(tmp_path / "src", shards=3)


def test_missing_shard(sharded, refused):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(
        sharded, r"model-00002-of-00003\.safetensors: missing, but model\.safetensors\.index\.json names it"
    )


@pytest.mark.parametrize(
    "name", ["model-00004-of-00004.safetensors", "model.safetensors", "model-old.safetensors"]
)
def test_a_shard_that_the_index_does_not_name(sharded, refused, name):
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / name)
    refused(sharded, rf"{name}: model\.safetensors\.index\.json doesn't name this file; remove it")


def test_index_names_a_tensor_that_the_shard_lacks(sharded, refused):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.decoder.extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    refused(
        sharded, r"model-00001-of-00003\.safetensors: no tensor 'model\.decoder\.extra'.*download them again"
    )


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b", 7])
def test_index_with_a_path_for_a_name(sharded, refused, name):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    refused(sharded, "no file name; download it again")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_index_without_a_map(sharded, refused, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, r"index\.json: no weight_map")


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"x"', "\x00\x01", '{"a": ' + "[" * 5000])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_corrupt_json(sharded, refused, name, content):
    (sharded / name).write_text(content)
    refused(sharded, rf"{name}: (not valid JSON|a JSON \w+, expected an object).*download it again")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -1000])
def test_truncated_safetensors(tmp_path, refused, keep):
    src = write_opt(tmp_path / "src")
    path = src / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    refused(src, r"model\.safetensors: .*(truncated|too short)")


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[]",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}',
        b'{"x": {"shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_corrupt_safetensors_header(tmp_path, refused, header):
    src = write_opt(tmp_path / "src")
    (src / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refused(src, r"model\.safetensors: .*download")


def test_file_that_shrinks_while_it_is_read(tmp_path):
    src = write_opt(tmp_path / "src")
    path = src / "model.safetensors"

    def cut(_):
        os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(ConversionError, match=r"model\.safetensors: truncated, ends at byte \d+, expected"):
        convert(src, tmp_path / "dst", ConvertOptions(), cut)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.decoder.embed_tokens.weight", (299, 32)),
        ("model.decoder.embed_positions.weight", (48, 32)),
        ("model.decoder.layers.1.fc1.weight", (32, 72)),
        ("model.decoder.layers.2.fc2.weight", (72, 32)),
        ("model.decoder.layers.0.self_attn.q_proj.bias", (31,)),
        ("model.decoder.final_layer_norm.weight", (32, 1)),
    ],
)
def test_wrong_shape(tmp_path, refused, name, shape):
    tensors = random_tensors(opt_shapes(OPT_CONFIG), 0)
    expected = list(tensors[name].shape)
    tensors[name] = np.zeros(shape, np.float32)
    src = write_hf(tmp_path / "src", OPT_CONFIG, tensors)
    got, wanted = (str(list(x)).replace("[", r"\[").replace("]", r"\]") for x in (shape, expected))
    refused(src, rf"model\.safetensors: tensor '{name}' has shape {got}, expected {wanted}")


@pytest.mark.parametrize(
    "name",
    [
        "model.decoder.embed_tokens.weight",
        "model.decoder.layers.1.fc1.weight",
        "model.decoder.layers.2.fc2.weight",
        "model.decoder.layers.0.self_attn.out_proj.bias",
        "model.decoder.final_layer_norm.bias",
    ],
)
def test_missing_tensor(tmp_path, refused, name):
    tensors = random_tensors(opt_shapes(OPT_CONFIG), 0)
    del tensors[name]
    src = write_hf(tmp_path / "src", OPT_CONFIG, tensors)
    refused(src, f"src: no tensor '{name}', which the model's configuration asks for")


def test_untied_model_without_its_head(tmp_path, refused):
    src = write_llama(tmp_path / "src", tie_word_embeddings=True)
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    refused(src, r"no tensor 'lm_head\.weight'")


def test_tied_model_that_kept_only_the_head(tmp_path, bundle):
    tensors = random_tensors(opt_shapes(OPT_CONFIG), 0)
    shared = tensors.pop("model.decoder.embed_tokens.weight")
    src = write_hf(tmp_path / "src", OPT_CONFIG, {**tensors, "lm_head.weight": shared})
    convert(src, tmp_path / "dst")
    resident = bundle(tmp_path / "dst").resident
    assert np.array_equal(resident["embed.weight"], shared)
    assert "head.weight" not in resident


def test_dtype_that_is_no_weight(tmp_path, refused):
    src = write_opt(tmp_path / "src")
    tensors = random_tensors(opt_shapes(OPT_CONFIG), 0)
    shapes = {name: ("F32", values.shape) for name, values in tensors.items()}
    shapes["model.decoder.layers.0.fc1.weight"] = ("I32", (72, 32))
    header, entries = build_header(shapes)
    size = max(entry.end_byte for entry in entries.values())
    (src / "model.safetensors").write_bytes(header + bytes(size - len(header)))
    refused(
        src, r"tensor 'model\.decoder\.layers\.0\.fc1\.weight' is stored as I32, which flashd cannot read"
    )


def test_unknown_architecture(tmp_path, refused):
    src = write_opt(tmp_path / "src", architectures=["GPT2LMHeadModel"])
    refused(src, r"config\.json: unknown architecture 'GPT2LMHeadModel'; flashd converts OPTForCausalLM")


def test_no_such_path(tmp_path, refused):
    refused(
        tmp_path / "nowhere", "nowhere: no such file or directory; give a model directory or a .gguf file"
    )


def test_not_a_model_directory(tmp_path, refused):
    (tmp_path / "src").mkdir()
    refused(tmp_path / "src", "src: not a model directory, expected config.json")
    (tmp_path / "src/config.json").write_text("{}")
    refused(tmp_path / "src", "has config.json but no weights")
    write_safetensors(tmp_path / "src/adapter_model.safetensors", {"x": np.zeros(3, np.float32)})
    (tmp_path / "src/config.json").write_text(json.dumps(OPT_CONFIG))
    refused(tmp_path / "src", "src: no model.safetensors, pytorch_model.bin or index of either")


def test_a_file_that_is_no_gguf(tmp_path, refused):
    src = write_opt(tmp_path / "src")
    refused(src / "model.safetensors", r"model\.safetensors: not a GGUF file; give a \.gguf file or")


@pytest.mark.parametrize("store", ["file", "zarr"])
def test_not_enough_space_is_said_before_anything_is_written(tmp_path, refused, store):
    """A sparse file makes a checkpoint larger than the disk."""
    status = os.statvfs(tmp_path)
    rows = (status.f_bavail * status.f_frsize + (1 << 30)) // (32 * 4)
    config = {**OPT_CONFIG, "vocab_size": rows}
    header, entries = build_header({name: ("F32", shape) for name, shape in opt_shapes(config)})
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(config))
    with (src / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(max(entry.end_byte for entry in entries.values()))
    refused(
        src,
        r"dst: needs [\d.]+ GB more, the disk has [\d.]+ GB free; free some",
        OutOfSpaceError,
        store=store,
    )


def test_destination_that_cannot_be_made(tmp_path):
    src = write_opt(tmp_path / "src")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConversionError, match=r"cannot write .*file"):
        convert(src, tmp_path / "file/dst")


def test_destination_named_partial(tmp_path):
    src = write_opt(tmp_path / "src")
    with pytest.raises(ConversionError, match=r"names that end in \.partial"):
        convert(src, tmp_path / "x.partial")
