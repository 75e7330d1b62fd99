"""Proof that reads and computing overlap, on a device without CPU: ``python -m flashd.testing.overlap``.

On a real disk, and more so on a virtual one, reading and computing share CPUs and memory, and how much of a
step overlaps depends on the machine. Here the disk is ``FakeDevice``: fixed latency, fixed bandwidth, timers.
It is made just as slow as the model's computing is fast, so that flash and compute take the same time, and
the same model decodes in turn

- without prefetch: a step is the sum of both;
- with a lookahead that is always right: a step is little more than one of them;
- with one that guesses at random: prefetch turns itself off, and a step is what it is without.

All give the same logits, bit for bit: what is read early is never seen in a result.

The model is synthetic: random weights, and a fixed number of random neurons that each layer requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import uvloop

from flashd import kernels
from flashd.disk.buffers import aligned_empty
from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.geometry import ffn_geometry
from flashd.memory.eviction import LeastRecent
from flashd.memory.pool import RowPool
from flashd.memory.window import Window
from flashd.models.decoder import Decoder, Span
from flashd.predictor.base import Predictor
from flashd.prefetch.hybrid import HybridFFN
from flashd.prefetch.sparse import SparseFFN
from flashd.store.bundle_file import BundleFileStore
from flashd.store.metered import MeteredStore
from flashd.testing.fake_engine import FakeDevice, FakeEngine
from flashd.types import BoolArray, F32Array, I64Array, ModelSpec, U8Array, WeightArray

# Of a layer's time on flash, what is latency; the rest is bytes passing.
LATENCY_SHARE = 0.2
# Steps whose requests differ; then they come again.
_CYCLE_STEPS = 64
# A device that is never waited for, to measure computing alone.
_INSTANT = FakeDevice(0.0, 1e12)


@dataclass(frozen=True)
class OverlapOptions:
    """Sizes of the model and of the measurement; as it is, the attention of OPT-1.3B.

    Attributes:
        d_model: its FFN rows are ``2 * d_model`` float16.
        n_layers: the first is guessed before its attention, the others one layer ahead.
        n_neurons: of a layer.
        requested: neurons that a layer requests at each step, at random.
        steps: measured, of each setting in each round.
        rounds: in which the settings take turns.
        warm_up: steps of each setting before the first round; prefetch decides in them whether it pays.
        threads: of the kernels; 0: one CPU fewer than there are, which the event loop and the device have.
        seed: of weights and requests.
    """

    d_model: int = 2048
    n_layers: int = 24
    n_neurons: int = 512
    requested: int = 32
    steps: int = 2
    rounds: int = 24
    warm_up: int = 56
    threads: int = 0
    seed: int = 0


@dataclass(frozen=True)
class OverlapRow:
    """What one setting took, medians over its steps in milliseconds.

    Attributes:
        setting: ``off``, ``oracle`` or ``random``: the lookahead.
        prefetch_layers: layers that are read ahead in the end.
        bound: a step's time divided by the larger of its flash (busy) and compute.
        beside_off: step time divided by that without prefetch, median over the rounds.
    """

    setting: str
    step_ms: float
    flash_busy_ms: float
    flash_wait_ms: float
    compute_ms: float
    memory_ms: float
    prefetch_layers: int
    bound: float
    beside_off: float


@dataclass(frozen=True)
class OverlapReport:
    """The whole run.

    Attributes:
        device: the fake one.
        compute_ms: a step's computing with an instant device, to which the device was tuned.
        same_logits: whether all settings gave the same bits at every step.
    """

    options: OverlapOptions
    device: FakeDevice
    compute_ms: float
    rows: tuple[OverlapRow, ...]
    same_logits: bool


class _Scripted(Predictor):
    """Requests what a table says, step after step, and guesses right, at random, or not at all."""

    name = "scripted"

    def __init__(self, options: OverlapOptions, guess: str) -> None:
        self.n_layers, self.n_neurons, self.nbytes = options.n_layers, options.n_neurons, 0
        rng = np.random.default_rng(options.seed)
        self._wanted = _draw(rng, options)
        self._guesses = {"oracle": self._wanted, "random": _draw(rng, options), "off": None}[guess]
        self._step = -1

    def masked(self, layer: int) -> bool:
        """See ``Predictor.masked``."""
        return True

    def predict(self, layer: int, x: F32Array) -> tuple[I64Array, BoolArray]:
        """See ``Predictor.predict``."""
        if layer == 0:
            self._step += 1
        ids = self._wanted[self._step % _CYCLE_STEPS, layer]
        return ids, np.ones((len(x), len(ids)), np.bool_)

    def first_guess(self, x: F32Array) -> I64Array | None:
        """See ``Predictor.first_guess``; of the step that is about to begin."""
        if self._guesses is None:
            return None
        return np.ascontiguousarray(self._guesses[(self._step + 1) % _CYCLE_STEPS, 0])

    def lookahead(self, layer: int, x: F32Array) -> I64Array | None:
        """See ``Predictor.lookahead``."""
        if self._guesses is None:
            return None
        return np.ascontiguousarray(self._guesses[self._step % _CYCLE_STEPS, layer + 1])


def _draw(rng: np.random.Generator, options: OverlapOptions) -> I64Array:
    """``[steps, layers, requested]``, ascending in the last axis, all different."""
    shape = (_CYCLE_STEPS, options.n_layers, options.n_neurons)
    chosen = np.argsort(rng.random(shape), axis=-1)[..., : options.requested]
    return np.sort(chosen, axis=-1).astype(np.int64)


def _spec(options: OverlapOptions) -> ModelSpec:
    heads = options.d_model // 64
    return ModelSpec(
        family="opt",
        vocab_size=256,
        d_model=options.d_model,
        d_embed=options.d_model,
        n_layers=options.n_layers,
        n_heads=heads,
        n_kv_heads=heads,
        d_head=64,
        d_ffn=options.n_neurons,
        max_context=1024,
        activation="relu",
        gated=False,
        norm="rmsnorm",
        norm_eps=1e-5,
        norm_first=True,
        final_norm=True,
        rope=False,
        tied_head=True,
    )


def _weights(spec: ModelSpec, rng: np.random.Generator) -> dict[str, WeightArray]:
    """Random resident tensors; all layers have the same, because only their size matters."""

    def matrix(rows: int) -> WeightArray:
        values: F32Array = rng.standard_normal((rows, spec.d_model), np.float32)
        values *= spec.d_model**-0.5
        return values.astype(np.float16)

    ones = np.ones(spec.d_model, np.float32)
    layer = {f"attn.{part}.weight": matrix(spec.d_model) for part in "qkvo"}
    layer |= {"attn_norm.weight": ones, "ffn_norm.weight": ones}
    top = {"embed.weight": matrix(spec.vocab_size), "position.weight": matrix(spec.max_context)}
    top["final_norm.weight"] = ones
    return top | {f"layers.{i}.{name}": w for i in range(spec.n_layers) for name, w in layer.items()}


class _NoPrompt:
    """Steps here have one token."""

    async def apply(self, layer: int, x: Any) -> Any:
        """See ``PromptSource.apply``."""
        raise NotImplementedError("a prompt in a measurement of steps")


class _Model:
    """Weights in RAM and on the fake device, and the lane that all settings share."""

    def __init__(self, options: OverlapOptions, lane: ComputeLane) -> None:
        rng = np.random.default_rng(options.seed)
        self.options = options
        self.lane = lane
        self.spec = _spec(options)
        self.weights = _weights(self.spec, rng)
        self.geometry = ffn_geometry(self.spec, "f16", 512)
        content = aligned_empty(self.geometry.layer_bytes)
        rows: WeightArray = content.view(np.float16).reshape(options.n_neurons, -1)
        rows[:] = rng.standard_normal(rows.shape, np.float32) * options.d_model**-0.5
        self.content: U8Array = content


class _Setting:
    """The model with one lookahead, on a device of its own."""

    def __init__(self, model: _Model, name: str, device: FakeDevice) -> None:
        options, geometry = model.options, model.geometry
        self.name = name
        self.lane = model.lane
        engine = FakeEngine(model.content, depth=options.requested, device=device)
        self.store = MeteredStore(BundleFileStore(engine, geometry, [0] * options.n_layers))
        # What a step requests stays until the next one; and room for two layers that are read ahead.
        n_rows = (options.n_layers + 4) * options.requested
        pool = RowPool(aligned_empty(n_rows * geometry.stride_bytes).reshape(n_rows, -1), n_rows)
        capacity = [options.requested] * options.n_layers
        window = Window(pool, options.n_layers, options.n_neurons, capacity, LeastRecent())
        predictor = _Scripted(options, name)
        sparse = SparseFFN(
            self.store,
            model.lane,
            predictor,
            window,
            model.spec.activation,
            _NoPrompt(),
            prefetch="off" if name == "off" else "auto",
        )
        self.benefit = sparse.benefit
        self.ffn = HybridFFN(predictor, sparse, {}, None, sparse.waits)
        self.decoder = Decoder(model.spec, model.weights, self.ffn, model.lane)
        self.kv = ContiguousKV(model.spec, model.spec.max_context, "f16")
        self.logits: list[F32Array] = []
        self.taken: list[list[dict[str, float]]] = []  # by round and step

    async def run(self, steps: int) -> None:
        """Some steps, as another round."""
        self.taken.append([await self._step() for _ in range(steps)])

    async def _step(self) -> dict[str, float]:
        before = self._counters()
        token = np.array([self.kv.length % 256], np.int64)
        self.logits.append((await self.decoder.forward([Span(token, self.kv)]))[0].copy())
        after = self._counters()
        return {name: (after[name] - value) / 1e6 for name, value in before.items()}

    def _counters(self) -> dict[str, int]:
        """Nanoseconds so far."""
        return {
            "step_ms": time.perf_counter_ns(),
            "flash_busy_ms": self.store.stats.busy_ns,
            "flash_wait_ms": self.ffn.stats.wait_ns,
            "compute_ms": self.lane.stats.compute_ns,
            "memory_ms": self.lane.stats.memory_ns,
        }

    def row(self, off: _Setting) -> OverlapRow:
        """Medians of all rounds."""
        steps = [step for round_ in self.taken for step in round_]
        cost = {name: median(step[name] for step in steps) for name in steps[0]}
        rounds = zip(self.taken, off.taken, strict=True)
        return OverlapRow(
            setting=self.name,
            prefetch_layers=self.benefit.layers if self.benefit.preferred else 0,
            bound=median(s["step_ms"] / max(s["flash_busy_ms"], s["compute_ms"]) for s in steps),
            beside_off=median(_step_ms(mine) / _step_ms(theirs) for mine, theirs in rounds),
            **cost,
        )

    async def close(self) -> None:
        """Wait for what is in flight."""
        await self.ffn.close()
        await self.store.close()


def _step_ms(steps: Sequence[dict[str, float]]) -> float:
    return median(step["step_ms"] for step in steps)


def _device(model: _Model, compute_ms: float) -> FakeDevice:
    """One on which a layer's reads take as long as its computing."""
    layer_s = compute_ms / 1000 / model.options.n_layers
    nbytes = model.options.requested * model.geometry.stride_bytes
    return FakeDevice(LATENCY_SHARE * layer_s * 1e6, nbytes / ((1 - LATENCY_SHARE) * layer_s))


