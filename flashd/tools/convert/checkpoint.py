"""Finding out what a source path holds: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashd.errors import ConversionError
from flashd.models.families import CheckpointPlan, gguf_plan, hf_plan, shown
from flashd.tools.convert.resident import check_tensor, missing_tensor, source_name
from flashd.tools.convert.side_files import read_json
from flashd.tools.convert.sources.base import TensorSource
from flashd.tools.convert.sources.safetensors import SafetensorsSource
from flashd.tools.convert.sources.torch_zip import TorchZipSource
from flashd.types import DType

# In the order in which transformers looks for them; an index outranks a single file beside it.
_WEIGHTS: tuple[tuple[str, str, type[SafetensorsSource] | type[TorchZipSource]], ...] = (
    ("model", "safetensors", SafetensorsSource),
    ("pytorch_model", "bin", TorchZipSource),
)
_FILE_NAME = re.compile(r"[^/\\\x00-\x1f]{1,200}")
_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """An opened source.

    Attributes:
        where: the file or directory, for messages.
        source: its tensors.
        plan: what the model's family makes of them.
        config: ``config.json``, or a GGUF file's metadata.
        side_files: other files that the bundle depends on.
    """

    where: Path
    source: TensorSource
    plan: CheckpointPlan
    config: dict[str, Any]
    side_files: tuple[Path, ...]

    @property
    def is_gguf(self) -> bool:
        """Whether ``config`` is GGUF metadata."""
        return self.source.format == "gguf"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open and check a checkpoint: every tensor that the bundle needs is there, in its shape.

    Raises:
        ConversionError: naming the file and what to do.
    """
    if not path.exists():
        raise ConversionError(f"{path}: no such file or directory; give a model directory or a .gguf file")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConversionError(f"{path}: not a GGUF file; give a .gguf file or the model's directory")
        return _open_gguf(path)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")) | any(path.glob("*.bin*")):
        return _open_hf(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        raise ConversionError(f"{path}: holds {len(ggufs)} GGUF files; give one of them, e.g. {ggufs[0]}")
    if (path / "config.json").is_file():
        raise ConversionError(
            f"{path}: has config.json but no weights, expected model.safetensors or pytorch_model.bin; "
            "download the model again"
        )
    raise ConversionError(
        f"{path}: not a model directory, expected config.json with model.safetensors or pytorch_model.bin, "
        "or one .gguf file"
    )


def bundle_dtype(checkpoint: Checkpoint) -> DType:
    """The narrowest dtype that holds all matrices exactly; f16 where they were quantised."""
    plan, source = checkpoint.plan, checkpoint.source
    names = [source_name(rule, source, checkpoint.where) for rule in plan.rules if rule.kind == "matrix"]
    names += [name for ffn in plan.ffn for name in (ffn.up, ffn.gate, ffn.down) if name is not None]
    infos = [source.tensors[name] for name in names]
    if any(info.quantized for info in infos):
        return "f16"
    found = {info.dtype for info in infos if info.dtype is not None}
    return found.pop() if len(found) == 1 else "f32"


def _open_gguf(path: Path) -> Checkpoint:
    from flashd.tools.convert.sources.gguf_file import GGUFSource

    source = GGUFSource(path)
    return _planned(path, source, source.metadata, gguf_plan, ())


def _open_hf(path: Path) -> Checkpoint:
    config_path = path / "config.json"
    config = read_json(config_path)
    hf_plan(config, {}, str(config_path))  # an unknown architecture is said before weights are opened
    side_files = tuple(path / name for name in _SIDE_FILES if (path / name).is_file())
    for stem, suffix, source_type in _WEIGHTS:
        index = path / f"{stem}.{suffix}.index.json"
        single = path / f"{stem}.{suffix}"
        if index.is_file():
            source = source_type(_indexed_shards(index, stem, suffix))
            return _planned(path, source, config, hf_plan, (*side_files, index), config_path)
        if single.is_file():
            return _planned(path, source_type({single: None}), config, hf_plan, side_files, config_path)
    raise ConversionError(
        f"{path}: no model.safetensors, pytorch_model.bin or index of either; download the model again"
    )


def _indexed_shards(index: Path, stem: str, suffix: str) -> dict[Path, set[str] | None]:
    """Shard -> its tensors, by the index; every shard is there and none is there unnamed."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index}: no weight_map; download it again")
    shards: dict[Path, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name in (".", ".."):
            raise ConversionError(
                f"{index}: {shown(tensor)} is in {shown(name)}, which is no file name; download it again"
            )
        names = shards.setdefault(index.parent / name, set())
        assert names is not None
        names.add(tensor)
    for shard in shards:
        if not shard.is_file():
            raise ConversionError(f"{shard}: missing, but {index.name} names it; download this shard")
    for extra in sorted(index.parent.glob(f"{stem}*.{suffix}")):
        if extra not in shards:
            raise ConversionError(
                f"{extra}: {index.name} doesn't name this file; remove it if it is left over, or download "
                "the index again"
            )
    return shards


def _planned(
    path: Path,
    source: TensorSource,
    config: dict[str, Any],
    make_plan: Any,
    side_files: tuple[Path, ...],
    config_path: Path | None = None,
) -> Checkpoint:
    try:
        shapes = {name: info.shape for name, info in source.tensors.items()}
        plan: CheckpointPlan = make_plan(config, shapes, str(config_path or path))
        for rule in plan.rules:
            if rule.values is None:
                source_name(rule, source, path)
        _check_ffn(plan, source, path)
        return Checkpoint(path, source, plan, config, side_files)
    except BaseException:
        source.close()
        raise


def _check_ffn(plan: CheckpointPlan, source: TensorSource, where: Path) -> None:
    d, n = plan.spec.d_model, plan.spec.d_ffn
    for names in plan.ffn:
        for name, shape in ((names.up, (n, d)), (names.gate, (n, d)), (names.down, (d, n))):
            if name is None:
                continue
            if name not in source.tensors:
                raise missing_tensor(name, where)
            check_tensor(source.tensors[name], name, shape)
