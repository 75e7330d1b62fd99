"""What ``flashd bench io`` and ``flashd bench kernels`` measured, for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from flashd.cli.render import human_bytes, paragraph, safe_text, table
from flashd.tools.bench.kernels.legend import BATCH, HOT, shapes

if TYPE_CHECKING:
    from flashd.tools.bench.kernels.report import KernelReport, KernelRow
    from flashd.tools.bench.report import IoReport, IoRow

# More than that on the event loop and other requests notice.
_MAX_CALLBACK_CPU_MS = 5.0


def print_io(report: IoReport) -> None:
    """The result for people: a table for each bundle, and what one should know about it."""
    notes = list(dict.fromkeys(row.note for row in report.rows if row.note))
    bundles = list(dict.fromkeys((row.bundle, row.store) for row in report.rows))
    headers = ["ENGINE", "PATTERN", "SIZE", "DEPTH", "GB/s", "FIO", "RATIO", "CPU us"]
    headers += ["NOTE"] * bool(notes)
    if sys.stdout.isatty():
        for bundle in bundles:
            if len(bundles) > 1:
                print(safe_text(f"{bundle[0]} ({bundle[1]} store)"))
            rows = [row for row in report.rows if (row.bundle, row.store) == bundle]
            _aligned(headers, [_io_cells(row, notes) for row in rows])
            print()
    else:
        several = len(bundles) > 1
        cells = [[row.bundle, row.store] * several + _io_cells(row, notes) for row in report.rows]
        table(["BUNDLE", "STORE"] * several + headers, cells)
        print()
    for number, text in enumerate(notes, 1):
        paragraph(f"{number}: {text}")
    _about_io(report)


def _io_cells(row: IoRow, notes: Sequence[str]) -> list[str]:
    return [
        row.engine,
        row.pattern,
        human_bytes(row.size_bytes),
        str(row.depth),
        f"{row.gb_per_s:.3f}",
        "-" if row.fio_gb_per_s is None else f"{row.fio_gb_per_s:.3f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.cpu_us_per_read:.1f}",
        *([str(notes.index(row.note) + 1) if row.note else ""] if notes else []),
    ]


def _aligned(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Sequence[int] = (0, 1),
    close: Sequence[int] = (),
) -> None:
    """A table without lines, which needs at most 80 columns.

    Those of ``words`` are no numbers; those of ``close`` have headers wider than their numbers, so that one
    space before them will do.
    """
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = [
            cell.ljust(width) if index in words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        spaced = (" " * (1 if index in close else 2) + cell for index, cell in enumerate(cells))
        print("".join(spaced)[2:].rstrip())


def _about_io(report: IoReport) -> None:
    """What the columns are, and what went wrong."""
    paragraph("CPU us: microseconds of CPU time for each read")
    if report.fio is not None:
        paragraph(
            f"FIO: GB/s of {report.fio}, io_uring, on the same files; it reads into a few small buffers on 4 "
            "KiB pages again and again, flashd as the daemon does into huge pages, which suit large reads"
        )
    best = [
        row.gb_per_s / row.fio_best_gb_per_s
        for row in report.rows
        if row.engine == "uring+registered" and row.fio_best_gb_per_s
    ]
    if best:
        paragraph(
            "fio at its best (buffers and files registered, huge pages): uring+registered reaches "
            f"{median(best):.2f} of it (median of {len(best)} rows; each is in --json)"
        )
    if report.max_callback_cpu_ms > _MAX_CALLBACK_CPU_MS:
        paragraph(
            f"warning: a callback held the event loop for {report.max_callback_cpu_ms:.1f} ms of CPU time, "
            f"expected at most {_MAX_CALLBACK_CPU_MS:g}"
        )
    paragraph(f"device: {report.title()}")


def print_kernels(report: KernelReport) -> None:
    """The result for people: a table, what its columns are, and what it was measured on."""
    headers = ("VERB", "TYPE", "BATCH", "SHAPE", "GB/s", "/DRAM", "GFLOP/s", "/SGEMM", "xTORCH")
    cells = [_kernel_cells(row) for row in report.rows]
    if sys.stdout.isatty():
        _aligned(headers, cells, words=(0, 1, 3), close=(2, 5, 7, 8))
    else:
        table(headers, cells)
    print()
    paragraph(f"BATCH: {BATCH}")
    paragraph(f"SHAPE: {shapes({row.verb for row in report.rows})}")
    paragraph(
        f"/DRAM: share of the {report.dram_gb_per_s:.2f} GB/s at which all threads read plain memory "
        "(median ratio of the rounds; - where arithmetic is the limit)"
    )
    if report.sgemm_gflops is not None:
        m, k, n = report.sgemm_shape
        paragraph(
            f"/SGEMM: share of the {report.sgemm_gflops:.0f} GFLOP/s of the float32 matrix product "
            f"[{m},{k}] x [{k},{n}], {HOT}, {'best of NumPy and torch' if report.torch else 'of NumPy'}"
        )
    if report.torch is not None:
        text = (
            f"xTORCH: how many times as fast as torch {report.torch} in its fastest way on the same threads"
        )
        if any(row.verb == "ffn_rows" and row.torch_ratio is not None for row in report.rows):
            text += "; ffn_rows 100% beside dense layers, which cannot skip neurons that did not fire"
        paragraph(text)
    paragraph(f"{report.cpu}, {_kernels_text(report)}; {_memory_text(report)}; {_rounds_text(report)}")


def _kernel_cells(row: KernelRow) -> list[str]:
    return [
        row.verb,
        row.dtype,
        "-" if row.batch is None else str(row.batch),
        row.shape,
        *map(_three_digits, (row.gb_per_s, row.dram_ratio, row.gflops, row.peak_ratio, row.torch_ratio)),
    ]


def _three_digits(value: float | None) -> str:
    """``12.345`` -> ``12.3``, at most two after the point."""
    if value is None:
        return "-"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _kernels_text(report: KernelReport) -> str:
    kind = "native kernels" if report.native else "NumPy kernels"
    return f"{kind}, SIMD level {report.simd}, {report.threads} thread{'s' * (report.threads > 1)}"


def _memory_text(report: KernelReport) -> str:
    l3 = "unknown" if report.l3_bytes is None else human_bytes(report.l3_bytes)
    return f"cycling through {human_bytes(report.memory_bytes)}, L3 {l3}"


def _rounds_text(report: KernelReport) -> str:
    return f"{report.rounds} round{'s' * (report.rounds > 1)}"
