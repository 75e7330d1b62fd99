"""The model families that flashd runs: a checkpoint's configuration -> a plan of its tensors."""

from __future__ import annotations

from typing import Any

from flashd.errors import ConversionError
from flashd.models.families import llama, opt
from flashd.models.families.base import (
    CheckpointPlan,
    Config,
    Family,
    FFNNames,
    TensorRule,
    TensorShapes,
    shown,
)

FAMILIES: dict[str, Family] = {family.name: family for family in (opt.FAMILY, llama.FAMILY)}

__all__ = [
    "FAMILIES",
    "CheckpointPlan",
    "Config",
    "FFNNames",
    "Family",
    "TensorRule",
    "TensorShapes",
    "gguf_plan",
    "hf_plan",
    "shown",
]


def hf_plan(config: dict[str, Any], shapes: TensorShapes, where: str) -> CheckpointPlan:
    """Plan of a Hugging Face checkpoint.

    Args:
        config: parsed ``config.json``.
        shapes: the checkpoint's tensors.
        where: path of ``config.json``, for messages.

    Raises:
        ConversionError: an architecture or setting that flashd doesn't run.
    """
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        known = named in family.architectures if named else model_type in family.model_types
        if known:
            if config.get("quantization_config"):
                raise ConversionError(
                    f"{where}: a quantized checkpoint (quantization_config), expected f32, f16 or bf16 "
                    "weights; convert the unquantized model or a GGUF file"
                )
            return family.from_hf(Config(config, where), shapes)
    raise _unknown(where, named or model_type)


def gguf_plan(metadata: dict[str, Any], shapes: TensorShapes, where: str) -> CheckpointPlan:
    """Plan of a GGUF file; arguments and errors as for ``hf_plan``."""
    architecture = metadata.get("general.architecture")
    for family in FAMILIES.values():
        if architecture in family.gguf_architectures and family.from_gguf is not None:
            return family.from_gguf(Config(metadata, where), shapes)
    raise _unknown(where, architecture)


def _unknown(where: str, got: object) -> ConversionError:
    known = [name for family in FAMILIES.values() for name in family.architectures if "Model" not in name]
    gguf = [name for family in FAMILIES.values() for name in family.gguf_architectures]
    return ConversionError(
        f"{where}: unknown architecture {shown(got)}; flashd converts {', '.join(known)} and GGUF files of "
        f"architecture {', '.join(gguf)}"
    )
