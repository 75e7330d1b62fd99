"""Time per token as stacked bars, a bar for each mode (matplotlib; ``bench.plot.check_plot`` first)."""

from __future__ import annotations

from pathlib import Path

from flashd.tools.bench.token.report import TokenReport

_PARTS = (
    ("flash_wait_ms", "flash wait"),
    ("memory_ms", "memory"),
    ("compute_ms", "compute"),
    ("overhead_ms", "overhead"),
)


def plot(report: TokenReport, path: Path) -> None:
    """Draw a report.

    Args:
        report: what was measured.
        path: the PNG to write.

    Raises:
        OSError: it cannot be written.
    """
    # Without pyplot: no window system is asked for and nothing global stays behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [row.mode for row in report.rows]
    left = [0.0] * len(names)
    for attribute, label in _PARTS:
        values = [getattr(row, attribute) for row in report.rows]
        axes.barh(names, values, left=left, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, (row, end) in enumerate(zip(report.rows, left, strict=True)):
        text = f" {row.ms_per_token:.0f} ms, {row.gb_read_per_token:.2f} GB"
        axes.text(end, place, text, va="center", fontsize="small")
    axes.margins(x=0.25)
    axes.invert_yaxis()
    axes.set_xlabel("ms per token")
    axes.legend(fontsize="small", loc="lower right")
    figure.suptitle(report.title(), fontsize="medium")
    figure.savefig(path, format="png", dpi=110)
