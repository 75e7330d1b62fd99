"""A pickle reader for torch checkpoints that can make tensors' descriptions and nothing else.

A pickle is a program that may call anything it can import. Here every import is answered from a
closed list: ``OrderedDict``, storage types, dtypes and torch's tensor-rebuilding functions, the
latter replaced by ours, which only note down shape, stride and offset.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from flashd.errors import ConversionError, UnsafePickleError

# torch storage class, or torch dtype -> our name of the dtype, bytes per element.
_STORAGES: dict[str, tuple[str, int]] = {
    "FloatStorage": ("f32", 4),
    "HalfStorage": ("f16", 2),
    "BFloat16Storage": ("bf16", 2),
    "DoubleStorage": ("f64", 8),
    "LongStorage": ("i64", 8),
    "IntStorage": ("i32", 4),
    "ShortStorage": ("i16", 2),
    "CharStorage": ("i8", 1),
    "ByteStorage": ("u8", 1),
    "BoolStorage": ("bool", 1),
    "UntypedStorage": ("bytes", 1),
}
_DTYPES: dict[str, tuple[str, int]] = {
    "float32": ("f32", 4),
    "float16": ("f16", 2),
    "bfloat16": ("bf16", 2),
    "float64": ("f64", 8),
    "int64": ("i64", 8),
    "int32": ("i32", 4),
    "int16": ("i16", 2),
    "int8": ("i8", 1),
    "uint8": ("u8", 1),
    "bool": ("bool", 1),
}


@dataclass(frozen=True, slots=True)
class ElementType:
    """A dtype as the checkpoint names it."""

    name: str
    item_bytes: int


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A block of elements, by its key in the zip archive."""

    key: str
    element: ElementType


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A view into a storage; offset and strides in elements."""

    storage: PickledStorage
    element: ElementType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Rebuild:
    """Stands for a torch function. Without slots or a ``__dict__``, a pickle cannot alter it."""

    __slots__ = ("_name",)
    _name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError(f"the pickle tries to set {name!r} of a function; nothing of it was executed")

    def __call__(self, *args: Any) -> PickledTensor:
        if self._name.startswith("_rebuild_parameter"):
            if not args or not isinstance(args[0], PickledTensor):
                raise ValueError(f"{self._name} without a tensor")
            return args[0]
        storage, offset, shape, stride = args[:4]
        element = args[6] if self._name == "_rebuild_tensor_v3" else storage.element
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, PickledStorage) or not isinstance(element, ElementType):
            raise ValueError(f"{self._name} without a storage")
        if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise ValueError(f"{self._name} with shape {shape!r}, stride {stride!r}, offset {offset!r}")
        return PickledTensor(storage, element, offset, tuple(shape), tuple(stride))


_REBUILD = frozenset(
    {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state"}
)


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str, /) -> Any:
        """Answer an import from the closed list."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in _REBUILD:
            return _Rebuild(name)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return ElementType(*_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return ElementType(*_DTYPES[name])
        raise UnsafePickleError(
            f"{self._where}: the pickle asks for {module}.{name}, expected only tensors; nothing of it was "
            "executed: get the model as safetensors, or re-save only its state_dict"
        )

    def persistent_load(self, pid: Any, /) -> PickledStorage:
        """A reference to a storage in the archive."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise ValueError(f"persistent id {pid!r}"[:120])
        _, element, key, _location, _elements = pid
        if not isinstance(element, ElementType) or not isinstance(key, str):
            raise ValueError(f"persistent id {pid!r}"[:120])
        return PickledStorage(key, element)


def load_tensors(data: bytes, where: str) -> dict[str, PickledTensor]:
    """Tensors of a pickled ``state_dict``, by name; entries that are no tensors are left out.

    Raises:
        UnsafePickleError: the pickle asks for anything but tensors.
        ConversionError: the pickle is malformed, or no ``state_dict``.
    """
    try:
        state = _TensorUnpickler(data, where).load()
        # Some trainers wrap the state_dict once.
        if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
            state = state["state_dict"]
        if not isinstance(state, dict):
            raise ValueError(f"a {type(state).__name__} and no state_dict")
        return {
            name: value
            for name, value in state.items()
            if isinstance(name, str) and isinstance(value, PickledTensor)
        }
    except ConversionError:
        raise
    except Exception as exc:  # an unpickler raises whatever a malformed pickle provokes
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise ConversionError(f"{where}: malformed checkpoint pickle ({reason}); download it again") from exc
