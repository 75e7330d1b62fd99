"""Pickles and zip archives made to hurt: one line, quickly and in little memory."""

from __future__ import annotations

import collections
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from flashd.errors import ConversionError, UnsafePickleError
from flashd.tools.convert.sources.torch_zip import TorchZipSource
from flashd.tools.convert.sources.unpickle import load_tensors

STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0X\x03\0\0\0cpuK\x04tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\0K\x02\x85K\x01\x85tR"


def test_the_handwritten_pickle_is_one_that_loads():
    (tensor,) = load_tensors(b"\x80\x02}X\x01\0\0\0w" + TENSOR + b"s.", "x.bin").values()
    assert (tensor.shape, tensor.stride, tensor.storage.key) == ((2,), (1,), "0")


@pytest.mark.parametrize(
    "target", [TENSOR, STORAGE, b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"K\x01"]
)
def test_nothing_but_a_state_dict_takes_attributes(target):
    """BUILD must not alter what has been checked: strides that were changed behind the check would
    be read outside of the file's bytes."""
    state = b"(" + b"N" * 3 + b"K\x01t"
    with pytest.raises(UnsafePickleError, match=r"sets attributes.*nothing of it was executed"):
        load_tensors(b"\x80\x02}X\x01\0\0\0w" + target + state + b"bs.", "x.bin")


# Python expressions: the pickles are made where they are read.
WIDE = r"b')q\0' + b'h\0h\0\x86q\0' * 60"  # a tuple of 2**60 elements, in 60 objects
BOMBS = {
    "deep key": r"b'})' + b'\x85' * 20_000_000 + b'Ns.'",
    "deep value": r"b'}X\1\0\0\0w)' + b'\x85' * 2_000_000 + b's.'",
    "wide key": WIDE + r" + b'}h\0Ns.'",
    "wide id": WIDE + r" + b'h\0Q.'",
    "wide id of five": WIDE + r" + b'(h\0h\0h\0h\0h\0tQ.'",
    "wide arguments": WIDE + r" + b'ctorch._utils\n_rebuild_tensor_v2\nh\0R.'",
    "wide shape": f"{WIDE} + {b'ctorch._utils' + bytes([10])!r} + b'_rebuild_tensor_v2\\n(' + {STORAGE!r}"
    r" + b'K\0h\0h\0tR.'",
    "lists": "b']' * 60_000_000 + b'.'",
    "dicts": "b'}' * 60_000_000 + b'.'",
    "marks": "b'(' * 60_000_000 + b't.'",
    "too long": "bytes(70 << 20)",
    "colliding keys": r"b'}(' + b''.join(b'\x8a\x0a' + (i * (2**61 - 1)).to_bytes(10, 'little') + b'N'"
    r" for i in range(400_000)) + b'u.'",
}


@pytest.mark.parametrize("name", BOMBS)
def test_pickles_that_grow_are_harmless(in_a_small_process, name):
    printed = in_a_small_process(f"""
        from flashd.errors import ConversionError
        from flashd.tools.convert.sources.unpickle import load_tensors
        try:
            print("tensors", len(load_tensors({BOMBS[name]}, "x.bin")))
        except ConversionError as exc:
            print("refused", exc)
    """)
    harmless = name in ("deep value", "wide key", "colliding keys")
    assert printed.startswith("tensors 0" if harmless else "refused x.bin: malformed checkpoint pickle (")
    assert len(printed) < 300


def test_what_else_a_checkpoint_carries_is_left_out(tmp_path):
    module = torch.nn.Linear(3, 4)
    for protocol in (2, 4, 5):
        state = collections.OrderedDict(
            state_dict=module.state_dict(), epoch=3, loss=1.5, names=["a", "b"], big=2**70,
            optimizer={"state": {0: {"step": torch.ones(())}}, "param_groups": [{"params": [0], "lr": 0.1}]},
        )  # fmt: skip
        state[7] = None
        torch.save(state, tmp_path / "x.bin", pickle_protocol=protocol)
        source = TorchZipSource({tmp_path / "x.bin": None})
        assert np.array_equal(source.read_rows("weight", 0, 4), module.weight.detach().numpy())
        source.close()


def rezipped(path, changes, compression=zipfile.ZIP_STORED):
    """The archive with some members' content changed; ``compression`` is theirs."""
    with zipfile.ZipFile(path) as old:
        members = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members.items():
            end = name.rpartition("/")[2]
            new.writestr(name, changes.get(end, data), compression if end in changes else zipfile.ZIP_STORED)


@pytest.mark.parametrize("name", ["byteorder", "data.pkl"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_bombs(tmp_path, name, compression):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.bin")
    rezipped(tmp_path / "x.bin", {name: bytes(65 << 20)}, compression)
    with pytest.raises(ConversionError, match=f"x.bin: '{name}' (has 68157440 bytes|is compressed)"):
        TorchZipSource({tmp_path / "x.bin": None})


def test_a_zip_directory_beyond_reason(tmp_path):
    size = 9 << 20
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, size, 4, 0)
    (tmp_path / "x.bin").write_bytes(b"PK\x03\x04" + bytes(size) + end)
    with pytest.raises(ConversionError, match=r"a directory of 9437184 bytes, expected at most"):
        TorchZipSource({tmp_path / "x.bin": None})


def test_big_endian_storages(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.bin")
    rezipped(tmp_path / "x.bin", {"byteorder": b"big"})
    with pytest.raises(ConversionError, match="storages that are not little-endian"):
        TorchZipSource({tmp_path / "x.bin": None})


def test_a_weight_that_is_one_number_many_times(tmp_path):
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "x.bin")
    with pytest.raises(ConversionError, match=r"'w': shows the \d+ bytes of its storage several times"):
        TorchZipSource({tmp_path / "x.bin": None})


def test_evil_bytes_in_a_pickle_raise_only_our_errors():
    good = pickle.dumps({"a": 1, "b": [1, 2, {"c": (1, 2.5, None, True)}]}, 4)
    torch_like = b"\x80\x02}X\x01\0\0\0w" + TENSOR + b"s."
    rng = np.random.default_rng(4)
    messages = []
    for base in (good, torch_like):
        for _ in range(3000):
            bad = bytearray(base)
            for at in rng.integers(0, len(bad), rng.integers(1, 4)):
                bad[at] = rng.integers(0, 256)
            try:
                load_tensors(bytes(bad), "x.bin")
            except ConversionError as exc:
                messages.append(str(exc))
    assert len(messages) > 2000
    assert not [message for message in messages if "\n" in message]
