"""Wrong arguments: an error that says what was got and what was expected, the same for native and twin."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kernels.error_cases import CASES as FIRST_CASES
from kernels.error_cases import crooked, f32, frozen
from kernels.error_cases_more import MORE_CASES
from kernels.error_cases_window import WINDOW_CASES, i32

from flashd import kernels
from flashd.kernels import twin

CASES = FIRST_CASES | MORE_CASES | WINDOW_CASES
MODULES = [pytest.param(twin, id="twin"), pytest.param(kernels, id="installed")]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("case", CASES)
def test_message(case: str, module: ModuleType) -> None:
    kind, message, call = CASES[case]
    with pytest.raises(kind) as caught:
        call(module)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_native_and_twin_say_the_same(case: str) -> None:
    said = []
    for module in (twin, kernels):
        with pytest.raises(Exception) as caught:
            CASES[case][2](module)
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("module", MODULES)
def test_unknown_simd_level(module: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"SIMD level 'mmx' .*expected "):
        module.set_simd("mmx")


def valid(verb: str) -> dict[str, Any]:
    """Arguments of a call that is right."""
    rows, flags = np.zeros((3, 96), np.uint8), np.ones((2, 4), np.bool_)
    half, nobody = np.zeros((2, 5, 8), np.float16), np.zeros(4, np.bool_)
    ffn = {"rows": rows, "dtype": "f32", "d": 8, "gated": True}
    calls: dict[str, dict[str, Any]] = {
        "gemv": {"w": f32(4, 3), "x": f32(2, 3), "out": f32(2, 4), "bias": f32(4)},
        "gemm": {"w": f32(4, 3), "x": f32(20, 3), "out": f32(20, 4), "bias": f32(4)},
        "ffn_dots": ffn
        | {"activation": "silu", "x": f32(2, 8), "out": f32(2, 4), "up_bias": f32(3), "gate_bias": f32(3)}
        | {"index": np.arange(3), "slots": np.arange(1, 4), "mask": flags, "threshold": 0.1},
        "ffn_down": ffn | {"h": f32(2, 3), "acc": f32(2, 8), "index": np.arange(3)},
        "predict": {"w1": f32(4, 8), "w2": f32(6, 4), "x": f32(2, 8), "threshold": 0.5}
        | {"b1": f32(4), "b2": f32(6), "scores": f32(2, 6)},
        "topk_union": {"scores": f32(2, 6), "k": 2},
        "attention": {"q": f32(2, 4, 8), "k": half, "v": half.copy(), "length": 5, "scale": 1.0}
        | {"out": f32(2, 4, 8)},
        "rope": {"x": f32(2, 3, 8), "cos": f32(2, 4), "sin": f32(2, 4)},
        "rmsnorm": {"x": f32(2, 4), "weight": f32(4), "eps": 1e-5, "out": f32(2, 4)},
        "layernorm": {"x": f32(2, 4), "weight": f32(4), "bias": f32(4), "eps": 1e-5, "out": f32(2, 4)},
        "crc32c": {"rows": rows, "out": np.zeros(3, np.uint32), "index": np.arange(3)},
        "to_f32": {"src": half, "out": f32(2, 5, 8)},
        "from_f32": {"src": f32(2, 5, 8), "out": half},
        "read_all": {"memory": np.zeros(33, np.uint8)},
        "append_kv": {"k": f32(2, 3, 8), "v": f32(2, 3, 8), "out": f32(2, 3, 5, 8), "position": 1},
        "find_rows": {"ids": np.arange(2), "row_of": i32(4), "in_flight": nobody},
        "request_rows": {"ids": np.arange(2), "step": 3, "last": i32(4), "guessed": nobody.copy()}
        | {"row_of": i32(4), "in_flight": nobody, "count": f32(4), "credit": 0.5},
        "evict_rows": {"row_of": i32(4) - 1, "in_flight": nobody, "last": i32(4), "step": 3, "value": f32(4)}
        | {
            "guessed": nobody.copy(),
            "k": 2,
            "owner": np.zeros(3, np.int64),
            "free": np.arange(3),
            "n_free": 0,
        },
        "take_rows": {
            "ids": np.arange(2),
            "most": 2,
            "first": 8,
            "row_of": i32(4),
            "in_flight": nobody.copy(),
        }
        | {"owner": np.zeros(3, np.int64), "free": np.arange(3), "n_free": 2, "guessed": nobody.copy()},
        "drop_rows": {
            "ids": np.arange(2),
            "row_of": np.arange(4, dtype=np.int32),
            "owner": np.zeros(3, np.int64),
        }
        | {"free": np.arange(3), "n_free": 1},
    }
    return calls[verb]


NO_ARRAYS = {"available_simd", "rest", "set_simd", "set_threads", "simd_level", "threads"}
VERBS = sorted(set(twin.__all__) - NO_ARRAYS)
# By verb and name; where no verb is given, of every verb.
WRITTEN = {"out", "acc", "predict scores", "rope x", "request_rows last", "request_rows guessed"}
WRITTEN |= {"request_rows count", "owner", "take_rows row_of", "drop_rows row_of", "drop_rows free"}
WRITTEN |= {f"evict_rows {name}" for name in ("row_of", "guessed", "free")}
WRITTEN |= {f"take_rows {name}" for name in ("in_flight", "guessed")}
OPTIONAL = {
    "bias",
    "up_bias",
    "gate_bias",
    "index",
    "mask",
    "b1",
    "b2",
    "predict scores",
    "request_rows count",
    "take_rows guessed",
}


def shifted(array: np.ndarray) -> np.ndarray:
    copy = crooked(*array.shape, dtype=array.dtype.name)
    copy[...] = array
    return copy


FAULTS: dict[str, Callable[[np.ndarray], Any]] = {
    "a list": lambda array: array.tolist(),
    "nothing": lambda array: None,
    "a memoryview": lambda array: memoryview(array),
    "complex": lambda array: array.astype(np.complex128),
    "float64": lambda array: array.astype(np.float64),
    "int16": lambda array: array.astype(np.int16),
    "an object": lambda array: array.astype(object),
    "structured": lambda array: np.zeros(array.shape, [("a", "f4")]),
    "swapped bytes": lambda array: array.astype(array.dtype.newbyteorder()),
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "reversed": lambda array: array[::-1],
    "unaligned": shifted,
    "an axis more": lambda array: array[None],
    "a scalar": lambda array: array.reshape(-1)[:1].reshape(()),
    "longer": lambda array: np.concatenate([array, array]),
    "wider": lambda array: np.concatenate([array, array], axis=-1),
    "read-only": lambda array: frozen(array.copy()),
}
ALWAYS_WRONG = {
    "a list", "a memoryview", "complex", "float64", "int16", "an object", "structured", "strided", "reversed",
    "an axis more",
}  # fmt: skip


def must_fail(verb: str, name: str, array: np.ndarray, fault: str) -> bool:
    if fault == "nothing":
        return not {name, f"{verb} {name}"} & OPTIONAL
    if fault == "read-only":
        return bool({name, f"{verb} {name}"} & WRITTEN)
    if fault in ("swapped bytes", "unaligned"):
        return array.itemsize > 1
    return fault in ALWAYS_WRONG


def outcome(module: ModuleType, verb: str, name: str, fault: str) -> tuple[str, str] | None:
    """What the call raises when one argument has the fault; None if it goes through."""
    arguments = valid(verb)
    arguments[name] = FAULTS[fault](arguments[name])
    before = {key: value.copy() for key, value in arguments.items() if isinstance(value, np.ndarray)}
    try:
        getattr(module, verb)(**arguments)
    except (TypeError, ValueError) as error:
        for key, value in before.items():  # nothing was written
            np.testing.assert_array_equal(arguments[key], value)
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_array_of_every_verb(verb: str, fault: str) -> None:
    """Native and twin agree on it, and what is surely wrong is refused."""
    for name, array in valid(verb).items():
        if not isinstance(array, np.ndarray):
            continue
        said = outcome(twin, verb, name, fault)
        assert said == outcome(kernels, verb, name, fault), name
        assert said is None or said[1].startswith(f"{verb}: ")
        if must_fail(verb, name, array, fault):
            assert said is not None, name
        elif fault == "read-only":
            assert said is None, name  # inputs may be


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("verb", VERBS)
def test_names_of_arguments(verb: str, module: ModuleType) -> None:
    """All can be given by name, and an unknown one is refused."""
    getattr(module, verb)(**valid(verb))
    with pytest.raises(TypeError):
        getattr(module, verb)(**valid(verb), colour=1)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("verb", VERBS)
def test_arrays_are_released(verb: str, module: ModuleType) -> None:
    """A buffer that stays exported would forbid this resize, whether the call went well or not."""
    arguments = valid(verb)
    arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
    getattr(module, verb)(**arguments)
    for name in [name for name, value in arguments.items() if isinstance(value, np.ndarray)]:
        with pytest.raises(TypeError):
            getattr(module, verb)(**arguments | {name: "no array"})
    for array in arrays:
        array.resize((7, 7), refcheck=False)
