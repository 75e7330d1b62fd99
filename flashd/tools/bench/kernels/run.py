"""``flashd bench kernels``: GB/s of every verb beside the memory's own, and beside torch.

In each round of a case everybody runs once, in turn: plain reads of memory, the verb, torch and, where
arithmetic is the limit, the float32 matrix products of NumPy and torch. Figures are medians over the
rounds, ratios medians of the rounds' own ratios.

Counted are the bytes that a call must read once, 1e9 bytes to the GB; see ``KernelRow.bytes``. They lie
in cold memory, see ``memory``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from flashd import kernels
from flashd.errors import ConfigError
from flashd.tools.bench.kernels import catalog
from flashd.tools.bench.kernels.blas import blas_threads
from flashd.tools.bench.kernels.cases import Case, normal
from flashd.tools.bench.kernels.memory import (
    Arena,
    arena_bytes,
    available_bytes,
    cpu_model,
    l3_bytes,
)
from flashd.tools.bench.kernels.options import DTYPES, KernelOptions
from flashd.tools.bench.kernels.report import KernelReport, KernelRow
from flashd.tools.bench.kernels.turns import Subject
from flashd.tools.bench.kernels.with_torch import NoTorch, Torch

Progress = Callable[[int, int], None]

# Of each sample; a call that takes longer is a sample of its own.
_SAMPLE_S = 0.03
_QUICK_SAMPLE_S = 0.0  # one call
# OpenMP's and OpenBLAS's threads burn a core for about that long after their work.
_SETTLE_S = 0.03
_QUICK_SETTLE_S = 0.002
# Of the matrix product that shows the peak: [m, k] times [k, n].
_PEAK_SHAPE = (512, 2048, 2048)
_QUICK_PEAK_SHAPE = (128, 512, 512)


@dataclass
class _Bench:
    """State of one run."""

    options: KernelOptions
    arena: Arena
    torch: Torch | None
    notes: list[str] = field(default_factory=list)
    dram: list[float] = field(default_factory=list)
    sgemm: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        quick = self.options.quick
        self.sample_s, self.settle_s = (_QUICK_SAMPLE_S, _QUICK_SETTLE_S) if quick else (_SAMPLE_S, _SETTLE_S)
        self.read_bytes = min(catalog.read_bytes(quick), self.arena.memory.size)
        self.peak_shape = _QUICK_PEAK_SHAPE if quick else _PEAK_SHAPE

    def measure(self, case: Case) -> KernelRow:
        """All rounds of a case."""
        self.arena.fill(case.dtype)
        parts = self.arena.parts(case.nbytes)
        case.start(parts[0])
        counted = [float(case.counted_bytes(part)) for part in parts]
        dram = self._dram()
        ours = Subject([case.ours(part) for part in parts], case.nbytes, counted)
        torch = self._torch_subject(case, counted)
        peaks = self._peaks() if case.compute_bound else []
        everybody = [dram, ours, *([torch] if torch else []), *peaks]
        for subject in everybody:
            if subject is not torch:
                subject.calibrate(self.arena, self.sample_s)
        for turn in range(self.options.rounds):
            start = turn % len(everybody)  # who begins changes from round to round
            for subject in everybody[start:] + everybody[:start]:
                subject.sample(self.arena, self.settle_s)
        m, k, n = self.peak_shape
        best_s = map(min, zip(*(peak.seconds for peak in peaks), strict=True))
        sgemm = [2e-9 * m * k * n / seconds for seconds in best_s]
        self.dram += dram.gb_per_s
        self.sgemm += sgemm
        return _row(case, ours, dram, torch, sgemm)

    def _dram(self) -> Subject:
        parts = self.arena.parts(self.read_bytes)
        calls = [lambda part=part: kernels.read_all(part) for part in parts]
        return Subject(calls, self.read_bytes, [float(self.read_bytes)] * len(parts))

    def _torch_subject(self, case: Case, counted: Sequence[float]) -> Subject | None:
        """torch, ready to take turns; None if it has no such operation, or not for this type."""
        if self.torch is None:
            return None
        calls = case.torch(self.torch, self.arena.parts(case.nbytes))
        if calls is None:
            return None
        subject = Subject(calls, case.nbytes, counted, foreign=True)
        try:
            subject.calibrate(self.arena, self.sample_s)
        except RuntimeError as exc:  # e.g. no half-precision product on this CPU
            self.notes.append(f"torch, {case}: {exc}")
            return None
        return subject

    def _peaks(self) -> list[Subject]:
        """The float32 matrix product in NumPy and in torch."""
        m, k, n = self.peak_shape
        a, b, out = normal(m, k), normal(k, n), np.empty((m, n), np.float32)
        calls: list[Callable[[], object]] = [lambda: np.matmul(a, b, out)]
        if self.torch is not None:
            calls.append(self.torch.matmul(a, b))
        return [Subject([call], 0, [0.0], foreign=True) for call in calls]


def bench_kernels(options: KernelOptions, measuring: Progress = lambda done, total: None) -> KernelReport:
    """Measure the verbs.

    Args:
        options: what to measure.
        measuring: told how many cases are done.

    Raises:
        ConfigError: no case is of the verbs, dtypes and batches that were asked for.
        FlashdError: too little memory.
    """
    chosen = dict(enumerate(catalog.cases(options)))
    if not chosen:
        raise ConfigError(f"nothing to measure: no case of {_asked(options)}")
    with ExitStack() as stack:
        before = kernels.threads()
        stack.callback(kernels.set_threads, before)
        kernels.set_threads(options.threads or before)
        blas = stack.enter_context(blas_threads(kernels.threads()))
        torch, no_torch = _find_torch(options)
        if torch is not None:
            stack.enter_context(torch.inference())
        l3 = l3_bytes()
        largest = max(case.nbytes for case in chosen.values())
        arena = Arena(arena_bytes(largest, options.quick, l3, available_bytes()))
        bench = _Bench(options, arena, torch, [no_torch] if no_torch else [])
        bench.notes += _about(options, arena.memory.size, l3)
        if not blas and any(case.compute_bound for case in chosen.values()):
            bench.notes.append("NumPy's BLAS is no OpenBLAS and takes the threads that it wants")
        # A collector's pass over everything that was imported is no kernel's work.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        rows = _rows(bench, chosen, measuring)
        return KernelReport(
            dram_gb_per_s=median(bench.dram),
            sgemm_gflops=median(bench.sgemm) if bench.sgemm else None,
            rows=rows,
            simd=kernels.simd_level(),
            native=kernels.NATIVE,
            threads=kernels.threads(),
            cpu=cpu_model(),
            torch=torch.version if torch else None,
            memory_bytes=arena.memory.size,
            l3_bytes=l3,
            rounds=options.rounds,
            quick=options.quick,
            notes=bench.notes,
        )


def _rows(bench: _Bench, chosen: dict[int, Case], measuring: Progress) -> list[KernelRow]:
    """Rows in the order of the cases, measured type by type: the arena is filled once for each."""
    order = sorted(chosen, key=lambda number: DTYPES.index(chosen[number].dtype))
    rows: dict[int, KernelRow] = {}
    for done, number in enumerate(order):
        measuring(done, len(order))
        # Its arrays go with it.
        rows[number] = bench.measure(chosen.pop(number))
    measuring(len(order), len(order))
    return [rows[number] for number in sorted(rows)]


def _asked(options: KernelOptions) -> str:
    """``gemv has dtype u8 and batch 1``."""
    asked = [f"dtype {' or '.join(options.dtypes)}"] if options.dtypes else []
    if options.batches:
        asked.append(f"batch {' or '.join(map(str, options.batches))}")
    return f"{' or '.join(options.verbs or ('any verb',))} has {' and '.join(asked)}"


def _find_torch(options: KernelOptions) -> tuple[Torch | None, str]:
    """torch with the kernels' number of threads, or why there is none to compare with."""
    if not options.torch:
        return None, ""
    try:
        return Torch(kernels.threads()), ""
    except NoTorch as exc:
        return None, f"torch: {exc}; nothing to compare with"


