"""A bundle as a plan sees it: sizes, masks and how they are used, and what a budget buys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashd.config import DaemonConfig
from flashd.disk.curve import DeviceCurve, load_curve
from flashd.disk.slabs import SLAB_BYTES
from flashd.errors import BundleError, ConfigError
from flashd.layout.calibration import AGAIN, Calibration, frequency_name
from flashd.layout.geometry import round_up
from flashd.layout.manifest import BUNDLE, Manifest
from flashd.memory.account import Beside, MemoryAccount
from flashd.memory.budget import Allocation, Demand, allocate
from flashd.memory.system import Reading
from flashd.prefetch.sparse import PREFETCH_BYTES
from flashd.runtime.accounting import beside_of, bundle_demand, open_account, resident_bytes, whole_bytes
from flashd.store.bundle_file import MAX_READ_BYTES
from flashd.store.open import open_manifest
from flashd.store.predictors import open_predictors, read_calibration
from flashd.tools.plan.cost import Layers
from flashd.tools.plan.report import MemoryParts
from flashd.tools.plan.usage import Usage, WindowShape, run_window, traces_of
from flashd.types import BoolArray, F32Array

# A plan looks at so many masked layers, evenly chosen, and at so many neurons of them all together.
_LAYERS = 8
_NEURONS = 160_000


@dataclass
class Subject:
    """A bundle.

    Attributes:
        config: what ``flashd start`` would be told.
        directory: the bundle.
        manifest: its manifest.
        calibration: None where all neurons are computed.
        demand: what it would like to have in RAM.
        beside: memory beside its weights.
        all_bytes: all weights.
        curve: of the device; None: not measured.
        masked: per layer, whether it has a mask.
        looked_at: masked layers that stand for all.
        frequency: of these, share of tokens that request each neuron, ``[n]``.
        traces: of these, ``[tokens, n]``, which token requests which neuron.
    """

    config: DaemonConfig
    directory: Path
    manifest: Manifest
    calibration: Calibration | None
    demand: Demand
    beside: Beside
    all_bytes: int
    curve: DeviceCurve | None
    masked: list[bool]
    looked_at: list[int]
    frequency: list[F32Array]
    traces: list[BoolArray]

    @classmethod
    def open(cls, config: DaemonConfig, base_bytes: int) -> Subject:
        """Read a bundle's headers and calibration.

        Raises:
            BundleError, BundleCorruptError, DiskReadError: it cannot be used.
            ConfigError: a predictor that cannot be planned for.
        """
        if config.predictor == "oracle":
            raise ConfigError("predictor oracle has all rows in RAM beside the rest: for tests, none to plan")
        directory = config.model_dir
        manifest = open_manifest(directory)
        calibration = read_calibration(directory, manifest) if config.predictor == "auto" else None
        demand = bundle_demand(directory, manifest, config.predictor)
        masked, everything = list(demand.masked), whole_bytes(directory, manifest)
        if config.backend == "memory":
            predictors = demand.fixed_bytes - resident_bytes(directory)
            demand = Demand(manifest.ffn, everything + predictors, 0, [False] * manifest.ffn.n_layers)
        curve = load_curve(directory / BUNDLE) if manifest.store == "file" else None
        subject = cls(
            config=config,
            directory=directory,
            manifest=manifest,
            calibration=calibration,
            demand=demand,
            beside=beside_of(manifest, config.kv_dtype, base_bytes, masked=any(masked)),
            all_bytes=everything,
            curve=curve,
            masked=masked,
            looked_at=[],
            frequency=[],
            traces=[],
        )
        subject._trace()
        return subject

    @property
    def n_masked(self) -> int:
        """Layers with a mask."""
        return sum(self.masked)

    def _trace(self) -> None:
        """Make traces of some layers."""
        masked = [layer for layer, has in enumerate(self.masked) if has]
        if not masked or self.calibration is None:
            return
        opened = open_predictors(self.directory, self.manifest)
        if opened is None:
            raise BundleError(f"{self.directory}: its calibration has gone meanwhile; {AGAIN}")
        tensors = opened[1]
        most = max(2, min(_LAYERS, _NEURONS // self.manifest.ffn.n_neurons))
        places = np.linspace(0, len(masked) - 1, min(most, len(masked))).round().astype(int)
        self.looked_at = [masked[place] for place in places]
        self.frequency = [np.array(tensors[frequency_name(layer)]) for layer in self.looked_at]
        curves = [self.calibration.layers[layer].s_agg_requested for layer in self.looked_at]
        self.traces = traces_of(self.frequency, curves)

    def account(self, memory: str, reading: Reading) -> MemoryAccount:
        """What a setting of ``--memory`` and the machine allow; raises as ``open_account``."""
        config = DaemonConfig(**{**self.config.settings(), "memory": memory})
        return open_account(config, self.demand, self.beside, self.all_bytes, reading)

    def allocation(self, weights_bytes: int) -> Allocation:
        """What so many bytes for weights buy; raises ``ConfigError`` if they are too few."""
        budget_bytes = min(weights_bytes, self.demand.everything_bytes)
        return allocate(budget_bytes, self.demand, self.config.window)

    def parts(self, allocation: Allocation) -> MemoryParts:
        """What memory goes to."""
        ffn, beside = self.manifest.ffn, self.beside
        resident = resident_bytes(self.directory)
        return MemoryParts(
            process=beside.base_bytes,
            prompt=beside.prompt_bytes,
            kv_cache=beside.least_kv_bytes,
            resident=resident,
            predictors=max(0, self.demand.fixed_bytes - resident) if self.n_masked else 0,
            stream_buffers=self.demand.ring_bytes,
            layers=len(allocation.resident_layers) * ffn.layer_bytes,
            window=round_up(allocation.n_rows * ffn.stride_bytes, SLAB_BYTES) if allocation.n_rows else 0,
        )

    def layers(self, allocation: Allocation) -> Layers:
        """How many layers go which way."""
        n_masked = self.n_masked
        dense = len(self.masked) - n_masked
        resident = dense if self.config.backend == "memory" else len(allocation.resident_layers)
        return Layers(n_masked, resident, dense - resident)

    def usage(self, allocation: Allocation) -> Usage | None:
        """What masked layers read; None without any."""
        if not self.traces:
            return None
        ffn, config = self.manifest.ffn, self.config
        if config.backend == "memory":
            requested = sum(float(share.sum()) for share in self.frequency) / len(self.frequency)
            return Usage(requested, 0.0, 0.0, 0.0, 0.0, 0.0)
        gap_bytes = self.curve.break_even_bytes() if self.curve is not None else 0
        ahead = self._looks_ahead and config.prefetch != "off"
        shape = WindowShape(
            capacity=tuple(allocation.capacity[layer] for layer in self.looked_at),
            spare=max(0, allocation.n_rows - sum(allocation.capacity)),
            eviction=config.eviction,
            k=config.window or max(1, allocation.k),
            ahead_rows=PREFETCH_BYTES // ffn.stride_bytes if ahead else 0,
            max_gap=gap_bytes // ffn.stride_bytes,
            max_run=max(1, MAX_READ_BYTES // ffn.stride_bytes),
        )
        return run_window(self.traces, self.frequency, shape)

    @property
    def _looks_ahead(self) -> bool:
        """Whether the layers guess at the next one."""
        layers = () if self.calibration is None else self.calibration.layers
        return any(layer.lookahead_threshold is not None for layer in layers)
