"""``flashd bench kernels``: GB/s of every verb beside the memory's own, and beside torch.

In each round of a case everybody runs once, in turn: plain reads of memory, the verb, torch and, where
arithmetic may be the limit, the float32 matrix products of NumPy and torch. Figures are medians over the
rounds, ratios medians of the rounds' own ratios.

Counted are the bytes that a call must read once, 1e9 bytes to the GB; see ``KernelRow.bytes``. They lie
in cold memory, see ``memory``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np

from flashd import kernels
from flashd.errors import ConfigError
from flashd.memory.system import available_bytes
from flashd.tools.bench.kernels import catalog
from flashd.tools.bench.kernels.blas import blas_threads
from flashd.tools.bench.kernels.cases import Case, normal
from flashd.tools.bench.kernels.memory import (
    L3_TIMES,
    Arena,
    arena_bytes,
    cpu_model,
    l3_bytes,
)
from flashd.tools.bench.kernels.options import DTYPES, KernelOptions
from flashd.tools.bench.kernels.others import Others
from flashd.tools.bench.kernels.report import KernelReport, KernelRow
from flashd.tools.bench.kernels.turns import Subject
from flashd.tools.bench.kernels.with_torch import NoTorch, Torch

Progress = Callable[[int, int], None]

# Of each sample; a call that takes longer is a sample of its own.
_SAMPLE_S = 0.03
_QUICK_SAMPLE_S = 0.0  # the best of a few calls
# OpenMP's and OpenBLAS's threads burn a core for about that long after their work.
_SETTLE_S = 0.03
_QUICK_SETTLE_S = 0.005
# Of the float32 matrix product that others are compared with: [m, k] times [k, n].
_PEAK_SHAPE = (512, 2048, 2048)
_QUICK_PEAK_SHAPE = (128, 512, 512)
# Less of other programs does not show in the figures.
_OTHER_CPUS = 0.15


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
        counted, flops = zip(*map(case.counted, parts), strict=True)
        dram = self._dram()
        ours = Subject([case.ours(part) for part in parts], case.nbytes, counted)
        torch = self._torch_subject(case, counted)
        peaks = self._peaks() if case.beside_product else []
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
        return _row(case, fmean(flops) if case.flops is not None else None, ours, dram, torch, sgemm)

    def _dram(self) -> Subject:
        parts = self.arena.parts(self.read_bytes)
        calls = [lambda part=part: kernels.read_all(part) for part in parts]
        return Subject(calls, self.read_bytes, [float(self.read_bytes)] * len(parts))

    def _torch_subject(self, case: Case, counted: Sequence[float]) -> Subject | None:
        """torch in its fastest way, ready to take turns; None if it has no such operation for this type."""
        if self.torch is None:
            return None
        able: list[Subject] = []
        reason: Exception | None = None
        try:
            ways = case.torch(self.torch, self.arena.parts(case.nbytes))
        except NoTorch as exc:
            ways, reason = [], exc
        for calls in ways:
            subject = Subject(calls, case.nbytes, counted, foreign=True)
            try:
                subject.calibrate(self.arena, self.sample_s)
            except (RuntimeError, TypeError) as exc:  # no half-precision product, or an older torch
                reason = exc
            else:
                able.append(subject)
        if reason is not None and not able:
            self.notes.append(f"torch, {case}: {reason}")
        return min(able, key=lambda subject: subject.call_s, default=None)

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
        raise ConfigError(f"nothing to measure: no case of {_asked(options)}{_known(options)}")
    with ExitStack() as stack:
        stack.callback(kernels.set_threads, kernels.threads())
        notes = _set_threads(options.threads)
        blas = stack.enter_context(blas_threads(kernels.threads()))
        torch, no_torch = _find_torch(options)
        if torch is not None:
            stack.enter_context(torch.inference())
        l3 = l3_bytes()
        largest = max(case.nbytes for case in chosen.values())
        arena = Arena(arena_bytes(largest, options.quick, l3, available_bytes()))
        bench = _Bench(options, arena, torch, notes + [no_torch] * bool(no_torch))
        bench.notes += _about(options, arena.memory.size, l3)
        if not blas and any(case.beside_product for case in chosen.values()):
            bench.notes.append("NumPy's BLAS is no OpenBLAS and takes the threads that it wants")
        # A collector's pass over everything that was imported is no kernel's work.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        others = Others()
        rows = _rows(bench, chosen, measuring)
        other_cpus = others.cpus()
        bench.notes += _disturbed(other_cpus, bool(bench.sgemm) or torch is not None)
        return KernelReport(
            dram_gb_per_s=median(bench.dram),
            sgemm_gflops=median(bench.sgemm) if bench.sgemm else None,
            sgemm_shape=bench.peak_shape,
            other_cpus=other_cpus,
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


def _known(options: KernelOptions) -> str:
    """The batches that there are, where others were asked for."""
    if not options.batches:
        return ""
    there = {case.batch for case in catalog.cases(replace(options, batches=None))}
    batches = sorted(batch for batch in there if batch is not None)
    return f"; batches are {', '.join(map(str, batches))}" if batches else ""


def _set_threads(wanted: int | None) -> list[str]:
    """Set the kernels' threads; returns what one should know about it."""
    if wanted is None:
        return []
    if not kernels.NATIVE:
        return ["the NumPy twins have a single thread: --threads is ignored"]
    usable = min(kernels.default_threads(), kernels.MAX_THREADS)
    kernels.set_threads(min(wanted, usable))
    # More than can run at once would only wait for each other.
    return [f"{wanted} threads are too many for {usable} usable CPUs: taking {usable}"] * (wanted > usable)


