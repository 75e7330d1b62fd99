"""Making the bundle: the converter writes it, from a checkpoint that is made up as it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from flashd.errors import ConfigError
from flashd.layout import calibration as layout
from flashd.layout.manifest import Manifest
from flashd.tools.bench.token.budget import sensible_budget
from flashd.tools.calibrated import has_predictors
from flashd.tools.convert.checkpoint import Checkpoint
from flashd.tools.convert.options import ConvertOptions, Progress
from flashd.tools.convert.run import Extras, convert_checkpoint
from flashd.tools.synth.code import Code
from flashd.tools.synth.curves import curve_named
from flashd.tools.synth.predictors import predictor_bytes, write_predictors
from flashd.tools.synth.report import SynthReport, curve_rows
from flashd.tools.synth.shapes import shape_plan
from flashd.tools.synth.source import SyntheticSource
from flashd.types import DTYPES, DType, StoreKind

# Of this code's output: a bundle that an older version left unfinished is not gone on with.
_VERSION = 1
_MAX_LAYERS = 1000


@dataclass(frozen=True)
class SynthOptions:
    """What to make.

    Attributes:
        like: one of ``shapes.CONFIGS``.
        curve: one of ``curves.CURVES``.
        sparsity: share of neurons that do not fire; None: the curve's own.
        layers: how many; None: the model's own.
        dtype: of the weights.
        store: one bundle file, or a zarr group.
        seed: of everything random.
        overwrite: replace a bundle that is already there.
    """

    like: str
    curve: str = "opt"
    sparsity: float | None = None
    layers: int | None = None
    dtype: DType = "f16"
    store: StoreKind = "file"
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.layers is not None and not 1 <= self.layers <= _MAX_LAYERS:
            raise ConfigError(f"layers is {self.layers}, expected 1 to {_MAX_LAYERS}")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed is {self.seed}, expected 0 to {(1 << 32) - 1}")


def synth(
    dest: Path,
    options: SynthOptions,
    progress: Callable[[Progress], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> SynthReport:
    """Write a bundle of a model's exact shape with made-up weights, and predictors that fit them.

    Resumes and publishes as ``convert`` does; needs no more memory than that and some 20 MB of noise.

    Args:
        dest: the bundle to make.
        options: what to make.
        progress: called some times a second.
        note: called with one line about each thing that a person may not expect.

    Raises:
        ConfigError: an unknown shape or curve, or a value out of range.
        ConversionError: ``dest`` cannot be written.
        OutOfSpaceError: the disk is full, or would be.
    """
    curve = curve_named(options.curve, options.sparsity)
    plan = shape_plan(options.like, options.layers)
    code = Code(plan.spec, curve, options.seed)
    facts = asdict(options) | {"overwrite": None, "curve": asdict(curve), "version": _VERSION}
    source = SyntheticSource(options.like, plan, code, json.dumps(facts, sort_keys=True))

    def finish(root: Path, manifest: Manifest) -> None:
        write_predictors(root, manifest, code)

    extras = Extras(
        provenance={
            "synthetic": "weights are made up (flashd synth): for measuring speed, not for reading",
            "synthetic_curve": f"{curve.name}: {curve.requested:.1%} requested, {curve.fired:.1%} fired",
            "synthetic_like": options.like + ("" if options.layers is None else f", {options.layers} layers"),
        },
        extra_bytes=predictor_bytes(plan.spec, code.rank),
        finish=finish,
        whole=has_predictors,
    )
    manifest = convert_checkpoint(
        Checkpoint(source.where, source, plan, {}, ()),
        dest,
        ConvertOptions(options.dtype, options.store, options.overwrite),
        progress,
        note,
        extras,
    )
    path = dest / layout.CALIBRATION
    found = layout.from_json(path.read_bytes(), str(path), manifest)
    return SynthReport(
        bundle=str(dest),
        like=options.like,
        curve=curve.name,
        dtype=manifest.dtype,
        bytes=sum(file.size_bytes for file in manifest.files) + found.predictors_bytes,
        predictor_bytes=found.predictors_bytes,
        rank=code.rank,
        requested=sum(layer.requested for layer in found.layers) / len(found.layers),
        fired=sum(layer.fired for layer in found.layers) / len(found.layers),
        rows=curve_rows(curve, found.layers),
        bench_budget=sensible_budget(dest, manifest),
    )
