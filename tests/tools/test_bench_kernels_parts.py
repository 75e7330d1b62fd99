"""The parts of ``bench kernels``: cold memory, the turns, and that torch does the same work."""

from __future__ import annotations

import os
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as real_torch

from flashd import kernels
from flashd.cli import bench
from flashd.errors import FlashdError
from flashd.tools.bench.kernels import blas, catalog, memory, others, run, turns
from flashd.tools.bench.kernels.blas import blas_threads
from flashd.tools.bench.kernels.cases import normal
from flashd.tools.bench.kernels.ffn import FfnRows
from flashd.tools.bench.kernels.memory import Arena, arena_bytes
from flashd.tools.bench.kernels.options import KernelOptions
from flashd.tools.bench.kernels.run import bench_kernels
from flashd.tools.bench.kernels.turns import Subject
from flashd.tools.bench.kernels.with_torch import NoTorch, Torch, passive_waiting

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
    assert [note for note in run._about(KernelOptions(), 300 * MIB, 96 * MIB) if "and only 300 MiB" in note]
    assert not [note for note in run._about(KernelOptions(), 384 * MIB, 96 * MIB) if "L3" in note]


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
    subject.calibrate(arena, 0.1)
    assert subject.count > 1
    assert (made, subject.best) == ([0, 1, 2], False)
    arena.take(4096, 1)
    subject.count = 5
    made.clear()
    subject.sample(arena, 0.0)
    assert made == list(range(4, 10)), "one call before the clock, five on it"
    (seconds,), (gb_per_s,) = subject.seconds, subject.gb_per_s
    assert gb_per_s == pytest.approx(1e6 / seconds / 1e9)


