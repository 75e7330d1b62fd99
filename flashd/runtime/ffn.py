"""Wires the FFN: which predictor, what is in RAM, and how the rest is read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flashd.config import DaemonConfig
from flashd.disk.curve import load_curve
from flashd.disk.slabs import SlabBuffer
from flashd.kernels.lane import ComputeLane
from flashd.layout.calibration import Calibration, LayerCalibration
from flashd.layout.manifest import Manifest
from flashd.memory.account import KV_BLOCK_TOKENS, MemoryAccount
from flashd.memory.budget import Allocation, Demand, allocate
from flashd.memory.eviction import make_policy
from flashd.memory.pool import RowPool
from flashd.memory.system import SystemMemory
from flashd.memory.window import Window
from flashd.models.layers import as_f32
from flashd.predictor.base import Predictor
from flashd.predictor.every import AllPredictor
from flashd.predictor.open import make_predictor
from flashd.predictor.oracle import OraclePredictor
from flashd.prefetch.dense import DenseFFN
from flashd.prefetch.hybrid import HybridFFN, MaskedPrompt
from flashd.prefetch.prompt import PromptFFN, ReadCosts
from flashd.prefetch.resident import ResidentFFN
from flashd.prefetch.sparse import SparseFFN
from flashd.prefetch.stream import StreamingFFN
from flashd.prefetch.work import PromptSource
from flashd.runtime.accounting import beside_of, demand_of, open_account
from flashd.runtime.background import in_thread
from flashd.runtime.elastic import ElasticLayers, ElasticRows
from flashd.stats import StreamStats
from flashd.store.in_memory import InMemoryStore
from flashd.store.metered import MeteredStore
from flashd.store.predictors import load_gates, open_predictors
from flashd.types import F32Array, U8Array, WeightArray

log = logging.getLogger("flashd.build")


@dataclass
class Parts:
    """What every part of the FFN needs."""

    manifest: Manifest
    store: MeteredStore
    lane: ComputeLane
    up_bias: Sequence[F32Array | None]
    gate_bias: Sequence[F32Array | None]


@dataclass
class BuiltFFN:
    """The FFN of a loaded model.

    Attributes:
        source: what the decoder uses.
        predictor: whose masks it goes by.
        account: what memory is spent on.
        allocation: what weights got of it at first; None where all is in RAM anyway.
        pool_memory: pages of the window's rows; None where there is no window or it has its rows elsewhere.
        rows, layers: how they come and go; None where they don't.
    """

    source: HybridFFN
    predictor: Predictor
    account: MemoryAccount
    allocation: Allocation | None = None
    pool_memory: SlabBuffer | None = None
    rows: ElasticRows | None = None
    layers: ElasticLayers | None = None

    async def close(self) -> None:
        """Wait for reads in flight, and give memory back."""
        if self.layers is not None:
            await self.layers.close()
        await self.source.close()
        if self.pool_memory is not None:
            self.pool_memory.close()


async def build_ffn(
    config: DaemonConfig,
    manifest: Manifest,
    weights: dict[str, WeightArray],
    store: MeteredStore,
    lane: ComputeLane,
    base_bytes: int | None = None,
    kv_tokens: int = KV_BLOCK_TOKENS,
) -> BuiltFFN:
    """Load the predictor and what else stays in RAM.

    Args:
        config: all settings.
        manifest: of the bundle.
        weights: resident tensors.
        store: where rows are.
        lane: where they are used.
        base_bytes: what the process had before anything of the model was loaded; None: look.
        kv_tokens: KV cache that is set aside even while nothing runs.

    Raises:
        BundleError: the bundle's predictors are unusable.
        BundleCorruptError, DiskReadError: rows could not be read.
        ConfigError: the memory is too small.
    """
    n_layers = manifest.model.n_layers
    up, gate = _biases(weights, n_layers, "up"), _biases(weights, n_layers, "gate")
    parts = Parts(manifest, store, lane, up, gate)
    predictor, layers, prior = await _predictor(config, parts)
    resident_bytes = sum(tensor.nbytes for tensor in weights.values())
    all_bytes = resident_bytes + n_layers * manifest.ffn.layer_bytes
    # The oracle's rows are beside everything, else none would show how it is without them.
    predictor_bytes = predictor.nbytes if config.predictor != "oracle" else 0
    fixed_bytes = resident_bytes + predictor_bytes
    masked = [predictor.masked(layer) for layer in range(n_layers)]
    in_memory = isinstance(store.inner, InMemoryStore)
    if in_memory:
        fixed_bytes = all_bytes + predictor_bytes
        demand = Demand(manifest.ffn, fixed_bytes, 0, [False] * n_layers)
    else:
        demand = demand_of(manifest.ffn, fixed_bytes, masked, [layer.capacity_rows for layer in layers])
    reading = SystemMemory().read()
    if base_bytes is None:
        base_bytes = max(0, reading.footprint_bytes - fixed_bytes)
    elif config.predictor == "oracle":
        base_bytes += predictor.nbytes
    beside = beside_of(manifest, config.kv_dtype, base_bytes, masked=any(masked), kv_tokens=kv_tokens)
    account = open_account(config, demand, beside, all_bytes, reading)
    if isinstance(store.inner, InMemoryStore):
        return _in_memory(config, parts, predictor, store.inner, account)
    budget_bytes = min(account.weights_bytes(reading.at_s), demand.everything_bytes)
    allocation = allocate(budget_bytes, demand, config.window)
    return await _from_flash(config, parts, predictor, allocation, prior, account)


async def _predictor(
    config: DaemonConfig, parts: Parts
) -> tuple[Predictor, Sequence[LayerCalibration], F32Array | None]:
    """The predictor, what is known about each layer, and how often each neuron is requested."""
    manifest, ffn = parts.manifest, parts.manifest.ffn
    if config.predictor == "oracle":
        everything = await InMemoryStore.load(parts.store)
        rows = [everything.layer(layer) for layer in range(ffn.n_layers)]
        biases = parts.up_bias, parts.gate_bias
        oracle = OraclePredictor(ffn, manifest.model.activation, rows, *biases, manifest.thresholds)
        return oracle, (), None
    opened = None
    if config.predictor == "auto":
        opened = await in_thread(open_predictors, config.model_dir, manifest)
    if opened is None:
        return AllPredictor(ffn.n_layers, ffn.n_neurons), (), None
    calibration, tensors = opened
    gates = await _gates(calibration, parts)
    predictor = make_predictor(
        calibration,
        tensors,
        ffn,
        manifest.model.activation,
        gates=gates,
        gate_bias=parts.gate_bias,
        thresholds=manifest.thresholds,
    )
    prior = np.stack([tensors[f"layers.{layer}.frequency"] for layer in range(ffn.n_layers)])
    return predictor, calibration.layers, prior


async def _gates(calibration: Calibration, parts: Parts) -> list[WeightArray | None]:
    if calibration.predictor != "gate":
        return []
    return await load_gates(parts.store, [layer.masked for layer in calibration.layers])


def _in_memory(
    config: DaemonConfig, parts: Parts, predictor: Predictor, store: InMemoryStore, account: MemoryAccount
) -> BuiltFFN:
    """All rows are in RAM: the window has them where they are, and nothing is ever read."""
    ffn, waits = parts.manifest.ffn, StreamStats()
    resident = _resident(parts, store, waits)
    sparse = None
    if any(predictor.masked(layer) for layer in range(ffn.n_layers)):
        rows = store.all_rows.reshape(-1, ffn.stride_bytes)
        # Nothing may be evicted: it would be read again into somebody else's row.
        window = _window(
            replace(config, eviction="lru"), parts, rows, len(rows), [ffn.n_neurons] * ffn.n_layers, None, 1
        )
        for layer in range(ffn.n_layers):  # in this order a neuron's row is where the store has it
            window.insert(layer, np.arange(ffn.n_neurons))
            window.settle(layer, np.arange(ffn.n_neurons))
        sparse = _sparse(config, parts, predictor, window, MaskedPrompt(resident, predictor), waits)
    by_layer = dict.fromkeys(range(ffn.n_layers), resident)
    return BuiltFFN(HybridFFN(predictor, sparse, by_layer, None, waits), predictor, account)


async def _from_flash(
    config: DaemonConfig,
    parts: Parts,
    predictor: Predictor,
    allocation: Allocation,
    prior: F32Array | None,
    account: MemoryAccount,
) -> BuiltFFN:
    ffn, waits = parts.manifest.ffn, StreamStats()
    kept = allocation.resident_layers
    resident: dict[int, ResidentFFN] = {}
    for layer in kept:  # each in memory of its own, which can go
        resident[layer] = _resident(parts, await InMemoryStore.load(parts.store, [layer]), waits)
    dense = [layer for layer in range(ffn.n_layers) if not predictor.masked(layer)]
    streamed = [layer for layer in dense if layer not in kept]
    stream = _streaming(parts, streamed, waits)
    sparse = memory = rows = layers = None
    if allocation.n_rows:
        most_rows = allocate(account.demand.everything_bytes, account.demand).n_rows
        memory = SlabBuffer(most_rows * ffn.stride_bytes, parts.store)
        memory.resize(allocation.n_rows * ffn.stride_bytes)
        matrix = memory.memory.reshape(-1, ffn.stride_bytes)
        window = _window(config, parts, matrix, allocation.n_rows, allocation.capacity, prior, allocation.k)
        prompt = _prompt(config, parts, predictor, window, stream)
        sparse = _sparse(config, parts, predictor, window, prompt, waits)
        rows = ElasticRows(sparse, parts.lane, memory, ffn.stride_bytes, config.window)
    source = HybridFFN(predictor, sparse, resident, stream, waits)
    if dense:
        layers = ElasticLayers(source, parts.store, lambda loaded: _resident(parts, loaded, waits), kept)
    _log(config, parts, predictor, allocation, len(streamed))
    log.info(
        "memory limit %.1f MB: %.1f MB for the process, a prompt and KV caches of %d tokens; longer ones "
        "take from the window",
        min(account.limit_bytes, 1 << 50) / 1e6,
        account.beside.fixed_bytes / 1e6,
        account.beside.kv_tokens,
    )
    if parts.store.reason:
        buffers = stream.why_unregistered or "registered with the kernel"
        window_pages = memory.why_unregistered or "registered with the kernel" if memory else "none"
        log.info(
            "reads through %s: %s; stream buffers: %s; window: %s",
            *(parts.store.name, parts.store.reason, buffers, window_pages),
        )
    return BuiltFFN(source, predictor, account, allocation, memory, rows, layers)


def _streaming(parts: Parts, layers: Sequence[int], waits: StreamStats) -> StreamingFFN:
    manifest = parts.manifest
    return StreamingFFN(
        parts.store,
        parts.lane,
        manifest.model.activation,
        parts.up_bias,
        parts.gate_bias,
        thresholds=manifest.thresholds,
        layers=layers,
        stats=waits,
    )


def _prompt(
    config: DaemonConfig, parts: Parts, predictor: Predictor, window: Window, stream: StreamingFFN
) -> PromptFFN:
    geometry = parts.manifest.ffn
    engine = parts.store.name.rpartition("/")[2]
    packed = engine in ("decoded", "generic")  # ways of a zarr store without an engine
    costs = ReadCosts.of_packed() if packed else ReadCosts.of(load_curve(config.model_dir, engine))
    dense = DenseFFN(geometry, parts.manifest.model.activation)
    return PromptFFN(stream, parts.lane, predictor, window, dense, geometry, costs)


def _resident(parts: Parts, store: InMemoryStore, waits: StreamStats) -> ResidentFFN:
    manifest = parts.manifest
    biases = parts.up_bias, parts.gate_bias
    return ResidentFFN(store, parts.lane, manifest.model.activation, *biases, manifest.thresholds, waits)


def _window(
    config: DaemonConfig,
    parts: Parts,
    matrix: U8Array,
    n_rows: int,
    capacity: Sequence[int],
    prior: F32Array | None,
    k: int,
) -> Window:
    """A window over the first ``n_rows`` of ``matrix [n, stride_bytes]``."""
    ffn = parts.manifest.ffn
    has_up, has_gate = (
        any(bias is not None for bias in biases) for biases in (parts.up_bias, parts.gate_bias)
    )
    pool = RowPool(matrix, n_rows, up_bias=has_up, gate_bias=has_gate)
    policy = make_policy(config.eviction, ffn.n_layers, ffn.n_neurons, config.window or max(1, k), prior)
    return Window(pool, ffn.n_layers, ffn.n_neurons, capacity, policy, parts.up_bias, parts.gate_bias)


def _sparse(
    config: DaemonConfig,
    parts: Parts,
    predictor: Predictor,
    window: Window,
    prompt: PromptSource,
    waits: StreamStats,
) -> SparseFFN:
    manifest = parts.manifest
    return SparseFFN(
        parts.store,
        parts.lane,
        predictor,
        window,
        manifest.model.activation,
        prompt,
        thresholds=manifest.thresholds,
        prefetch=config.prefetch,
        waits=waits,
    )


def _log(
    config: DaemonConfig, parts: Parts, predictor: Predictor, allocation: Allocation, n_streamed: int
) -> None:
    ffn = parts.manifest.ffn
    log.info(
        "%.1f MB for weights (memory %s), predictor %s %.1f MB; dense layers: %d in RAM, %d streamed",
        allocation.budget_bytes / 1e6,
        config.memory,
        predictor.name,
        predictor.nbytes / 1e6,
        len(allocation.resident_layers),
        n_streamed,
    )
    if allocation.n_rows:
        rows = [rows for rows in allocation.capacity if rows]
        log.info(
            "window %s: %d rows of %d bytes (%.1f MB), the requests of %s; a layer keeps %d to %d rows "
            "(%.1f to %.1f MB) of %d; prefetch %s",
            config.eviction,
            allocation.n_rows,
            ffn.stride_bytes,
            allocation.n_rows * ffn.stride_bytes / 1e6,
            f"{allocation.k} step{'s' * (allocation.k > 1)}" if allocation.k else "less than one step",
            *(min(rows), max(rows)),
            *(min(rows) * ffn.stride_bytes / 1e6, max(rows) * ffn.stride_bytes / 1e6),
            ffn.n_neurons,
            config.prefetch,
        )


def _biases(weights: dict[str, WeightArray], n_layers: int, part: str) -> list[F32Array | None]:
    names = [f"layers.{i}.ffn.{part}.bias" for i in range(n_layers)]
    return [as_f32(weights[name]) if name in weights else None for name in names]
