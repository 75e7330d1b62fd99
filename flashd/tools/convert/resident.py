"""``resident.safetensors``: everything but the FFN matrices, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from flashd.errors import ConversionError
from flashd.layout.manifest import RESIDENT
from flashd.layout.safetensors_header import TensorEntry, build_header
from flashd.models.families import CheckpointPlan, TensorRule
from flashd.tools.convert.background import BackgroundWriter
from flashd.tools.convert.cast import cast_into
from flashd.tools.convert.files import HashedFile
from flashd.tools.convert.sources.base import TensorInfo, TensorSource
from flashd.types import NUMPY_DTYPE, SAFETENSORS_DTYPE, DType

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class ResidentLayout:
    """The file's header and where every tensor will lie."""

    header: bytes
    entries: dict[str, TensorEntry]

    @property
    def total_bytes(self) -> int:
        """Size of the finished file."""
        return max((entry.end_byte for entry in self.entries.values()), default=len(self.header))


def resident_layout(plan: CheckpointPlan, dtype: DType) -> ResidentLayout:
    """Lay out the resident tensors in the order of the rules."""
    shapes = {
        rule.name: (SAFETENSORS_DTYPE[stored_dtype(rule, dtype)], rule.out_shape) for rule in plan.rules
    }
    return ResidentLayout(*build_header(shapes))


def stored_dtype(rule: TensorRule, dtype: DType) -> DType:
    """Matrices take the bundle's dtype; vectors are small and matter: float32."""
    return dtype if rule.kind == "matrix" else "f32"


def source_name(rule: TensorRule, source: TensorSource, where: Path) -> str:
    """The name under which the checkpoint has this tensor.

    Raises:
        ConversionError: it has it under none, or in another shape.
    """
    for name in rule.sources:
        if name in source.tensors:
            check_tensor(source.tensors[name], name, rule.shape)
            return name
    raise missing_tensor(rule.sources[0], where)


def missing_tensor(name: str, where: Path) -> ConversionError:
    """The error for a tensor that the configuration promises."""
    return ConversionError(
        f"{where}: no tensor {name!r}, which the model's configuration asks for; download the model again"
    )


def check_tensor(info: TensorInfo, name: str, shape: tuple[int, ...]) -> None:
    """Shape and readability of a source tensor.

    Raises:
        ConversionError: with what was got and expected.
    """
    if info.shape != shape:
        raise ConversionError(
            f"{info.file}: tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}; weights and "
            "configuration do not belong together: download the model again"
        )
    if info.dtype is None:
        raise ConversionError(
            f"{info.file}: tensor {name!r} is stored as {info.stored}, which flashd cannot read; get the "
            "model as f32, f16 or bf16, or as a GGUF file of a type that the gguf package expands"
        )


class ResidentWriter:
    """Writes the tensors from ``first`` on behind what is already in the file.

    Args:
        file: ``resident.safetensors``, holding the header and ``first`` whole tensors.
        background: runs the writes.
        on_tensor: called in the background, after each tensor, with the tensors done so far.
    """

    def __init__(
        self, file: HashedFile, background: BackgroundWriter, on_tensor: Callable[[int, bool], None]
    ) -> None:
        self._file = file
        self._background = background
        self._on_tensor = on_tensor

    def write(
        self, plan: CheckpointPlan, source: TensorSource, where: Path, dtype: DType, first: int
    ) -> None:
        """Write all tensors from index ``first`` on."""
        for index, rule in enumerate(plan.rules[first:], first):
            target = stored_dtype(rule, dtype)
            if rule.values is not None:
                self._submit_values(rule, target)
            else:
                self._stream(rule, source, source_name(rule, source, where), target)
            done = index + 1
            self._background.submit(0, self._on_tensor, done, done == len(plan.rules))

    def _submit_values(self, rule: TensorRule, target: DType) -> None:
        assert rule.values is not None
        out = np.empty(rule.out_shape, NUMPY_DTYPE[target])
        cast_into(out, rule.values, "f32", target, rule.name)
        self._background.submit(out.nbytes, self._file.write, out.reshape(-1).view(np.uint8))

    def _stream(self, rule: TensorRule, source: TensorSource, name: str, target: DType) -> None:
        info = source.tensors[name]
        assert info.dtype is not None
        row_bytes = prod(rule.shape[1:]) * NUMPY_DTYPE[target].itemsize
        rows = max(1, _BLOCK_BYTES // row_bytes // rule.block_rows) * rule.block_rows
        for start in range(rule.skip_rows, rule.shape[0], rows):
            stop = min(start + rows, rule.shape[0])
            block = source.read_rows(name, start, stop)
            if rule.transform is not None:
                block = rule.transform(block)
                transformed: DType = info.dtype if block.dtype == NUMPY_DTYPE[info.dtype] else "f32"
            else:
                transformed = info.dtype
            raw = self._background.buffer(block.shape[0] * row_bytes)
            cast_into(raw.view(NUMPY_DTYPE[target]).reshape(block.shape), block, transformed, target, name)
            self._background.submit(raw.size, self._file.write, raw)


def resident_path(root: Path) -> Path:
    """Where the file lies in a bundle."""
    return root / RESIDENT
