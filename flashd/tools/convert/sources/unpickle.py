"""A reader of torch checkpoint pickles that can make tensors' descriptions and nothing else.

A pickle is a program for a small stack machine. This is such a machine with only the operations
that ``torch.save`` writes for a ``state_dict``, and no way to call, import or build anything: a
global is a name from a closed list, and the functions that rebuild tensors are replaced by notes of
shape, stride and offset. What a ``state_dict`` needs no values of (floats, lists, optimizer state)
becomes one opaque mark. Values of the pickle are never hashed, compared or printed unless they are
short strings or numbers, so that nested ones cost nothing; bytes and operations are limited.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashd.errors import ConversionError, UnsafePickleError

MAX_PICKLE_BYTES = 64 << 20
# A tensor takes some 30 of them.
_MAX_OPERATIONS = 1 << 21
_MAX_DIMS = 16
_MAX_NUMBER = 1 << 62

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
_REBUILD = frozenset(
    {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state"}
)


@dataclass(frozen=True)
class ElementType:
    """A dtype as the checkpoint names it."""

    name: str
    item_bytes: int


@dataclass(frozen=True)
class PickledStorage:
    """A block of elements, by its key in the zip archive."""

    key: str
    element: ElementType


@dataclass(frozen=True)
class PickledTensor:
    """A view into a storage; offset and strides in elements, all natural numbers."""

    storage: PickledStorage
    element: ElementType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def last(self) -> int:
        """The furthest element of the storage that the view touches, if it has any elements."""
        return self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class _Function:
    """Stands for ``OrderedDict`` or a torch function that rebuilds tensors."""

    name: str


class _Opaque:
    """Any value that no tensor depends on."""


class _Mark:
    """Where the arguments of the next tuple or dict begin."""


_OPAQUE, _MARK = _Opaque(), _Mark()


def load_tensors(data: bytes, where: str) -> dict[str, PickledTensor]:
    """Tensors of a pickled ``state_dict``, by name; entries that are no tensors are left out.

    Raises:
        UnsafePickleError: the pickle asks for anything but tensors.
        ConversionError: the pickle is malformed, too large, or no ``state_dict``.
    """
    try:
        state = _Machine(data, where).run()
    except (ValueError, IndexError, struct.error) as exc:
        reason = str(exc) if type(exc) is ValueError else "it ends early or its stack is empty"
        raise ConversionError(f"{where}: malformed checkpoint pickle ({reason}); download it again") from exc
    # Some trainers wrap the state_dict once.
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise ConversionError(f"{where}: malformed checkpoint pickle (no state_dict); download it again")
    return {name: value for name, value in state.items() if isinstance(value, PickledTensor)}


class _Machine:
    """The stack machine. Malformed input raises ``ValueError``, ``IndexError``, ``struct.error``."""

    def __init__(self, data: bytes, where: str) -> None:
        if len(data) > MAX_PICKLE_BYTES:
            raise ValueError(f"{len(data)} bytes, expected at most {MAX_PICKLE_BYTES}")
        self._data = data
        self._where = where
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """What the pickle makes."""
        for _ in range(_MAX_OPERATIONS):
            code = self._take(1)
            if code == b".":
                return self._pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(f"operation {code!r} at byte {self._at - 1}, which torch.save doesn't write")
            operation(self)
        raise ValueError(f"more than {_MAX_OPERATIONS} operations")

    # -- bytes ----------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise IndexError
        self._at += count
        return piece

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode("utf-8")

    # -- values ---------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def _pop_marked(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                values = self._stack[index + 1 :]
                del self._stack[index:]
                return values
        raise ValueError("no mark on the stack")

    def skip(self, form: str) -> None:
        """An operand without meaning here."""
        self._take(struct.calcsize(form))

    def integer(self, form: str) -> None:
        """BININT and its shorter forms."""
        self.push(self._number(form))

    def long(self) -> None:
        """LONG1: up to 255 bytes; those that don't fit 64 bits are no part of a tensor."""
        self.push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def text(self, form: str) -> None:
        """A string; pickle may hold lone surrogates, which no tensor's name does."""
        self.push(self._take(self._number(form)).decode("utf-8"))

    def number(self) -> None:
        """BINFLOAT."""
        self._take(8)
        self.push(_OPAQUE)

    def tuple(self, count: int | None) -> None:
        """TUPLE (down to the mark), TUPLE1, TUPLE2, TUPLE3."""
        if count is None:
            self.push((*self._pop_marked(),))
        else:
            self.push((*reversed([self._pop() for _ in range(count)]),))

    def append(self, marked: bool) -> None:
        """APPEND and APPENDS, to a list or set whose content doesn't matter."""
        if marked:
            self._pop_marked()
        else:
            self._pop()
        if self._stack[-1] is not _OPAQUE:
            raise ValueError("a list operation on something else")

    def set_items(self, marked: bool) -> None:
        """SETITEM and SETITEMS. Keys that are no strings name no weights, and are never hashed."""
        values = self._pop_marked() if marked else [self._pop(), self._pop()][::-1]
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError("a dict operation on something else")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if isinstance(key, str):
                target[key] = value

    def put(self, form: str | None) -> None:
        """BINPUT, LONG_BINPUT, MEMOIZE."""
        index = len(self._memo) if form is None else self._number(form)
        value = self._pop()
        self._memo[index] = value
        self.push(value)

    def get(self, form: str) -> None:
        """BINGET, LONG_BINGET."""
        index = self._number(form)
        if index not in self._memo:
            raise ValueError(f"no memo {index}")
        self.push(self._memo[index])

    # -- what a pickle would call ---------------------------------------------------------------

    def import_line(self) -> None:
        """GLOBAL."""
        module = self._line()
        self.push(self._global(module, self._line()))

    def import_stack(self) -> None:
        """STACK_GLOBAL."""
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a global without a name")
        self.push(self._global(module, name))

    def _global(self, module: str, name: str) -> _Function | ElementType:
        if (module, name) == ("collections", "OrderedDict") or (
            module == "torch._utils" and name in _REBUILD
        ):
            return _Function(name)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return ElementType(*_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return ElementType(*_DTYPES[name])
        raise self.unsafe(f"asks for {_printable(f'{module}.{name}')}")

    def unsafe(self, what: str) -> UnsafePickleError:
        """The error for a pickle that wants more than tensors."""
        return UnsafePickleError(
            f"{self._where}: the pickle {what}, expected only tensors; nothing of it was executed: get the "
            "model as safetensors, or re-save only its state_dict"
        )

    def storage(self) -> None:
        """BINPERSID: a reference to a storage in the archive."""
        pid = self._pop()
        if not isinstance(pid, tuple) or len(pid) != 5:
            raise ValueError("a persistent id that is no storage")
        kind, element, key, _location, _elements = pid
        if kind != "storage" or not isinstance(element, ElementType) or not isinstance(key, str):
            raise ValueError("a persistent id that is no storage")
        self.push(PickledStorage(key, element))

    def reduce(self) -> None:
        """REDUCE, where pickle would call a function."""
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that is no function")
        if function.name != "OrderedDict":
            self.push(_rebuilt(function.name, arguments))
        elif arguments:
            raise ValueError("an OrderedDict with arguments")
        else:
            self.push({})

    def build(self) -> None:
        """BUILD, where pickle would set attributes: a ``state_dict`` has its ``_metadata`` so."""
        self._pop()
        if not isinstance(self._stack[-1], dict):
            raise self.unsafe("sets attributes of something that is no state_dict")


def _rebuilt(name: str, arguments: tuple[Any, ...]) -> PickledTensor:
    """The note of what a torch function would rebuild."""
    if name.startswith("_rebuild_parameter"):
        if not arguments or not isinstance(arguments[0], PickledTensor):
            raise ValueError(f"{name} without a tensor")
        return arguments[0]
    if len(arguments) < (7 if name == "_rebuild_tensor_v3" else 4):
        raise ValueError(f"{name} with {len(arguments)} arguments")
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, PickledStorage):
        raise ValueError(f"{name} without a storage")
    element = arguments[6] if name == "_rebuild_tensor_v3" else storage.element
    if not isinstance(element, ElementType):
        raise ValueError(f"{name} without a dtype")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
        raise ValueError(f"{name} whose shape and stride differ in length")
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"{name} with {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    if not all(type(n) is int and 0 <= n < _MAX_NUMBER for n in (offset, *shape, *stride)):
        raise ValueError(f"{name} with a shape, stride or offset that is no natural number")
    return PickledTensor(storage, element, offset, shape, stride)


