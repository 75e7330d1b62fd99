"""pytorch_model.bin without torch: what torch really writes, and what must never run."""

from __future__ import annotations

import collections
import io
import json
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from flashd.errors import ConversionError, UnsafePickleError
from flashd.testing.tiny_checkpoints import OPT_CONFIG, opt_shapes, random_tensors
from flashd.tools.convert import convert
from flashd.tools.convert.sources.torch_zip import TorchZipSource
from flashd.tools.convert.sources.unpickle import load_tensors


@pytest.fixture
def saved(tmp_path):
    """``saved(state)`` -> an opened source of what torch saved."""
    opened = []

    def save(state, **options):
        path = tmp_path / f"{len(opened)}.bin"
        torch.save(state, path, **options)
        opened.append(TorchZipSource({path: None}))
        return opened[-1]

    yield save
    for source in opened:
        source.close()


def whole(source, name):
    return source.read_rows(name, 0, source.tensors[name].shape[0])


def test_views_strides_and_shared_storages(saved):
    base = torch.arange(60, dtype=torch.float32)
    state = {
        "plain": base.reshape(6, 10),
        "transposed": base.reshape(6, 10).T,
        "slice": base[7:19],
        "every_other": base[::2],
        "columns": base.reshape(6, 10)[:, 2:5],
        "expanded": base[:4].expand(3, 4),
        "cube": base.reshape(3, 4, 5).permute(2, 0, 1),
        "empty": base.reshape(6, 10)[:, :0],
        "parameter": torch.nn.Parameter(base.reshape(10, 6)),
        "half": base.half(),
        "brain": base.bfloat16(),
    }
    source = saved(collections.OrderedDict(state))
    assert set(source.tensors) == set(state)
    for name, tensor in state.items():
        info, found = source.tensors[name], whole(source, name)
        assert info.shape == tuple(tensor.shape)
        expected = tensor.detach()
        if info.dtype == "bf16":
            assert found.dtype == np.uint16
            expected, found = expected.view(torch.int16), found.view(np.int16)
        assert np.array_equal(found, expected.numpy()), name
        assert found.flags.c_contiguous
        if tensor.shape[0] > 3:
            assert np.array_equal(source.read_rows(name, 1, 3), whole(source, name)[1:3])


def test_other_dtypes_are_listed_but_no_weights(saved):
    source = saved(
        {"ids": torch.arange(3), "double": torch.ones(2, dtype=torch.float64), "flag": torch.ones(2) > 0}
    )
    assert {name: (info.stored, info.dtype) for name, info in source.tensors.items()} == {
        "ids": ("i64", None), "double": ("f64", None), "flag": ("bool", None),
    }  # fmt: skip


