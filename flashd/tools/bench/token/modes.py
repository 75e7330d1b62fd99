"""The rows of the table: what each mode adds to the one before (LLM in a flash, tables 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashd.errors import ConfigError


@dataclass(frozen=True)
class Mode:
    """One way of generating.

    Attributes:
        name: in tables and JSON.
        what: for people.
        sparse: reads predicted neurons only; else whole layers.
        resident: layers that fit the budget stay in RAM; else nothing does.
        window: rows stay in RAM after the token that requested them.
        bundled: rows lie on flash as bundles; else in parts.
        prefetch: neurons of the next layer are read ahead.
    """

    name: str
    what: str
    sparse: bool = False
    resident: bool = True
    window: bool = False
    bundled: bool = True
    prefetch: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("naive", "every byte of the model is read for every token", resident=False),
        Mode("hybrid", "embeddings, attention and FFN layers that fit stay in RAM; streams the rest"),
        Mode("+predictor", "reads predicted neurons only, all for every token", True, bundled=False),
        Mode("+window", "neurons stay in RAM while the budget has room", True, window=True, bundled=False),
        Mode("+bundling", "a neuron's parts lie side by side on flash", True, window=True),
        Mode("+prefetch", "the next layer's neurons are read ahead", True, window=True, prefetch=True),
    )
}  # fmt: skip
NAIVE, HYBRID = "naive", "hybrid"


def modes_named(names: Sequence[str] | None) -> tuple[Mode, ...]:
    """Modes in the table's order; all for None. ``window`` means ``+window``.

    Raises:
        ConfigError: an unknown name.
    """
    if names is None:
        return tuple(MODES.values())
    wanted = set()
    for name in names:
        known = name if name in MODES else f"+{name}"
        if known not in MODES:
            raise ConfigError(f"unknown mode {name!r}; known: {', '.join(MODES)}")
        wanted.add(known)
    return tuple(mode for mode in MODES.values() if mode.name in wanted)
