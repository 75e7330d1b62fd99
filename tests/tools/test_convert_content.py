"""Every byte of a bundle is the checkpoint's, whatever format and dtype it came in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flashd.errors import ConversionError
from flashd.testing.tiny_checkpoints import (
    LLAMA_CONFIG,
    OPT_CONFIG,
    llama_shapes,
    narrowed,
    opt_shapes,
    random_tensors,
    write_hf,
    write_llama,
    write_opt,
)
from flashd.tools.convert import ConvertOptions, Progress, convert

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def rounded(values, dtype):
    """Values as a checkpoint in ``dtype`` holds them, by torch."""
    return torch.from_numpy(values).to(TORCH[dtype]).float().numpy()


def check_opt(made, tensors, prefix, dtype):
    resident = made.resident
    d = made.manifest.model.d_model
    for i in range(made.manifest.model.n_layers):
        base = f"{prefix}layers.{i}."
        up, down = made.parts(i)
        assert np.array_equal(up, rounded(tensors[f"{base}fc1.weight"], dtype))
        assert np.array_equal(down, rounded(tensors[f"{base}fc2.weight"].T, dtype))
        for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
            got = resident[f"layers.{i}.attn.{ours}.weight"]
            expected = narrowed(tensors[f"{base}self_attn.{theirs}.weight"], dtype)
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected)
            assert resident[f"layers.{i}.attn.{ours}.bias"].dtype == np.float32
        assert np.array_equal(resident[f"layers.{i}.ffn.up.bias"], rounded(tensors[f"{base}fc1.bias"], dtype))
        norm = tensors[f"{base}final_layer_norm.weight"]
        assert np.array_equal(resident[f"layers.{i}.ffn_norm.weight"], rounded(norm, dtype))
    position = narrowed(tensors[f"{prefix}embed_positions.weight"], dtype)
    assert np.array_equal(resident["position.weight"], position[2:])
    assert resident["final_norm.bias"].shape == (d,)


@pytest.mark.parametrize("prefix", ["model.decoder.", "decoder."])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("form", ["single", "sharded", "bin", "sharded-bin"])
def test_opt_formats(tmp_path, bundle, form, dtype, prefix):
    tensors = random_tensors(opt_shapes(OPT_CONFIG, prefix), seed=1)
    if form in ("single", "sharded"):
        src = write_hf(tmp_path / "src", OPT_CONFIG, tensors, dtype, shards=3 if form == "sharded" else 1)
    else:
        src = tmp_path / "src"
        src.mkdir()
        (src / "config.json").write_text(json.dumps(OPT_CONFIG))
        state = {name: torch.from_numpy(values).to(TORCH[dtype]) for name, values in tensors.items()}
        write_bins(src, state, 2 if form == "sharded-bin" else 1)
    convert(src, tmp_path / "dst")
    made = bundle(tmp_path / "dst")
    assert made.manifest.dtype == dtype
    assert made.manifest.provenance["source_format"] == ("pytorch" if "bin" in form else "safetensors")
    check_opt(made, tensors, prefix, dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def write_bins(src, state, shards):
    if shards == 1:
        torch.save(state, src / "pytorch_model.bin")
        return
    names, weight_map = list(state), {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        part = {name: state[name] for name in names[shard::shards]}
        torch.save(part, src / file)
        weight_map |= dict.fromkeys(part, file)
    (src / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
def test_dtype_conversion(tmp_path, bundle, source, target):
    tensors = random_tensors(llama_shapes(LLAMA_CONFIG), seed=2)
    write_hf(tmp_path / "src", LLAMA_CONFIG, tensors, source)
    convert(tmp_path / "src", tmp_path / "dst", ConvertOptions(dtype=target))
    made = bundle(tmp_path / "dst")
    assert made.manifest.dtype == made.manifest.ffn.dtype == target
    for i in range(made.manifest.model.n_layers):
        up, gate, down = made.parts(i)
        for part, name in ((up, "up"), (gate, "gate"), (down, "down")):
            held = rounded(tensors[f"model.layers.{i}.mlp.{name}_proj.weight"], source)
            assert np.array_equal(part, rounded(held.T if name == "down" else held, target))
    head = rounded(rounded(tensors["lm_head.weight"], source), target)
    assert np.array_equal(made.resident["head.weight"], narrowed(head, target))
    assert made.resident["final_norm.weight"].dtype == np.float32


@pytest.mark.parametrize("make", [write_opt, write_llama])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_zarr_holds_the_same_rows(tmp_path, bundle, make, dtype):
    src = make(tmp_path / "src", dtype=dtype)
    convert(src, tmp_path / "file", ConvertOptions(store="file"))
    convert(src, tmp_path / "zarr", ConvertOptions(store="zarr"))
    one, other = bundle(tmp_path / "file"), bundle(tmp_path / "zarr")
    assert np.array_equal(one.rows, other.rows)
    assert one.resident.keys() == other.resident.keys()
    assert (tmp_path / "file/ffn.sums").read_bytes() == (tmp_path / "zarr/ffn.sums").read_bytes()
    assert not (tmp_path / "zarr/ffn.bundle").exists()


def test_zarr_layout_can_be_read_in_place(tmp_path, bundle):
    """Inner chunks of whole rows lie back to back in each shard, without holes or codecs."""
    src = write_llama(tmp_path / "src", hidden_size=1024, intermediate_size=3000, num_hidden_layers=1)
    convert(src, tmp_path / "dst", ConvertOptions(store="zarr"))
    made, ffn = bundle(tmp_path / "dst"), bundle(tmp_path / "dst").manifest.ffn
    meta = json.loads((tmp_path / "dst/ffn.zarr/layers/0/zarr.json").read_text())
    assert meta["shape"] == [3000, ffn.stride_bytes]
    sharding = meta["codecs"][0]
    assert sharding["name"] == "sharding_indexed"
    assert sharding["configuration"]["codecs"] == [{"name": "bytes"}]
    rows = sharding["configuration"]["chunk_shape"][0]
    assert 128 << 10 < rows * ffn.stride_bytes <= 256 << 10
    shard_rows = meta["chunk_grid"]["configuration"]["chunk_shape"][0]
    assert shard_rows % rows == 0
    assert 16 << 20 < shard_rows * ffn.stride_bytes <= 64 << 20
    for shard in range(-(-3000 // shard_rows)):
        raw = np.fromfile(tmp_path / f"dst/ffn.zarr/layers/0/c/{shard}/0", np.uint8)
        part = made.rows[0][shard * shard_rows : (shard + 1) * shard_rows].reshape(-1)
        assert np.array_equal(raw[: part.size], part)
    group = json.loads((tmp_path / "dst/ffn.zarr/zarr.json").read_text())
    assert group["attributes"]["row"] == ["up", "gate", "down"]
    assert group["attributes"]["stride_bytes"] == ffn.stride_bytes


def test_rows_of_zeros_are_written_too(tmp_path, bundle):
    tensors = random_tensors(opt_shapes(OPT_CONFIG), seed=1)
    for name in tensors:
        if ".fc" in name:
            tensors[name][:] = 0
    src = write_hf(tmp_path / "src", OPT_CONFIG, tensors)
    convert(src, tmp_path / "dst", ConvertOptions(store="zarr"))
    made = bundle(tmp_path / "dst")
    assert not made.rows.any()
    assert (tmp_path / "dst/ffn.zarr/layers/0/c/0/0").stat().st_size >= made.rows[0].nbytes


def test_one_layer_in_many_blocks(tmp_path, bundle, monkeypatch):
    """Borders of blocks, pieces and tiles in the middle of a layer change nothing."""
    monkeypatch.setattr("flashd.tools.convert.ffn_file._BLOCK_BYTES", 5 * 512)
    monkeypatch.setattr("flashd.tools.convert.ffn._READ_BYTES", 700)
    monkeypatch.setattr("flashd.tools.convert.ffn._TILE_NEURONS", 3)
    monkeypatch.setattr("flashd.tools.convert.ffn._TILE_MODEL", 5)
    monkeypatch.setattr("flashd.tools.convert.resident._BLOCK_BYTES", 300)
    monkeypatch.setattr("flashd.tools.convert.cast.PIECE_BYTES", 100)
    tensors = random_tensors(opt_shapes(OPT_CONFIG), seed=3)
    src = write_hf(tmp_path / "src", OPT_CONFIG, tensors)
    convert(src, tmp_path / "dst", ConvertOptions(dtype="bf16"))
    check_opt_cast(bundle(tmp_path / "dst"), tensors)


def check_opt_cast(made, tensors):
    for i in range(made.manifest.model.n_layers):
        up, down = made.parts(i)
        assert np.array_equal(up, rounded(tensors[f"model.decoder.layers.{i}.fc1.weight"], "bf16"))
        assert np.array_equal(down, rounded(tensors[f"model.decoder.layers.{i}.fc2.weight"].T, "bf16"))
    embed = narrowed(tensors["model.decoder.embed_tokens.weight"], "bf16")
    assert np.array_equal(made.resident["embed.weight"], embed)


def test_resident_names_of_a_llama_with_every_bias(tmp_path, bundle):
    src = write_llama(tmp_path / "src", attention_bias=True, mlp_bias=True, num_hidden_layers=1)
    tensors = random_tensors(llama_shapes(json.loads((src / "config.json").read_text())), seed=0)
    convert(src, tmp_path / "dst")
    resident = bundle(tmp_path / "dst").resident
    layer = [f"attn.{part}.{kind}" for part in "qkvo" for kind in ("weight", "bias")]
    layer += ["attn_norm.weight", "ffn_norm.weight", "ffn.up.bias", "ffn.gate.bias", "ffn.down.bias"]
    top = ["embed.weight", "head.weight", "final_norm.weight", "rope.inv_freq"]
    assert set(resident) == {*top, *(f"layers.0.{name}" for name in layer)}
    for part in ("up", "gate", "down"):
        assert np.array_equal(
            resident[f"layers.0.ffn.{part}.bias"], tensors[f"model.layers.0.mlp.{part}_proj.bias"]
        )


def test_resident_names_of_opt_350m(tmp_path, bundle):
    changes = {"word_embed_proj_dim": 16, "do_layer_norm_before": False, "num_hidden_layers": 1}
    src = write_opt(tmp_path / "src", **changes)
    tensors = random_tensors(opt_shapes({**OPT_CONFIG, **changes}), seed=0)
    convert(src, tmp_path / "dst")
    made = bundle(tmp_path / "dst")
    assert {name for name in made.resident if not name.startswith("layers.")} == {
        "embed.weight", "position.weight", "project_in.weight", "project_out.weight",
    }  # fmt: skip
    assert np.array_equal(made.resident["project_in.weight"], tensors["model.decoder.project_in.weight"])
    assert made.resident["embed.weight"].shape == (300, 16)
    assert (made.manifest.model.norm_first, made.manifest.model.final_norm) == (False, False)


def test_same_input_same_bytes(tmp_path, bundle):
    src = write_llama(tmp_path / "src")
    first = convert(src, tmp_path / "one")
    assert first == convert(src, tmp_path / "two")


@pytest.mark.parametrize("worst", [65520.0, -1e6, np.inf])
def test_f16_overflow_names_tensor_and_remedy(tmp_path, worst):
    tensors = random_tensors(opt_shapes(OPT_CONFIG), seed=1)
    tensors["model.decoder.layers.1.fc2.weight"][3, 7] = worst
    src = write_hf(tmp_path / "src", OPT_CONFIG, tensors)
    with pytest.raises(ConversionError, match=r"layers\.1\.fc2\.weight.*--dtype bf16"):
        convert(src, tmp_path / "dst", ConvertOptions(dtype="f16"))
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_largest_f16_value_passes(tmp_path, bundle):
    tensors = random_tensors(opt_shapes(OPT_CONFIG), seed=1)
    tensors["model.decoder.layers.1.fc1.weight"][3, 7] = 65519.0
    src = write_hf(tmp_path / "src", OPT_CONFIG, tensors)
    convert(src, tmp_path / "dst", ConvertOptions(dtype="f16"))
    assert bundle(tmp_path / "dst").parts(1)[0][3, 7] == 65504.0


def test_mixed_dtypes_become_the_one_that_holds_all(tmp_path, bundle):
    from safetensors.torch import save_file

    src = write_llama(tmp_path / "src", dtype="f16")
    tensors = random_tensors(llama_shapes(LLAMA_CONFIG), seed=0)
    state = {name: torch.from_numpy(values).half() for name, values in tensors.items()}
    state["lm_head.weight"] = state["lm_head.weight"].bfloat16()
    save_file(state, src / "model.safetensors")
    assert convert(src, tmp_path / "dst").dtype == "f32"
    bundle(tmp_path / "dst")


@pytest.mark.parametrize("store", ["file", "zarr"])
def test_progress_counts_to_the_end(tmp_path, store):
    seen: list[Progress] = []
    src = write_opt(tmp_path / "src")
    manifest = convert(src, tmp_path / "dst", ConvertOptions(store=store), seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert {p.phase for p in seen} == {"resident", "ffn", "finish"}
    assert len({p.total_bytes for p in seen}) == 1
    assert seen[-1].phase == "finish"
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert 0.9 * seen[-1].total_bytes <= seen[-2].done_bytes
    if store == "file":
        assert seen[-1].total_bytes == sum(entry.size_bytes for entry in manifest.files)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"store": "tar"}])
def test_unknown_choices_list_the_known_ones(tmp_path, options):
    src = write_opt(tmp_path / "src")
    with pytest.raises(
        ConversionError, match=r"unknown (dtype 'int8'; known: auto, f32|store 'tar'; known: file, zarr)"
    ):
        convert(src, tmp_path / "dst", ConvertOptions(**options))


def test_source_beside_other_files_and_parents_are_made(tmp_path: Path, bundle):
    src = write_opt(tmp_path / "src")
    (src / "README.md").write_text("hello")
    convert(src, tmp_path / "deep/er/dst")
    bundle(tmp_path / "deep/er/dst")


def test_the_converter_needs_neither_torch_nor_zarr_nor_gguf(tmp_path, start_convert):
    src = write_opt(tmp_path / "src")
    process = start_convert(
        src,
        tmp_path / "dst",
        body="import atexit; atexit.register(lambda: print(\
        [name for name in ('torch', 'transformers', 'zarr', 'gguf', 'safetensors') if name in sys.modules]))",
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "[]\n", "")
