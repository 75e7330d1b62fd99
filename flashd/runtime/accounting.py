"""What a bundle will take of memory, known before anything of it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from flashd.config import MAX_BATCH, DaemonConfig
from flashd.errors import ConfigError
from flashd.kv.contiguous import kv_bytes_per_token
from flashd.layout.manifest import Manifest
from flashd.memory.account import KV_BLOCK_TOKENS, Beside, MemoryAccount
from flashd.memory.budget import Demand, parse_budget
from flashd.memory.governor import reserve_bytes
from flashd.memory.system import Reading, SystemMemory
from flashd.predictor.open import predictor_bytes
from flashd.prefetch.stream import RING_BUFFERS, ring_slice_rows
from flashd.store.open import resident_entries
from flashd.store.predictors import read_calibration
from flashd.types import FFNGeometry, ModelSpec

log = logging.getLogger("flashd.memory")

# Prompt chunks have fixed boundaries: how a prompt was computed depends on nothing but itself.
PREFILL_CHUNK_TOKENS = 256
# What serving adds to a process that has loaded its model: requests, answers, what the allocator keeps.
SERVING_BYTES = 8 << 20
# Tables of the window for each neuron of the model: its row, its step, its count, the row's owner ...
_TABLE_BYTES = 34
_MB = 1e6


def demand_of(
    geometry: FFNGeometry,
    fixed_bytes: int,
    masked: Sequence[bool],
    capacity_rows: Sequence[Sequence[int]] = (),
) -> Demand:
    """What a model would like to have in RAM, stream buffers included; arguments as ``Demand`` has them."""
    ring_bytes = RING_BUFFERS * ring_slice_rows(geometry) * geometry.stride_bytes
    return Demand(geometry, fixed_bytes, ring_bytes, masked, capacity_rows)


def resident_bytes(directory: Path) -> int:
    """Weights that always stay in RAM."""
    return sum(entry.nbytes for entry in resident_entries(directory).values())


def whole_bytes(directory: Path, manifest: Manifest) -> int:
    """All weights: what a share of memory is a share of."""
    return resident_bytes(directory) + manifest.ffn.n_layers * manifest.ffn.layer_bytes


def as_share(budget_bytes: int, all_bytes: int) -> str:
    """So many bytes for weights and window, as a share of all weights: a setting of ``memory``."""
    return f"{100 * (budget_bytes + 0.5) / all_bytes:.15g}%"


def bundle_demand(directory: Path, manifest: Manifest, predictor: str = "auto") -> Demand:
    """What a bundle's headers say it would like to have in RAM.

    Args:
        directory: the bundle.
        manifest: from ``open_manifest``.
        predictor: as in ``DaemonConfig``.

    Raises:
        BundleError: the bundle's calibration is unusable.
        BundleCorruptError: a header is.
    """
    fixed, n_layers = resident_bytes(directory), manifest.ffn.n_layers
    if predictor == "oracle":
        return demand_of(manifest.ffn, fixed, [True] * n_layers)
    calibration = read_calibration(directory, manifest) if predictor == "auto" else None
    if calibration is None:
        return demand_of(manifest.ffn, fixed, [False] * n_layers)
    return demand_of(
        manifest.ffn,
        fixed + predictor_bytes(calibration, manifest),
        [layer.masked for layer in calibration.layers],
        [layer.capacity_rows for layer in calibration.layers],
    )


def beside_of(
    manifest: Manifest, kv_dtype: str, base_bytes: int, *, masked: bool, kv_tokens: int = KV_BLOCK_TOKENS
) -> Beside:
    """Memory beside a bundle's weights.

    Args:
        manifest: of the bundle.
        kv_dtype: element type of the KV cache.
        base_bytes: what the process has without the model.
        masked: whether any layer has a mask, and the window its tables.
        kv_tokens: KV cache that is set aside even while nothing runs.
    """
    spec, ffn = manifest.model, manifest.ffn
    tables = _TABLE_BYTES * ffn.n_layers * ffn.n_neurons if masked else 0
    return Beside(
        base_bytes + tables + SERVING_BYTES,
        prompt_bytes(spec),
        kv_bytes_per_token(spec, kv_dtype),
        spec.max_context,
        kv_tokens,
    )


def prompt_bytes(spec: ModelSpec) -> int:
    """Scratch of a prompt's chunk, and of a step's logits: activations are float32.

    The residual stream, its norm, queries, keys, values and what becomes of them, about ten at once; hidden
    units, their mask and the part of it that is used; logits of all sequences.
    """
    per_token = 10 * 4 * spec.d_model + (4 + 2) * spec.d_ffn
    return PREFILL_CHUNK_TOKENS * per_token + 2 * MAX_BATCH * 4 * spec.vocab_size


def open_account(
    config: DaemonConfig, demand: Demand, beside: Beside, all_bytes: int, reading: Reading
) -> MemoryAccount:
    """What the configuration and the machine allow.

    Args:
        config: all settings.
        demand: of the model.
        beside: memory beside its weights.
        all_bytes: what 100 % of memory is: all weights.
        reading: of the machine, now.

    Raises:
        ConfigError: it is too little for the model to be served at all.
    """
    shared = config.memory.strip().endswith("%")
    asked = None
    if config.memory.strip().lower() != "auto":
        asked = parse_budget(config.memory, all_bytes, 0) + (beside.fixed_bytes if shared else 0)
    # Who has asked for a figure gets it, as far as it is there; the governor then looks after the others.
    reserve = reserve_bytes(reading.limit_bytes, 0.0) if asked is None else 0
    ceiling = reading.footprint_bytes + reading.available_bytes - reserve
    account = MemoryAccount(demand, beside, asked, ceiling)
    if asked is not None and asked < account.least_bytes:
        raise ConfigError(_too_little(config.memory, account, all_bytes if shared else 0))
    if ceiling < account.least_bytes:
        raise ConfigError(
            f"only {max(0, ceiling) / _MB:.0f} MB of memory can be had ({reading.source}: "
            f"{reading.available_bytes / _MB:.0f} MB are available), expected at least "
            f"{account.least_bytes / _MB:.0f} MB: {_parts(account)}; free some, or raise the limit"
        )
    return account


def check_memory(config: DaemonConfig, manifest: Manifest) -> int:
    """Refuse to load what the memory does not hold, before the kernel does.

    Returns:
        What the process has without the model.

    Raises:
        ConfigError, BundleError: as ``open_account`` and ``bundle_demand``.
    """
    directory = config.model_dir
    demand = bundle_demand(directory, manifest, config.predictor)
    everything = whole_bytes(directory, manifest)
    if config.backend == "memory":
        predictors = demand.fixed_bytes - resident_bytes(directory)
        demand = Demand(manifest.ffn, everything + predictors, 0, [False] * manifest.ffn.n_layers)
    reading = SystemMemory().read()
    beside = beside_of(manifest, config.kv_dtype, reading.footprint_bytes, masked=any(demand.masked))
    open_account(config, demand, beside, everything, reading)
    return reading.footprint_bytes


def _too_little(text: str, account: MemoryAccount, all_bytes: int) -> str:
    """What is wrong with too small a setting, and the smallest one that works."""
    if all_bytes:
        # Rounded up: what is advised must work.
        smallest = f"{-(-1000 * account.demand.least_bytes // all_bytes) / 10:.1f}%"
    else:
        smallest = f"{-(-account.least_bytes // 1_000_000) + 1}MB"
    given = f"--memory {text.strip()} is {account.limit_bytes / _MB:.1f} MB in all, too small"
    return f"{given}: {_parts(account)}; the smallest that works is --memory {smallest}"


def _parts(account: MemoryAccount) -> str:
    demand, beside = account.demand, account.beside
    window = demand.least_rows * demand.geometry.stride_bytes
    return (
        f"weights and predictors take {demand.fixed_bytes / _MB:.1f} MB, stream buffers "
        f"{demand.ring_bytes / _MB:.1f} MB, the window at least {window / _MB:.1f} MB, a KV cache at least "
        f"{beside.least_kv_bytes / _MB:.1f} MB, a prompt's scratch {beside.prompt_bytes / _MB:.1f} MB, "
        f"the process {beside.base_bytes / _MB:.1f} MB"
    )