def _disturbed(other_cpus: float | None, compared: bool) -> list[str]:
    """Whether other programs took so much that figures suffer."""
    if other_cpus is None or other_cpus <= _OTHER_CPUS:
        return []
    text = f"other programs used {other_cpus:.1f} CPUs meanwhile"
    if compared:
        return [f"{text}; torch and NumPy lose more by that than flashd: don't quote xTORCH and /SGEMM"]
    return [f"{text}: figures are lower than those of an idle machine"]


def _find_torch(options: KernelOptions) -> tuple[Torch | None, str]:
    """torch with the kernels' number of threads, or why there is none to compare with."""
    if not options.torch:
        return None, ""
    try:
        # A quick run has too few calls for their best to be one that nobody disturbed.
        return Torch(kernels.threads(), passive=options.quick), ""
    except NoTorch as exc:
        return None, f"torch: {exc}; nothing to compare with"


def _about(options: KernelOptions, nbytes: int, l3: int | None) -> list[str]:
    """What one should know about all figures."""
    notes = []
    if not kernels.NATIVE:
        notes.append("the native kernels are not installed: these are the NumPy twins")
    if options.quick:
        notes.append("--quick: too little memory and too short to quote; figures are partly of the caches")
    elif l3 is not None and nbytes < L3_TIMES * l3:
        notes.append(
            f"the L3 caches hold {l3 >> 20} MiB and only {nbytes >> 20} MiB are cycled through, a quarter of "
            f"the memory available or the limit of 2 GiB, expected {L3_TIMES} times as much as they hold: "
            "figures are partly of the caches"
        )
    return notes


def _row(
    case: Case,
    flops: float | None,
    ours: Subject,
    dram: Subject,
    torch: Subject | None,
    sgemm: list[float],
) -> KernelRow:
    seconds = median(ours.seconds)
    rounds = list(zip(ours.gb_per_s, dram.gb_per_s, strict=True))
    dram_ratio = median(own / plain for own, plain in rounds)
    torch_ratio = None
    if torch is not None:
        torch_ratio = median(own / other for own, other in zip(ours.gb_per_s, torch.gb_per_s, strict=True))
    peak_ratio = None
    if sgemm and flops is not None:
        own_gflops = [flops / 1e9 / spent for spent in ours.seconds]
        peak_ratio = median(own / peak for own, peak in zip(own_gflops, sgemm, strict=True))
    return KernelRow(
        verb=case.verb,
        dtype=case.dtype,
        batch=case.batch,
        shape=case.shape,
        compute_bound=case.compute_bound,
        bytes=round(fmean(ours.counted)),
        median_ms=seconds * 1e3,
        gb_per_s=median(ours.gb_per_s),
        dram_gb_per_s=median(dram.gb_per_s),
        dram_ratio=None if case.compute_bound else dram_ratio,
        torch_gb_per_s=median(torch.gb_per_s) if torch else None,
        torch_ratio=torch_ratio,
        gflops=None if flops is None else flops / 1e9 / seconds,
        sgemm_gflops=median(sgemm) if sgemm else None,
        peak_ratio=peak_ratio,
        rounds_gb_per_s=ours.gb_per_s,
        rounds_dram_gb_per_s=dram.gb_per_s,
        rounds_torch_gb_per_s=torch.gb_per_s if torch else [],
        rounds_sgemm_gflops=sgemm,
    )