def _printable(text: str) -> str:
    """A hostile name for a message: one short line."""
    short = text[:80]
    return short if short.isprintable() else ascii(short)


# The operations of pickle protocols 2 to 5 that torch.save uses.
_OPERATIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda m: m.skip("<B"),  # PROTO
    b"\x95": lambda m: m.skip("<Q"),  # FRAME
    b"(": lambda m: m.push(_MARK),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.integer("<i"),
    b"K": lambda m: m.integer("<B"),
    b"M": lambda m: m.integer("<H"),
    b"\x8a": _Machine.long,
    b"G": _Machine.number,
    b"X": lambda m: m.text("<I"),
    b"\x8c": lambda m: m.text("<B"),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.tuple(None),
    b"\x85": lambda m: m.tuple(1),
    b"\x86": lambda m: m.tuple(2),
    b"\x87": lambda m: m.tuple(3),
    b"]": lambda m: m.push(_OPAQUE),
    b"\x8f": lambda m: m.push(_OPAQUE),  # EMPTY_SET
    b"a": lambda m: m.append(False),
    b"e": lambda m: m.append(True),
    b"\x90": lambda m: m.append(True),  # ADDITEMS
    b"}": lambda m: m.push({}),
    b"s": lambda m: m.set_items(False),
    b"u": lambda m: m.set_items(True),
    b"q": lambda m: m.put("<B"),
    b"r": lambda m: m.put("<I"),
    b"\x94": lambda m: m.put(None),
    b"h": lambda m: m.get("<B"),
    b"j": lambda m: m.get("<I"),
    b"c": _Machine.import_line,
    b"\x93": _Machine.import_stack,
    b"Q": _Machine.storage,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
}
