"""Measures what a plan is computed from: some seconds, some hundred MB of memory, nothing written."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import fmean, median
from threading import Event
from time import perf_counter

import numpy as np
import uvloop

from flashd import kernels
from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.kernels.lane import ComputeLane
from flashd.layout.calibration import Calibration
from flashd.layout.manifest import Manifest
from flashd.memory.system import available_bytes
from flashd.store.open import open_store, resident_entries
from flashd.tools.bench.kernels.memory import l3_bytes
from flashd.tools.plan.facts import Measured, RowTimes, Times
from flashd.tools.plan.made import MaskShape, made_weights
from flashd.tools.plan.miniature import MAX_STEPS, MaskedLayers, Miniature
from flashd.tools.plan.reads import REGION_BYTES, Reads
from flashd.types import NUMPY_DTYPE, ModelSpec, WeightArray

# A step of the miniature goes through so many times the L3: what it needs next is in no cache.
_L3_TIMES = 4
_UNKNOWN_L3_BYTES = 32 << 20
_MOST_BYTES = 512 << 20
# Of what is available: others need memory, too.
_SHARE = 4
_HEAD_BYTES = 64 << 20
_LEAST_AVAILABLE_BYTES = 256 << 20
_LEAST_WORDS = 1024
_STEPS_S = 0.5
# Turns of computing alone, reading alone and both: whatever else the machine is busy with meets all.
_TURNS = 3
_ALONE_S = 0.2
_ROWS_S = 0.7
_BESIDE_S = 0.2
_STREAM_S = 0.3
_WARM_S = 1.5
_HEAD_RUNS = 7
_BESIDE_PART = 8


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Attributes:
        masks: of an average masked layer; None without any.
        dense: whether there are layers without a mask.
        reads: whether anything is read while decoding.
        context: tokens that attention goes over.
    """

    masks: MaskShape | None
    dense: bool
    reads: bool
    context: int


def mask_shape(calibration: Calibration | None, n_neurons: int) -> MaskShape | None:
    """An average masked layer; None if there is none."""
    layers = [] if calibration is None else [layer for layer in calibration.layers if layer.masked]
    if calibration is None or not layers:
        return None
    n = len(calibration.layers)
    requested, fired = (fmean(getattr(one, name) for one in layers) for name in ("requested", "fired"))
    looks = [one.lookahead_rank for one in calibration.layers if one.lookahead_threshold is not None]
    return MaskShape(
        requested=max(1, round(requested * n_neurons)),
        fired_share=min(1.0, fired / requested) if requested else 0.0,
        rank=0 if calibration.predictor == "gate" else round(fmean(one.rank for one in layers)),
        lookahead_rank=round(sum(looks) / n),
    )


