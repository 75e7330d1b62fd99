"""How much RAM the modes need, found out before anything is copied or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashd.errors import ConfigError
from flashd.layout.manifest import Manifest
from flashd.memory.budget import Demand, allocate, parse_budget
from flashd.runtime.accounting import bundle_demand, whole_bytes
from flashd.tools.bench.token.modes import Mode, modes_named

# About as much of the weights as the paper has in RAM.
_SHARE = 55
_STEP = 5


def checked_budget(directory: Path, manifest: Manifest, modes: Sequence[Mode], budget: str) -> int:
    """Bytes of a budget, which is enough for all modes.

    Raises:
        ConfigError: it is too small, ``auto``, or no budget.
        BundleError: the bundle's calibration is unusable.
    """
    if budget.strip().lower() == "auto":
        raise ConfigError("the budget is auto; give a share such as 50%, or a size such as 4GiB")
    budget_bytes = parse_budget(budget, whole_bytes(directory, manifest), 0)
    for mode in modes:
        if mode.resident:
            try:
                allocate(budget_bytes, _demand(directory, manifest, mode))
            except ConfigError as exc:
                raise ConfigError(f"mode {mode.name}: {exc}") from exc
    return budget_bytes


def sensible_budget(directory: Path, manifest: Manifest) -> str:
    """A share that all modes can be measured with: 55%, or what a small model's buffers ask for.

    Raises:
        BundleError: the bundle's calibration is unusable.
    """
    least_bytes = max(_demand(directory, manifest, mode).least_bytes for mode in modes_named(None))
    steps = -(-100 * least_bytes // (_STEP * whole_bytes(directory, manifest)))
    return f"{max(_SHARE, _STEP * (steps + 1))}%"


def _demand(directory: Path, manifest: Manifest, mode: Mode) -> Demand:
    """As ``build_ffn`` has it."""
    return bundle_demand(directory, manifest, "auto" if mode.sparse else "none")
