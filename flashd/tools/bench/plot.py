"""The plot of ``bench io``: throughput over read size and depth (LLM in a flash, Figure 2b)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashd.errors import ConfigError
from flashd.tools.bench.report import IoRow
from flashd.tools.bench.subjects import ENGINES

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_FIO, _FIO_BEST = "fio", "fio, registered"


def check_plot(path: Path) -> None:
    """Find out before a long run that its plot could not be written.

    Raises:
        ConfigError: matplotlib is not installed, or the file is not a PNG in a directory that exists.
    """
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as exc:
        raise ConfigError("--plot needs matplotlib: pip install 'flashd[plot]'") from exc
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes PNG and {path} ends with {path.suffix!r}; name it *.png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: {path.parent}: no such directory")


def plot(rows: Sequence[IoRow], title: str, path: Path) -> None:
    """Draw random reads over depth, one panel for each size, and throughput over size.

    Args:
        rows: of an ``IoReport``.
        title: above all.
        path: the PNG to write.

    Raises:
        OSError: it cannot be written.
    """
    # Without pyplot: no window system is asked for and nothing global stays behind.
    from matplotlib.figure import Figure

    random = [row for row in rows if row.pattern == "random"]
    sizes = sorted({row.size_bytes for row in random})
    bundles = sorted({row.bundle for row in rows})
    figure = Figure(figsize=(4.2 * (len(sizes) + 1), 5.2), layout="constrained")
    panels: list[Axes] = figure.subplots(1, len(sizes) + 1, sharey=True, squeeze=False)[0].tolist()
    for axes, size in zip(panels, sizes, strict=False):
        _over_depth(axes, [row for row in random if row.size_bytes == size], bundles)
        axes.set_title(f"random reads of {_short(size)}")
    _over_size(panels[-1], rows, bundles)
    panels[0].set_ylabel("GB/s")
    panels[0].set_ylim(bottom=0)
    # One for all panels: the lines are the same.
    named: dict[str, Artist] = {}
    for axes in panels:
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, line)
    figure.legend(list(named.values()), list(named), fontsize="small", loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)


# A line: bundle, store, who reads.
_Key = tuple[str, str, str]


def _speeds(row: IoRow) -> Iterator[tuple[_Key, float]]:
    """The figures that one row holds."""
    yield (row.bundle, row.store, row.engine), row.gb_per_s
    if row.fio_gb_per_s is not None:
        yield (row.bundle, row.store, _FIO), row.fio_gb_per_s
    if row.fio_best_gb_per_s is not None:
        yield (row.bundle, row.store, _FIO_BEST), row.fio_best_gb_per_s


def _look(bundles: Sequence[str], key: _Key) -> dict[str, Any]:
    """A colour for each engine; line and marker for each store."""
    bundle, store, who = key
    fio = {_FIO: "black", _FIO_BEST: "grey"}
    color = f"C{ENGINES.index(who)}" if who in ENGINES else fio[who]
    line, marker = ("-", "o") if store == "file" else (":", "s")
    label = f"{who}, {store}" + (f" ({bundle})" if len(bundles) > 1 else "")
    return {"color": color, "linestyle": line, "marker": "x" if who in fio else marker, "label": label}


def _over_depth(axes: Axes, rows: Sequence[IoRow], bundles: Sequence[str]) -> None:
    lines: dict[_Key, dict[int, float]] = defaultdict(dict)
    for row in rows:
        for key, speed in _speeds(row):
            lines[key][row.depth] = speed
    for key, line in lines.items():
        axes.plot(list(line), list(line.values()), **_look(bundles, key))
    _ticks(axes, sorted({row.depth for row in rows}), str)
    axes.set_xlabel("reads in flight")


def _over_size(axes: Axes, rows: Sequence[IoRow], bundles: Sequence[str]) -> None:
    """The fastest depth of each size; sequential reads are a point of their own."""
    for pattern in ("random", "sequential"):
        best: dict[_Key, dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row.pattern == pattern:
                for key, speed in _speeds(row):
                    best[key][row.size_bytes] = max(speed, best[key].get(row.size_bytes, 0.0))
        for key, sizes in best.items():
            look = _look(bundles, key)
            if pattern == "sequential":
                look |= {"marker": "*", "markersize": 10, "label": "_sequential"}  # not in the legend
            axes.plot(list(sizes), list(sizes.values()), **look)
    _ticks(axes, sorted({row.size_bytes for row in rows}), _short)
    axes.set_xlabel("bytes a read (star: sequential)")
    axes.set_title("fastest depth of each size")


def _ticks(axes: Axes, values: Sequence[int], text: Callable[[int], str]) -> None:
    """A logarithmic axis that names the values measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [text(value) for value in values])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _short(size_bytes: int) -> str:
    """``4096`` -> ``4K``."""
    return f"{size_bytes / 1024:g}K" if size_bytes < 1 << 20 else f"{size_bytes / (1 << 20):g}M"
