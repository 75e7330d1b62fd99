"""The parts of ``bench kernels``: cold memory, the turns, and that torch does the same work."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as real_torch

from flashd import kernels
from flashd.errors import FlashdError
from flashd.tools.bench.kernels import blas, catalog, memory, run
from flashd.tools.bench.kernels.blas import blas_threads
from flashd.tools.bench.kernels.cases import normal
from flashd.tools.bench.kernels.memory import Arena, arena_bytes
from flashd.tools.bench.kernels.options import KernelOptions
from flashd.tools.bench.kernels.run import bench_kernels
from flashd.tools.bench.kernels.turns import Subject
from flashd.tools.bench.kernels.with_torch import NoTorch, Torch

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("l3", "available", "quick", "expected"),
    [
        (None, 100 * GIB, False, 512 * MIB),
        (32 * MIB, 100 * GIB, False, 512 * MIB),
        (260 * MIB, 100 * GIB, False, 1040 * MIB),
        (GIB, 100 * GIB, False, 2 * GIB),
        (260 * MIB, 2 * GIB, False, 512 * MIB),
        (260 * MIB, 100 * GIB, True, 64 * MIB),
    ],
)
def test_size_of_the_arena(l3: int | None, available: int, quick: bool, expected: int) -> None:
    assert arena_bytes(192 * MIB if not quick else MIB, quick, l3, available) == expected


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(FlashdError, match=r"^700 MiB of memory are available, expected at least 768 MiB"):
        arena_bytes(192 * MIB, False, None, 700 * MIB)


def test_a_machine_without_memory_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available_bytes", lambda: 10 * MIB)
    with pytest.raises(FlashdError, match=r"^10 MiB of memory are available, expected at least 16 MiB"):
        bench_kernels(KernelOptions(verbs=("crc32c", "gemm"), quick=True, torch=False))


def test_less_memory_than_the_caches_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available_bytes", lambda: 256 * MIB)
    monkeypatch.setattr(run, "l3_bytes", lambda: 96 * MIB)
    report = bench_kernels(KernelOptions(verbs=("topk_union",), batches=(1,), rounds=1, torch=False))
    assert report.memory_bytes == 64 * MIB
    assert [note for note in report.notes if "96 MiB and only 64 MiB" in note]


def test_a_cgroup_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = memory.host.MemoryLimit("/a", 2, 4 * GIB, None, GIB)
    monkeypatch.setattr(memory.host, "memory_limits", lambda: [limit])
    assert 0 < memory.available_bytes() < 4 * GIB


def test_caches_and_cpu_as_the_kernel_says(tmp_path: Path) -> None:
    cpu = min(memory.os.sched_getaffinity(0))
    for index, (level, size) in enumerate([("1", "48K"), ("2", "2048K"), ("3", "32M")]):
        cache = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
        cache.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", "0-1")):
            (cache / name).write_text(f"{text}\n")
    assert memory.l3_bytes(tmp_path) == 32 * MIB
    assert memory.l3_bytes(tmp_path / "empty") is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU @ 3 GHz\n")
    assert memory.cpu_model(tmp_path) == "A CPU @ 3 GHz"
    assert memory.cpu_model(tmp_path / "empty") == memory.os.uname().machine


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_arena_holds_weights(dtype: str) -> None:
    arena = Arena(9 * MIB)
    arena.fill(dtype)
    out = np.empty(arena.memory.size // (4 if dtype == "f32" else 2), np.float32)
    kernels.to_f32(arena.memory.view(memory.NUMPY_DTYPE[dtype]), out)
    assert np.isfinite(out).all()
    assert out.std() == pytest.approx(0.05, rel=0.01)


def test_nothing_is_read_again_before_everything_else_was() -> None:
    arena = Arena(64 * 4096)
    seen: list[int] = []
    for nbytes, count in ((4096, 3), (5000, 2), (8192, 7), (4096, 40), (5000, 1), (3 * 4096, 30)):
        parts = arena.parts(nbytes)
        assert all(part.size == nbytes and part.ctypes.data % 4096 == 0 for part in parts)
        stride = parts[1].ctypes.data - parts[0].ctypes.data
        for number in arena.take(nbytes, count):
            seen += range(number * stride // 4096, (number + 1) * stride // 4096)
    for page, times in Counter(seen).items():
        places = [i for i, other in enumerate(seen) if other == page]
        assert len(places) == times
        # What is left over at the end by a large piece may be skipped.
        assert all(later - sooner >= 64 - 4 for sooner, later in pairwise(places))
    assert arena.take(0, 3) == [0, 0, 0]


def test_a_sample_counts_what_was_timed() -> None:
    arena = Arena(16 * 4096)
    made: list[int] = []
    subject = Subject([lambda i=i: made.append(i) for i in range(16)], 4096, [1e6] * 16)
    subject.calibrate(arena, 0.0)
    assert (subject.count, made) == (1, [0])
    subject.calibrate(arena, 0.1)
    assert subject.count > 1
    subject.count = 5
    made.clear()
    subject.sample(arena, 0.0)
    assert made == list(range(4, 10)), "one call before the clock, five on it"
    (seconds,), (gb_per_s,) = subject.seconds, subject.gb_per_s
    assert gb_per_s == pytest.approx(1e6 / seconds / 1e9)


def test_threads_are_put_back() -> None:
    before = kernels.threads()
    report = bench_kernels(KernelOptions(verbs=("rope",), rounds=1, threads=1, quick=True, torch=False))
    assert report.threads == 1
    assert kernels.threads() == before


def test_what_torch_cannot_do_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(Torch, "linear", lambda *_: lambda w: refused)
    options = KernelOptions(verbs=("gemv",), dtypes=("f16",), batches=(1,), rounds=1, quick=True)
    report = bench_kernels(options)
    assert {row.torch_ratio for row in report.rows} == {None}
    assert any("torch, gemv f16, batch 1" in note and "not implemented" in note for note in report.notes)


def test_a_broken_torch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NoTorch, match="not installed"):
        Torch(1)


def test_blas_takes_the_threads_it_is_told(tmp_path: Path) -> None:
    wheels = [lib for lib in blas._libraries(blas._MAPS) if blas._has(lib, blas._NAMES[0])]
    before = [library.scipy_openblas_get_num_threads64_() for library in wheels]
    with blas_threads(1) as known:
        assert known or not wheels
        assert [library.scipy_openblas_get_num_threads64_() for library in wheels] == [1] * len(wheels)
    assert [library.scipy_openblas_get_num_threads64_() for library in wheels] == before
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 00000000 08:01 5 /usr/lib/libm.so.6\n7f2-7f3 rw-p 0 0:0 0\n")
    with blas_threads(1, maps) as known:
        assert not known


CASES = [
    case
    for case in catalog.cases(KernelOptions(quick=True))
    if case.verb in ("gemv", "gemm", "attention", "rmsnorm", "layernorm", "to_f32", "from_f32")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_does_the_same_work(case: Any) -> None:
    """Up to the rounding of torch's results to the weights' type."""
    arena = Arena(16 * MIB)
    arena.fill(case.dtype)
    (part, *_) = arena.parts(case.nbytes)
    case.start(part)
    case.ours(part)()
    torch = Torch(kernels.threads())
    with torch.inference():
        (call,) = case.torch(torch, [part])
        theirs = call()
    assert isinstance(theirs, real_torch.Tensor)
    ours = case._out
    if case.verb == "attention":
        theirs = theirs[0].transpose(0, 1)
    if case.verb == "from_f32":  # already in the same memory: compared as bits elsewhere
        assert theirs.numel() == ours.size
        return
    got, expected = ours.reshape(-1), theirs.float().numpy().reshape(-1)
    assert np.abs(got - expected).max() <= 0.02 * max(np.abs(got).max(), 1e-3)


def test_torch_computes_an_ffn() -> None:
    d, n = 64, 96
    x, up, gate = normal(3, d), normal(n, d), normal(n, d) * np.float32(0.5)
    down = np.ascontiguousarray(normal(n, d).T)
    rows = np.concatenate([up, gate, down.T], axis=1)
    h, acc = np.empty((3, n), np.float32), np.zeros((3, d), np.float32)
    window = np.ascontiguousarray(rows).view(np.uint8)
    kernels.ffn_dots(window, "f32", d, True, "silu", x, h)
    kernels.ffn_down(window, "f32", d, True, h, acc)
    torch = Torch(1)
    with torch.inference():
        theirs: Any = torch.ffn(x, "f32")(up, gate, down)()
    np.testing.assert_allclose(acc, theirs.numpy(), rtol=1e-3, atol=1e-2)
