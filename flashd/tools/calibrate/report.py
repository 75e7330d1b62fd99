"""``calibration.md`` and, where matplotlib is installed, ``calibration.png``: what was found, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from flashd.layout.calibration import LayerCalibration
from flashd.tools.calibrate.run import CalibrateReport
from flashd.tools.calibrate.write import PLOT, REPORT

_WINDOWS = (1, 2, 5, 10, 30, 64)
LAYER_COLUMNS = (
    "layer", "mask", "rank", "missed %", "in vain %", "norm missed %", "requested %", "fired %",
    "look ahead found %", "right %",
)  # fmt: skip


def write_report(report: CalibrateReport) -> list[Path]:
    """Write both into the bundle.

    Returns:
        The files written.

    Raises:
        OSError: they can't be.
    """
    directory = Path(report.directory)
    (directory / REPORT).write_text("\n".join(_lines(report)) + "\n", encoding="utf-8")
    (directory / PLOT).unlink(missing_ok=True)
    return [directory / REPORT, *_plot(report, directory / PLOT)]


def layer_rows(report: CalibrateReport) -> list[tuple[str, ...]]:
    """One row a layer, as ``LAYER_COLUMNS`` says; shares in percent."""
    rows: list[tuple[str, ...]] = []
    pairs = zip(report.calibration.layers, report.would_request, report.lookahead, strict=True)
    for index, (layer, would, look) in enumerate(pairs):
        rows.append(
            (
                str(index),
                "yes" if layer.masked else "no",
                str(layer.rank) if layer.masked else "-",
                _percent(layer.false_negative) if layer.masked else "-",
                _percent(layer.false_positive) if layer.masked else "-",
                _percent(layer.missed_norm) if layer.masked else "-",
                _percent(would),
                _percent(layer.fired),
                _percent(look["recall"]) if look else "-",
                _percent(look["precision"]) if look else "-",
            )
        )
    return rows


def summary(report: CalibrateReport) -> str:
    """The means over the layers with a mask, in a sentence."""
    masked = [layer for layer in report.calibration.layers if layer.masked]
    if not masked:
        return "no layer has a mask: all are too dense for a predictor to pay"
    missed, vain, norm, requested, fired = (
        _percent(sum(getattr(layer, name) for layer in masked) / len(masked))
        for name in ("false_negative", "false_positive", "missed_norm", "requested", "fired")
    )
    return (
        f"{len(masked)} of {len(report.calibration.layers)} layers have a mask; on text not trained on, "
        f"{missed} % of the neurons that fire are missed ({norm} % of the output's norm) and {vain} % of the "
        f"others requested; {requested} % are requested, {fired} % fire per token"
    )


def perplexity_text(report: CalibrateReport) -> str:
    """What thresholds and predictors cost."""
    parts = [f"{name} {value:.3f}" for name, value in report.perplexity.items()]
    return f"perplexity on {report.test_tokens} tokens: {', '.join(parts)}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}" if share < 0.1 else f"{100 * share:.1f}"


def _lines(report: CalibrateReport) -> Iterator[str]:
    calibration = report.calibration
    yield "# Calibration"
    yield ""
    yield f"{summary(report)}."
    yield ""
    yield f"{perplexity_text(report)}."
    yield ""
    yield f"{calibration.tokens} tokens, predictor {calibration.predictor}. The figures are of parts of"
    yield "the texts that neither trained a predictor nor chose a threshold."
    yield ""
    yield from _table(("fact", "value"), sorted(calibration.provenance.items()))
    yield from _table(LAYER_COLUMNS, layer_rows(report))
    limit = calibration.provenance["max_requested"]
    yield f"A layer has no mask where its predictor would request more than {limit} of the neurons: reading"
    yield "it whole, in one stretch, is faster."
    yield ""
    for title, name in (("Requested", "s_agg_requested"), ("Fired", "s_agg_fired")):
        yield f"## {title} by any of k tokens in a row, % of the neurons"
        yield ""
        yield from _table(("layer", *map(str, _WINDOWS)), _curve_rows(calibration.layers, name))
    yield "## Rows that a window of k tokens needs (99th percentile)"
    yield ""
    rows: list[tuple[str, ...]] = [
        (str(i), *(str(layer.capacity_rows[k - 1]) for k in _WINDOWS))
        for i, layer in enumerate(calibration.layers)
        if layer.capacity_rows
    ]
    yield from _table(("layer", *map(str, _WINDOWS)), rows)
    if any(report.thresholds):
        yield "## Thresholds"
        yield ""
        rows = [(str(i), f"{value:.6g}") for i, value in enumerate(report.thresholds)]
        yield from _table(("layer", "activations up to it count as zero"), rows)
    if any(report.curves):
        yield "## Ranks tried, on the text that chose the thresholds"
        yield ""
        tried = [(i, point) for i, curve in enumerate(report.curves) for point in curve]
        names = ("false_negative", "false_positive", "requested")
        rows = [
            (
                str(i),
                f"{p['rank']:.0f}",
                *(_percent(p[name]) for name in names),
                "no" if p["trial"] else "yes",
            )
            for i, p in tried
        ]
        yield from _table(("layer", "rank", "missed %", "in vain %", "requested %", "fully trained"), rows)


def _curve_rows(layers: Sequence[LayerCalibration], name: str) -> list[tuple[str, ...]]:
    curves = [(i, getattr(layer, name)) for i, layer in enumerate(layers)]
    return [(str(i), *(_percent(curve[k - 1]) for k in _WINDOWS)) for i, curve in curves if curve]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield "|---" * len(headers) + "|"
    for row in rows:
        # A pipe in a file's name would end the cell.
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _plot(report: CalibrateReport, path: Path) -> list[Path]:
    """Usage curves, and errors by layer; nothing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return []
    layers = report.calibration.layers
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for index, layer in enumerate(layers):
        if layer.s_agg_requested:
            windows = range(1, len(layer.s_agg_requested) + 1)
            left.plot(windows, [100 * share for share in layer.s_agg_requested], label=f"layer {index}")
    left.set(
        xlabel="tokens in the window", ylabel="neurons requested, %", title="Aggregated usage", ylim=(0, 100)
    )
    if len(layers) <= 12 and any(layer.s_agg_requested for layer in layers):
        left.legend(fontsize=7)
    numbers = [i for i, layer in enumerate(layers) if layer.masked]
    for name, label in (("false_negative", "missed"), ("false_positive", "in vain"), ("fired", "fired")):
        right.plot(numbers, [100 * getattr(layers[i], name) for i in numbers], marker="o", label=label)
    right.set(xlabel="layer", ylabel="%", title="Errors of the predictors")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    return [path]