def _about(options: KernelOptions, nbytes: int, l3: int | None) -> list[str]:
    """What one should know about all figures."""
    notes = []
    if not kernels.NATIVE:
        notes.append("the native kernels are not installed: these are the NumPy twins")
    if options.quick:
        notes.append("--quick: too little memory and too short to quote; figures are partly of the caches")
    elif l3 is not None and nbytes < l3:
        notes.append(
            f"the L3 caches hold {l3 >> 20} MiB and only {nbytes >> 20} MiB are cycled through, a quarter of "
            "the memory available or the limit of 2 GiB: figures are partly of the caches"
        )
    return notes


def _row(case: Case, ours: Subject, dram: Subject, torch: Subject | None, sgemm: list[float]) -> KernelRow:
    seconds = median(ours.seconds)
    rounds = list(zip(ours.gb_per_s, dram.gb_per_s, strict=True))
    dram_ratio = median(own / plain for own, plain in rounds)
    torch_ratio = None
    if torch is not None:
        torch_ratio = median(own / other for own, other in zip(ours.gb_per_s, torch.gb_per_s, strict=True))
    peak_ratio = None
    if sgemm and case.flops is not None:
        own_gflops = [case.flops / 1e9 / spent for spent in ours.seconds]
        peak_ratio = median(own / peak for own, peak in zip(own_gflops, sgemm, strict=True))
    return KernelRow(
        verb=case.verb,
        dtype=case.dtype,
        batch=case.batch,
        shape=case.shape,
        compute_bound=case.compute_bound,
        bytes=sum(ours.counted) / len(ours.counted),
        median_ms=seconds * 1e3,
        gb_per_s=median(ours.gb_per_s),
        dram_gb_per_s=median(dram.gb_per_s),
        dram_ratio=None if case.compute_bound else dram_ratio,
        torch_gb_per_s=median(torch.gb_per_s) if torch else None,
        torch_ratio=torch_ratio,
        gflops=None if case.flops is None else case.flops / 1e9 / seconds,
        sgemm_gflops=median(sgemm) if sgemm else None,
        peak_ratio=peak_ratio,
        rounds_gb_per_s=ours.gb_per_s,
        rounds_dram_gb_per_s=dram.gb_per_s,
        rounds_torch_gb_per_s=torch.gb_per_s if torch else [],
        rounds_sgemm_gflops=sgemm,
    )
