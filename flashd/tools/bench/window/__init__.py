"""``flashd bench window``: time per token over budgets, measured and as ``flashd plan`` predicts it."""

from flashd.tools.bench.window.report import WindowReport, WindowRow
from flashd.tools.bench.window.run import WindowOptions, bench_window

__all__ = ["WindowOptions", "WindowReport", "WindowRow", "bench_window"]
