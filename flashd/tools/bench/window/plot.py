"""Time per token over budgets, measured and predicted (matplotlib; ``bench.plot.check_plot`` first)."""

from __future__ import annotations

from pathlib import Path

from flashd.tools.bench.window.report import WindowReport


def plot(report: WindowReport, path: Path) -> None:
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
    sizes = [row.budget_bytes / 1e9 for row in report.rows]
    axes.plot(sizes, [row.ms_per_token for row in report.rows], "o-", label="measured")
    axes.plot(sizes, [row.predicted_ms for row in report.rows], "s--", label="predicted")
    for size, row in zip(sizes, report.rows, strict=True):
        what = f"k {row.k}" if row.window_share else f"{row.resident_layers} layers"
        axes.annotate(
            f"{row.budget}\n{what}", (size, row.ms_per_token), fontsize="small", ha="left", va="bottom"
        )
    axes.margins(x=0.1, y=0.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("memory for weights and window, GB")
    axes.set_ylabel("ms per token")
    axes.legend(fontsize="small")
    figure.suptitle(report.title(), fontsize="medium")
    figure.savefig(path, format="png", dpi=110)
