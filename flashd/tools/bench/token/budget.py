"""How much RAM the modes need, found out before anything is copied or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashd.errors import ConfigError
from flashd.layout.manifest import Manifest
from flashd.memory.budget import Demand, allocate, parse_budget
from flashd.predictor.open import predictor_bytes
from flashd.runtime.ffn import demand_of
from flashd.store.open import resident_entries
from flashd.store.predictors import read_calibration
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
    budget_bytes = parse_budget(budget, _whole_bytes(directory, manifest), 0)
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
    steps = -(-100 * least_bytes // (_STEP * _whole_bytes(directory, manifest)))
    return f"{max(_SHARE, _STEP * (steps + 1))}%"


def _whole_bytes(directory: Path, manifest: Manifest) -> int:
    return _resident_bytes(directory) + manifest.ffn.n_layers * manifest.ffn.layer_bytes


def _resident_bytes(directory: Path) -> int:
    return sum(entry.nbytes for entry in resident_entries(directory).values())


def _demand(directory: Path, manifest: Manifest, mode: Mode) -> Demand:
    """As ``build_ffn`` has it."""
    calibration = read_calibration(directory, manifest) if mode.sparse else None
    if calibration is None:
        return demand_of(manifest.ffn, _resident_bytes(directory), [False] * manifest.ffn.n_layers)
    return demand_of(
        manifest.ffn,
        _resident_bytes(directory) + predictor_bytes(calibration, manifest),
        [layer.masked for layer in calibration.layers],
        [layer.capacity_rows for layer in calibration.layers],
    )
