from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flashd.errors import BundleCorruptError
from flashd.layout.safetensors_header import build_header, header_length, parse_header

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.float16),
    "c": np.arange(4, dtype=np.int64),
}


def raw_header(items: object) -> bytes:
    return json.dumps(items).encode()


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"k": "v"})
    raw = path.read_bytes()
    length = header_length(raw[:8], len(raw), "x")
    entries = parse_header(raw[8 : 8 + length], len(raw), "x")
    assert entries.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        entry = entries[name]
        assert raw[entry.start_byte : entry.end_byte] == tensor.tobytes()
        assert entry.shape == tensor.shape


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    names = {"float32": "F32", "float16": "F16", "int64": "I64"}
    head, entries = build_header({k: (names[str(t.dtype)], t.shape) for k, t in TENSORS.items()})
    assert entries["a"].start_byte == len(head)
    assert len(head) % 64 == 0
    path = tmp_path / "y.safetensors"
    path.write_bytes(head + b"".join(tensor.tobytes() for tensor in TENSORS.values()))
    for name, tensor in load_file(path).items():
        np.testing.assert_array_equal(tensor, TENSORS[name])


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "'t'.*4 bytes"),
        ({"t": {"dtype": "F32", "shape": [200], "data_offsets": [0, 800]}}, "truncated"),
        ({"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}, "that no tensor has"),
        ({"t": {"dtype": "F32", "shape": [1 << 64, 0], "data_offsets": [0, 0]}}, "that no tensor has"),
        ({"t": {"dtype": "F32", "shape": [1] * 99, "data_offsets": [0, 4]}}, "that no tensor has"),
        ({"t": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, "that no tensor has"),
        ({"t": {"dtype": "F32", "shape": [1]}}, "data_offsets"),
        ({"t": 3}, "x:"),
        ([], "x:"),
    ],
)
def test_a_bad_header_is_named(items: object, said: str) -> None:
    with pytest.raises(BundleCorruptError, match=said):
        parse_header(raw_header(items), 400, "x")


@pytest.mark.parametrize("prefix", [b"", b"1234567", struct.pack("<Q", 1 << 60), struct.pack("<Q", 93)])
def test_a_bad_length_is_named(prefix: bytes) -> None:
    with pytest.raises(BundleCorruptError, match="x: "):
        header_length(prefix, 100, "x")