async def measure(options: OverlapOptions) -> OverlapReport:
    """Tune the device, then let the settings take turns.

    Args:
        options: sizes.

    Returns:
        One row for each setting: ``off``, ``oracle``, ``random``.
    """
    threads = kernels.threads()
    kernels.set_threads(options.threads or max(1, kernels.default_threads() - 1))
    lane = ComputeLane()
    try:
        model = _Model(options, lane)
        instant = _Setting(model, "off", _INSTANT)
        await instant.run(max(8, options.steps))
        await instant.close()
        compute_ms = median(step["compute_ms"] for step in instant.taken[0])
        device = _device(model, compute_ms)
        settings = [_Setting(model, name, device) for name in ("off", "oracle", "random")]
        for setting in settings:
            await setting.run(options.warm_up)
            setting.taken.clear()
        for round_ in range(options.rounds):
            for setting in settings if round_ % 2 == 0 else reversed(settings):
                await setting.run(options.steps)
        off, *others = settings
        same = all(
            np.array_equal(mine, theirs)
            for other in others
            for mine, theirs in zip(other.logits, off.logits, strict=True)
        )
        rows = tuple(setting.row(off) for setting in settings)
        for setting in settings:
            await setting.close()
        return OverlapReport(options, device, compute_ms, rows, same)
    finally:
        lane.close()
        kernels.set_threads(threads)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m flashd.testing.overlap", description="Proof that reads and computing overlap."
    )
    for name, value in asdict(OverlapOptions()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args(argv))
    as_json = arguments.pop("json")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemon's
        report = runner.run(measure(OverlapOptions(**arguments)))
    if as_json:
        json.dump(asdict(report), sys.stdout, indent=1)
        print()
        return
    device = report.device
    print(f"device: {device.latency_us:.0f} us, {device.bytes_per_s / 1e6:.0f} MB/s (fake; no CPU)")
    print("LOOKAHEAD  STEP ms  FLASH BUSY    WAIT  COMPUTE  MEMORY  /MAX(FLASH, COMPUTE)  /OFF  LAYERS")
    for row in report.rows:
        print(
            f"{row.setting:9}  {row.step_ms:7.2f}  {row.flash_busy_ms:10.2f}  {row.flash_wait_ms:6.2f}  "
            f"{row.compute_ms:7.2f}  {row.memory_ms:6.2f}  {row.bound:20.2f}  {row.beside_off:4.2f}  "
            f"{row.prefetch_layers:6}"
        )
    print("logits: the same, bit for bit" if report.same_logits else "logits: DIFFERENT")


if __name__ == "__main__":
    main()