def test_state_dict_of_a_module_with_its_metadata(saved):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    source = saved(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert np.array_equal(whole(source, name), tensor.numpy())
    wrapped = saved({"epoch": 3, "state_dict": module.state_dict(), "note": "x"})
    assert set(wrapped.tensors) == set(source.tensors)


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def evil_pickles(marker):
    import builtins
    import os

    yield "posix.system", pickle.dumps({"w": Evil(os.system, f"touch {marker}")})
    yield "builtins.eval", pickle.dumps({"w": Evil(builtins.eval, f"open({str(marker)!r}, 'w')")})
    yield "builtins.getattr", pickle.dumps({"w": Evil(builtins.getattr, "x", "join")})
    yield "subprocess.Popen", b"csubprocess\nPopen\n(S'touch'\nS'" + str(marker).encode() + b"'\nltR."
    yield "os.system", b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    yield "torch.load", b"ctorch\nload\n(S'x'\ntR."
    yield "torch.nn.modules.linear.Linear", pickle.dumps(torch.nn.Linear(2, 2))
    yield "collections.OrderedDict.fromkeys", b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93."
    yield "torch._utils._rebuild_wrapper_subclass", b"ctorch._utils\n_rebuild_wrapper_subclass\n."


def test_pickles_that_ask_for_more_run_nothing(tmp_path):
    marker = tmp_path / "executed"
    for asked, data in evil_pickles(marker):
        with pytest.raises(UnsafePickleError, match=f"asks for {asked}.*nothing of it was executed"):
            load_tensors(data, "x.bin")
        assert not marker.exists()


def test_an_evil_checkpoint_stops_the_conversion(tmp_path):
    marker = tmp_path / "executed"
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(OPT_CONFIG))
    _, data = next(evil_pickles(marker))
    with zipfile.ZipFile(src / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", data)
    with pytest.raises(UnsafePickleError, match=r"pytorch_model\.bin: the pickle asks for posix\.system"):
        convert(src, tmp_path / "dst")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize(
    "data",
    [
        # BUILD on our stand-in for a torch function: may it be changed for the next file?
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'_name'\nS'x'\nstb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'__call__'\nS'x'\nsb.",
        b"ccollections\nOrderedDict\n(N}S'__init__'\nS'x'\nstb.",
        b"ctorch\nFloatStorage\n(tR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI2\nI3\nI4\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(tR.",
        b"ctorch._utils\n_rebuild_parameter\n(I1\ntR.",
        b"(S'storage'\nS'a'\nS'b'\nS'c'\nI1\ntQ.",
        b"S'other'\nQ.",
        b"]q\x00.",
        b"\x80\x04",
        b"",
        b"garbage",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    ],
)
def test_malformed_pickles(data):
    before = collections.OrderedDict.__init__
    with pytest.raises(ConversionError) as caught:
        load_tensors(data, "x.bin")
    assert "\n" not in str(caught.value)
    assert collections.OrderedDict.__init__ is before
    assert load_tensors(pickle.dumps({}), "x.bin") == {}


def test_damage_anywhere_raises_only_our_error(tmp_path):
    path = tmp_path / "x.bin"
    small = {
        "vocab_size": 9,
        "hidden_size": 4,
        "word_embed_proj_dim": 4,
        "ffn_dim": 8,
        "num_hidden_layers": 1,
    }
    tensors = random_tensors(opt_shapes({**OPT_CONFIG, **small}), 0)
    torch.save({name: torch.from_numpy(values) for name, values in tensors.items()}, path)
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(400):
        bad = bytearray(raw)
        for at in rng.integers(0, len(raw), 4):
            bad[at] = rng.integers(0, 256)
        path.write_bytes(bad[: rng.integers(1, len(raw))] if rng.random() < 0.3 else bad)
        try:
            source = TorchZipSource({path: None})
        except ConversionError as exc:
            messages.append(str(exc))
            continue
        # What opens is whole: every view lies inside the file.
        for name, info in source.tensors.items():
            if info.dtype is not None and info.shape:
                assert source.read_rows(name, 0, info.shape[0]).shape == info.shape
        source.close()
    assert len(messages) > 100
    assert not [message for message in messages if "\n" in message]


def test_legacy_pickle_is_refused_by_name(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(
        ConversionError, match=r"x\.bin: torch's legacy pickle format, expected its zip.*save it again"
    ):
        TorchZipSource({tmp_path / "x.bin": None})


def test_legacy_tar_is_refused_by_name(tmp_path):
    with tarfile.open(tmp_path / "x.bin", "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(ConversionError, match=r"x\.bin: torch's legacy tar format, expected its zip"):
        TorchZipSource({tmp_path / "x.bin": None})


def test_compressed_storages_are_refused(tmp_path):
    torch.save({"w": torch.ones(300)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as old, zipfile.ZipFile(tmp_path / "y.bin", "w") as new:
        for info in old.infolist():
            kind = zipfile.ZIP_DEFLATED if "/data/" in info.filename else zipfile.ZIP_STORED
            new.writestr(info.filename, old.read(info), kind)
    with pytest.raises(ConversionError, match="'w': a compressed storage"):
        TorchZipSource({tmp_path / "y.bin": None})


def test_storage_shorter_than_the_tensor(tmp_path):
    torch.save({"w": torch.ones(300)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin") as old, zipfile.ZipFile(tmp_path / "y.bin", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data[:400] if "/data/" in info.filename else data)
    with pytest.raises(ConversionError, match="'w': reaches element 299 of a storage of 400 bytes"):
        TorchZipSource({tmp_path / "y.bin": None})


def test_other_zip_and_other_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("hello.txt", "hi")
    with pytest.raises(ConversionError, match=r"a zip archive without torch's data\.pkl"):
        TorchZipSource({tmp_path / "x.bin": None})
    (tmp_path / "y.bin").write_bytes(b"hello" * 200)
    with pytest.raises(ConversionError, match="not a torch checkpoint"):
        TorchZipSource({tmp_path / "y.bin": None})