def measure(config: DaemonConfig, manifest: Manifest, wanted: Wanted) -> Measured:
    """Measure; see ``Wanted``.

    Raises:
        BundleError, BundleCorruptError, DiskReadError: the bundle cannot be used.
        ConfigError: the read engine does not work here.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemon's
        return runner.run(_measure(config, manifest, wanted))


async def _measure(config: DaemonConfig, manifest: Manifest, wanted: Wanted) -> Measured:
    usable = kernels.default_threads()
    kernels.set_threads(min(config.threads or usable, usable, kernels.MAX_THREADS))
    directory = config.model_dir
    async with AsyncExitStack() as stack:
        lane = ComputeLane()
        stack.callback(lane.close)
        store = await open_store(directory, manifest, _backend(config), verify=config.verify)
        stack.push_async_callback(store.close)
        spec = _spec(manifest, wanted)
        weights = made_weights(resident_entries(directory), spec)
        mini = Miniature(spec, weights, store, lane, wanted.context)
        head = weights["embed.weight" if spec.tied_head else "head.weight"]
        small_head_s = await lane.run(_head_s, head)
        head_s = small_head_s * manifest.model.vocab_size / len(head)
        reads = None
        if wanted.reads:
            n_region = max(1, min(manifest.ffn.n_layers, REGION_BYTES // manifest.ffn.layer_bytes))
            reads = Reads(store, lane, range(n_region))
            stack.callback(reads.close)
            await reads.warm(_WARM_S)
        result = _Result(head_s, small_head_s)
        if wanted.masks is not None:
            await _masked(result, mini, wanted.masks, reads)
        if wanted.dense:
            await _dense(result, mini, reads, manifest)
        if reads is not None:
            result.stream_s = await reads.layer_s(_STREAM_S)
        return result.measured()


def _backend(config: DaemonConfig) -> str:
    return "auto" if config.backend == "memory" else config.backend


def _spec(manifest: Manifest, wanted: Wanted) -> ModelSpec:
    """Of the miniature: few layers, but more than the caches hold; as many words as some memory holds."""
    spec, ffn = manifest.model, manifest.ffn
    width = NUMPY_DTYPE[manifest.dtype].itemsize
    attention = 2 * spec.d_model * (spec.n_heads + spec.n_kv_heads) * spec.d_head * width
    rows = ffn.n_neurons if wanted.masks is None else wanted.masks.requested
    layer_bytes = attention + rows * ffn.stride_bytes
    available = available_bytes()
    if available < _LEAST_AVAILABLE_BYTES:
        raise ConfigError(
            f"a plan measures with up to {_LEAST_AVAILABLE_BYTES >> 20} MiB of memory, and only "
            f"{available >> 20} MiB can be had here; free some, raise the limit, or plan elsewhere"
        )
    room = min(_MOST_BYTES, available // _SHARE)
    enough = _L3_TIMES * (l3_bytes() or _UNKNOWN_L3_BYTES)
    n_layers = max(2, min(-(-enough // layer_bytes), room // layer_bytes))
    words = max(_LEAST_WORDS, min(_HEAD_BYTES, room) // (spec.d_embed * width))
    return replace(
        spec,
        n_layers=min(n_layers, spec.n_layers),
        vocab_size=min(spec.vocab_size, words),
        max_context=wanted.context + MAX_STEPS,
    )


def _head_s(head: WeightArray) -> float:
    """Seconds of the output projection."""
    x = np.ones((1, head.shape[1]), np.float32)
    out = np.empty((1, len(head)), np.float32)
    taken_s = []
    for _ in range(_HEAD_RUNS):
        began_s = perf_counter()
        kernels.gemv(head, x, out)
        taken_s.append(perf_counter() - began_s)
    return median(taken_s)


@dataclass
class _Result:
    """What was measured so far.

    Attributes:
        head_s: of the model's output projection.
        small_head_s: of the miniature's.
    """

    head_s: float
    small_head_s: float
    step_overhead_s: float = 0.0
    masked: Times | None = None
    resident: Times | None = None
    streamed: Times | None = None
    streamed_busy_s: float = 0.0
    rows: RowTimes | None = None
    stream_s: float | None = None
    compute_share: float = 1.0
    flash_share: float = 1.0

    def layer(self, times: Times, n_layers: int) -> Times:
        """Of a step's times, a layer's part."""
        return Times(
            times.wait_s / n_layers,
            times.memory_s / n_layers,
            max(0.0, times.compute_s - self.small_head_s) / n_layers,
            max(0.0, times.overhead_s - self.step_overhead_s) / n_layers,
        )

    def measured(self) -> Measured:
        """All of it."""
        return Measured(
            step=Times(compute_s=self.head_s, overhead_s=self.step_overhead_s),
            masked=self.masked,
            resident=self.resident,
            streamed=self.streamed,
            streamed_busy_s=self.streamed_busy_s,
            rows=self.rows,
            stream_s=self.stream_s,
            compute_share=self.compute_share,
            flash_share=self.flash_share,
        )


async def _masked(result: _Result, mini: Miniature, masks: MaskShape, reads: Reads | None) -> None:
    layers = mini.masked(masks)
    # About what a window of some steps lacks: its size changes both speeds little.
    n_rows = max(1, masks.requested // _BESIDE_PART)
    alone: list[Times] = []
    shares: list[tuple[float, float]] = []
    try:
        for _ in range(_TURNS):
            alone.append((await layers.run(mini, _ALONE_S)).times)
            if reads is not None:
                shares.append(await _shares(layers, mini, reads, n_rows, alone[-1].compute_s))
        result.step_overhead_s = median(times.overhead_s for times in alone)
        typical = sorted(alone, key=lambda times: times.total_s)[_TURNS // 2]
        result.masked = result.layer(typical, layers.n_layers)
        if reads is not None:
            result.rows = await reads.rows(_ROWS_S)
            result.compute_share, result.flash_share = (median(some) for some in zip(*shares, strict=True))
    finally:
        layers.close()


async def _shares(
    layers: MaskedLayers, mini: Miniature, reads: Reads, n_rows: int, compute_s: float
) -> tuple[float, float]:
    """Speed of computing beside reads, of its own; speed of reads beside computing, likewise."""
    alone_s = await reads.batch_s(n_rows)
    end = Event()
    reading = asyncio.create_task(reads.beside(n_rows, end))
    try:
        beside = await layers.run(mini, _BESIDE_S)
    finally:
        end.set()
        beside_s = await reading
    return min(1.0, compute_s / beside.times.compute_s), min(1.0, alone_s / beside_s)


async def _dense(result: _Result, mini: Miniature, reads: Reads | None, manifest: Manifest) -> None:
    n_layers = max(1, min(mini.n_layers, _MOST_BYTES // manifest.ffn.layer_bytes))
    resident = await mini.dense(n_layers, _STEPS_S)
    result.step_overhead_s = result.step_overhead_s or resident.times.overhead_s
    result.resident = result.layer(resident.times, n_layers)
    if reads is not None:
        n_streamed = min(mini.n_layers, reads.n_layers)
        streamed = await mini.streamed(n_streamed, _STEPS_S)
        result.streamed = result.layer(streamed.times, n_streamed)
        result.streamed_busy_s = streamed.busy_s / n_streamed
