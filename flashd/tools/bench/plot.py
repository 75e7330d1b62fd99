"""The plot of ``bench io``: throughput over read size and depth (LLM in a flash, Figure 2b)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashd.errors import ConfigError
from flashd.tools.bench.io import IoRow
from flashd.tools.bench.subjects import ENGINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    figure = Figure(figsize=(4.2 * (len(sizes) + 1), 4.4), layout="constrained")
    panels: list[Axes] = figure.subplots(1, len(sizes) + 1, sharey=True, squeeze=False)[0].tolist()
    for axes, size in zip(panels, sizes, strict=False):
        _over_depth(axes, [row for row in random if row.size_bytes == size])
        axes.set_title(f"random reads of {size / 1024:g} KiB")
    _over_size(panels[-1], rows)
    panels[0].set_ylabel("GB/s")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)


def _look(store: str, engine: str) -> dict[str, Any]:
    """A colour for each engine, a line for each store."""
    color = f"C{ENGINES.index(engine)}" if engine in ENGINES else "black"
    return {"color": color, "linestyle": "-" if store == "file" else ":"}


def _over_depth(axes: Axes, rows: Sequence[IoRow]) -> None:
    lines: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        lines[row.store, row.engine][row.depth] = row.gb_per_s
        if row.fio_gb_per_s is not None:
            lines[row.store, "fio io_uring"][row.depth] = row.fio_gb_per_s
    for (store, engine), line in lines.items():
        marker = "o" if engine in ENGINES else "x"
        label = f"{engine}, {store}"
        axes.plot(list(line), list(line.values()), marker=marker, label=label, **_look(store, engine))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("reads in flight")
    axes.grid(alpha=0.3)


def _over_size(axes: Axes, rows: Sequence[IoRow]) -> None:
    """The fastest depth of each size; sequential reads are a point of their own."""
    for marker, pattern in (("o", "random"), ("*", "sequential")):
        best: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row.pattern == pattern:
                sizes = best[row.store, row.engine]
                sizes[row.size_bytes] = max(row.gb_per_s, sizes.get(row.size_bytes, 0.0))
        for (store, engine), sizes in best.items():
            axes.plot(list(sizes), list(sizes.values()), marker=marker, **_look(store, engine))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes a read (star: sequential)")
    axes.set_title("fastest depth of each size")
    axes.grid(alpha=0.3)