@pytest.mark.parametrize(("takes_ms", "count"), [(1, 5), (30, 3)])
def test_the_best_of_a_short_sample_counts(
    takes_ms: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = [0]
    monkeypatch.setattr(turns.time, "perf_counter_ns", lambda: now_ns[0])

    def call(i: int) -> None:
        now_ns[0] += takes_ms * 1_000_000 * (20 if i == 4 else 1)

    subject = Subject([lambda i=i: call(i) for i in range(16)], 4096, [1e6] * 16)
    arena = Arena(16 * 4096)
    subject.calibrate(arena, 0.0)
    assert subject.count == count
    subject.sample(arena, 0.0)
    assert subject.seconds == [pytest.approx(takes_ms / 1e3)]
    assert subject.gb_per_s == [pytest.approx(1 / takes_ms)]


def test_threads_are_put_back() -> None:
    before = kernels.threads()
    report = bench_kernels(KernelOptions(verbs=("rope",), rounds=1, threads=1, quick=True, torch=False))
    assert report.threads == 1
    assert kernels.threads() == before


def test_what_torch_cannot_do_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(Torch, "linear", lambda *_: [lambda w: refused])
    options = KernelOptions(verbs=("gemv",), dtypes=("f16",), batches=(1,), rounds=1, quick=True)
    report = bench_kernels(options)
    assert {row.torch_ratio for row in report.rows} == {None}
    assert any("torch, gemv f16, batch 1" in note and "not implemented" in note for note in report.notes)


def test_a_broken_torch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(NoTorch, match="not installed"):
        Torch(1)


def test_openmp_is_told_not_to_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with passive_waiting():
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with passive_waiting():
        assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert os.environ["OMP_WAIT_POLICY"] == "active"


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


def as_f32(values: Any) -> Any:
    """Weights of any type, flat."""
    out = np.empty(values.size, np.float32)
    kernels.to_f32(values.reshape(-1), out)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_does_the_same_work(case: Any) -> None:
    """In each of its ways, up to the rounding of its results to the weights' type."""
    arena = Arena(16 * MIB)
    arena.fill("f32" if case.verb == "from_f32" else case.dtype)
    (part, *_) = arena.parts(case.nbytes)
    case.start(part)
    case.ours(part)()
    convert = case.verb in ("to_f32", "from_f32")
    got = as_f32(case._out) if convert else case._out.copy().reshape(-1)
    case._out.fill(0)  # a conversion of torch's goes to the same memory
    torch = Torch(kernels.threads())
    with torch.inference():
        ways = case.torch(torch, [part])
        for (call,) in ways:
            theirs: Any = call()
            assert isinstance(theirs, real_torch.Tensor)
            if case.verb == "attention":
                theirs = theirs.reshape(case._q.shape[1], case.batch, case.WIDTH).transpose(0, 1)
            expected = theirs.float().numpy().reshape(-1)
            assert np.abs(expected).max() > 0
            assert np.abs(got - expected).max() <= 0.02 * max(np.abs(got).max(), 1e-3)
    several = case.verb in ("gemv", "gemm") and case.dtype != "f32" and case.batch > 1
    grouped = case.verb == "attention" and case.batch > 1 and "/8x" in case.shape
    assert len(ways) == 1 + (several or grouped)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_torch_computes_an_ffn(gated: bool, dtype: Any) -> None:
    d, n = 64, 96
    x, up, gate = normal(3, d), normal(n, d), normal(n, d) * np.float32(0.5)
    down = np.ascontiguousarray(normal(n, d).T)
    up, gate, down = (array.astype(memory.NUMPY_DTYPE[dtype]) for array in (up, gate, down))
    rows = np.concatenate([up, gate, down.T] if gated else [up, down.T], axis=1)
    h, acc = np.empty((3, n), np.float32), np.zeros((3, d), np.float32)
    window = np.ascontiguousarray(rows).view(np.uint8)
    kernels.ffn_dots(window, dtype, d, gated, "silu" if gated else "relu", x, h)
    kernels.ffn_down(window, dtype, d, gated, h, acc)
    torch = Torch(1)
    with torch.inference():
        ways = torch.ffn(x, dtype)
        assert len(ways) == (1 if dtype == "f32" else 2)
        for make in ways:
            theirs: Any = make(up, gate if gated else None, down)()
            close = 1e-3 if theirs.dtype == real_torch.float32 else 2e-2
            assert np.abs(acc - theirs.float().numpy()).max() <= close * np.abs(acc).max()


def test_an_older_torch_takes_part_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = real_torch.nn.functional.scaled_dot_product_attention

    def older(
        q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, scale: Any = None
    ) -> Any:
        return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(real_torch.nn.functional, "scaled_dot_product_attention", older)
    monkeypatch.delattr(real_torch.nn.functional, "rms_norm")
    options = KernelOptions(verbs=("attention", "rmsnorm"), dtypes=("f32",), rounds=1, quick=True)
    report = bench_kernels(options)
    assert {row.verb for row in report.rows if row.torch_ratio is None} == {"rmsnorm"}
    assert [note for note in report.notes if "torch, rmsnorm f32" in note and "2.4 and later have" in note]


def test_listed_rows_are_others_when_a_piece_comes_round_again() -> None:
    case = FfnRows("f32", 1, 64, 32, False, 0.3)
    lists: Any = case._lists
    assert [len(rows) for rows in lists] == [19, 19, 19]
    assert len(set(np.concatenate(lists))) == 57
    assert all((np.diff(rows) > 0).all() for rows in lists)
    arena = Arena(MIB)
    arena.fill("f32")
    part = arena.parts(case.nbytes)[0]
    case.start(part)
    call = case.ours(part)
    seen = []
    for _ in range(4):
        call()
        seen.append(case._h.copy())
    assert (seen[0] == seen[3]).all()
    assert not (seen[0] == seen[1]).all()


def test_a_sequence_counts_the_rows_that_fired_for_it() -> None:
    n, d = 64, 32
    case = FfnRows("f32", 2, n, d, False, 1.0)
    arena = Arena(MIB)
    arena.fill("f32")
    part = arena.parts(case.nbytes)[0]
    case.start(part)
    up = part.view(np.float32).reshape(n, 2, d)[:, 0]
    h = case._x @ up.T > 0
    nbytes, flops = case.counted(part)
    assert nbytes == (n + h.any(axis=0).sum()) * d * 4
    assert flops == 2 * d * (2 * n + h.sum())


def test_others_are_counted_on_the_usable_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = 1 / others.os.sysconf("SC_CLK_TCK")
    cpu = min(others.os.sched_getaffinity(0))
    now_s = [0.0, 0.0]
    monkeypatch.setattr(others.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(others.time, "process_time", lambda: now_s[1])
    stat = tmp_path / "proc/stat"
    assert others.Others(tmp_path).cpus() is None
    stat.parent.mkdir()
    stat.write_text(f"cpu  9 9 9 9\ncpu{cpu} 100 10 10 500 70 5 5 10 40 4\ncpu9999 1 1 1 1 1 1 1 1\n")
    meanwhile = others.Others(tmp_path)
    # 80 + 1 + 9 + 2 + 3 + 5 ticks; idle, waiting for disks and guests (who are in user) are none.
    stat.write_text(f"cpu  9 9 9 9\ncpu{cpu} 180 11 19 900 90 7 8 15 90 9\ncpu9999 99 9 9 9 9 9 9 9\n")
    now_s[:] = 100 * tick, 60 * tick
    assert meanwhile.cpus() == pytest.approx(0.4)
    now_s[1] = 200 * tick
    assert meanwhile.cpus() == 0.0


def test_other_programs_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    options = KernelOptions(verbs=("rope",), rounds=1, quick=True, torch=False)
    for taken, said in ((None, ""), (0.1, ""), (1.31, "other programs used 1.3 CPUs meanwhile")):
        monkeypatch.setattr(run.Others, "cpus", lambda _, taken=taken: taken)
        report = bench_kernels(options)
        assert report.other_cpus == taken
        assert any("other programs" in note for note in report.notes) == bool(said)
        assert said in " ".join(report.notes)
    assert "don't quote xTORCH and /SGEMM" in run._disturbed(0.2, True)[0]


def test_more_threads_than_cpus_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "default_threads", lambda: 1)
    options = KernelOptions(verbs=("rope",), rounds=1, threads=200, quick=True, torch=False)
    report = bench_kernels(options)
    assert report.threads == 1
    said = "200 threads are too many for 1 usable CPUs" if kernels.NATIVE else "--threads is ignored"
    assert any(said in note for note in report.notes)


def test_time_is_estimated_when_something_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: now_s[0])
    countdown = bench.Countdown()
    for done in range(7):
        countdown(done, 60)
        now_s[0] += 11
    lines = capsys.readouterr().err.splitlines()
    assert ["left" in line for line in lines] == [False] * 4 + [True] * 2
    assert "4 of 60 measurements done" in lines[3]
