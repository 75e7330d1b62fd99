"""Calibration as a whole: thresholds, recording, training layer by layer, measuring, writing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import flashd
from flashd import kernels
from flashd.errors import CalibrationError
from flashd.layout.calibration import (
    CALIBRATION,
    PARTS,
    PREDICTORS,
    Calibration,
    LayerCalibration,
    frequency_name,
    sums_sha256,
    tensor_name,
)
from flashd.layout.manifest import RESIDENT, Manifest
from flashd.store.open import open_manifest, resident_entries
from flashd.tools.calibrate import recording
from flashd.tools.calibrate.options import CalibrateOptions, OnProgress
from flashd.tools.calibrate.recording import Task
from flashd.tools.calibrate.scratch import Scratch, system_errors
from flashd.tools.calibrate.tokens import default_samples, read_sequences
from flashd.tools.calibrate.write import (
    PLOT,
    REPORT,
    remove_calibration,
    write_calibration,
    write_manifest,
)
from flashd.types import U8Array, WeightArray

SPARSIFIED = "sparsify"  # provenance key of the manifest
_SPARSE = ("relu", "relu2")
NEEDS_TORCH = "flashd calibrate trains with torch, which is not installed; pip install 'flashd[calibrate]'"


@dataclass(frozen=True)
class CalibrateReport:
    """What came of it.

    Attributes:
        directory: the bundle.
        calibration: as written.
        thresholds: of the manifest now.
        perplexity: of the test text: ``dense``, ``thresholded`` (where there are thresholds), ``predicted``.
        test_tokens: that it was measured on.
        curves: per layer, what every rank that was tried reaches on the validation text.
        would_request: per layer, share of neurons that its predictor requests, or would.
        lookahead: per layer, recall and precision of its guess; None without one.
        seconds: how long it took.
    """

    directory: str
    calibration: Calibration
    thresholds: tuple[float, ...]
    perplexity: dict[str, float]
    test_tokens: int
    curves: list[list[dict[str, float]]]
    would_request: list[float]
    lookahead: list[dict[str, float] | None]
    seconds: float = field(default=0.0)


def calibrate(
    directory: Path,
    texts: Sequence[Path],
    options: CalibrateOptions,
    progress: OnProgress = lambda state: None,
    note: Callable[[str], None] = lambda text: None,
) -> CalibrateReport:
    """Find out which neurons of a bundle fire, train predictors of that, and put them into it.

    Killed or interrupted, the same call goes on from what is done. Must not be called from inside an event
    loop.

    Args:
        directory: the bundle.
        texts: UTF-8 files of the kind of text that the model will see.
        options: see ``CalibrateOptions``.
        progress: called some times a second.
        note: called with one line about each thing that a person may not expect.

    Raises:
        BundleError: no usable bundle.
        CalibrationError: this bundle or text can't be used, or torch is missing.
    """
    began_s = time.perf_counter()
    manifest = open_manifest(directory)
    _check(manifest, options)
    if (directory / CALIBRATION).is_dir():
        raise CalibrationError(f"{directory / CALIBRATION}: a directory, expected a file; move it away")
    try:
        import flashd.tools.calibrate.layer as _trainable  # noqa: F401  # only whether it can be
    except ModuleNotFoundError as exc:
        raise CalibrationError(NEEDS_TORCH) from exc
    samples = options.samples or default_samples(_parameters(directory, manifest))
    sequences = read_sequences(directory, manifest, texts, samples, note)
    fingerprint = _fingerprint(manifest, texts, options, samples)
    with (
        system_errors(directory),
        Scratch(directory, manifest.ffn, fingerprint, note) as scratch,
    ):
        scratch.reserve(sequences.total)
        task = Task(directory, manifest, options, sequences, scratch, progress)
        manifest = asyncio.run(_run_model(task))
        results = _train(task)
        report = _publish(task, manifest, results, texts)
    return replace(report, seconds=time.perf_counter() - began_s)


def remove_thresholds(directory: Path) -> bool:
    """Undo ``--sparsify``: the bundle runs as it was converted, without predictors.

    Returns:
        Whether there was something to undo.
    """
    manifest = open_manifest(directory)
    if not manifest.thresholds:
        return False
    provenance = {key: value for key, value in manifest.provenance.items() if key != SPARSIFIED}
    with system_errors(directory):
        remove_calibration(directory)
        for name in (PREDICTORS, REPORT, PLOT):
            (directory / name).unlink(missing_ok=True)
        write_manifest(directory, replace(manifest, thresholds=(), provenance=provenance))
    return True


def _check(manifest: Manifest, options: CalibrateOptions) -> None:
    spec = manifest.model
    sparse = spec.activation in _SPARSE or any(manifest.thresholds) or options.sparsify == "fatrelu"
    if not sparse:
        raise CalibrationError(
            f"this model has {spec.activation} activations, and every neuron fires: there is nothing to "
            "predict; cut small ones with --sparsify fatrelu --target 0.7 (the perplexity that it costs "
            "is reported), or run the model as it is: it works without calibration"
        )
    for what, rank in (("rank", options.rank), ("late rank", options.late_rank)):
        if rank > manifest.ffn.n_neurons:
            raise CalibrationError(
                f"{what} is {rank}, but a layer has only {manifest.ffn.n_neurons} neurons; give a smaller one"
            )
    if options.predictor == "gate" and not spec.gated:
        raise CalibrationError(
            "--predictor gate needs an FFN with a gate, and this model has none; use --predictor low-rank"
        )


def _parameters(directory: Path, manifest: Manifest) -> int:
    resident = sum(math.prod(entry.shape) for entry in resident_entries(directory).values())
    return resident + manifest.ffn.n_layers * manifest.ffn.n_neurons * manifest.ffn.row_elements


def _fingerprint(manifest: Manifest, texts: Sequence[Path], options: CalibrateOptions, samples: int) -> str:
    def stat(path: Path) -> tuple[str, int, int]:
        with system_errors(path):
            status = path.stat()
        return str(path.resolve()), status.st_size, status.st_mtime_ns

    facts = {
        "flashd": flashd.__version__,
        "bundle": [sums_sha256(manifest), manifest.file(RESIDENT).sha256],
        # Found anew from the model without any, they may have been written already by a killed run.
        "thresholds": None if options.sparsify == "fatrelu" else manifest.thresholds,
        "texts": [stat(path) for path in texts],
        "options": asdict(options) | {"workers": 0, "samples": samples},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


async def _run_model(task: Task) -> Manifest:
    """Thresholds, if they are wanted, and records; returns the manifest with the thresholds that hold."""
    manifest = task.manifest
    if task.options.sparsify == "fatrelu":
        thresholds = await recording.find_thresholds(task)
        what = f"fatrelu {task.options.target:g}"
        manifest = replace(
            manifest, thresholds=thresholds, provenance=manifest.provenance | {SPARSIFIED: what}
        )
    await recording.record(task, manifest.thresholds)
    return manifest


Result = tuple[dict[str, Any], dict[str, WeightArray]]


class _Stopped(Exception):
    """Another layer failed, or the person wants no more."""


@dataclass(frozen=True)
class _Results:
    """By layer: its predictor and its look ahead."""

    predictors: list[Result]
    lookaheads: list[Result]


def _train(task: Task) -> _Results:
    """All layers, several at once, each kept when it is done."""
    from flashd.tools.calibrate import layer as one
    from flashd.tools.calibrate.train import use_threads

    n_layers = task.manifest.ffn.n_layers
    cpus = kernels.default_threads()
    workers = min(task.options.workers or cpus, n_layers)
    stop = threading.Event()

    def step() -> None:
        if stop.is_set():
            raise _Stopped

    job = one.Job(task.scratch, task.manifest.ffn, task.sequences, task.options, step)
    n_lookaheads = n_layers - 1 if task.options.lookahead else 0
    done = 0
    with ThreadPoolExecutor(
        workers,
        "flashd-train",
        initializer=use_threads,
        initargs=(cpus // workers, task.manifest.ffn.n_neurons),
    ) as pool:
        try:
            for work, count in ((one.predictor, n_layers), (one.lookahead, n_lookaheads)):
                futures = {pool.submit(work, job, layer) for layer in range(count)}
                while futures:
                    task.tell("train", done, n_layers + n_lookaheads, "predictors")
                    ended, futures = wait(futures, timeout=0.5, return_when=FIRST_EXCEPTION)
                    for future in ended:
                        future.result()
                    done += len(ended)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    task.tell("train", done, done, "predictors")
    return _Results(
        [job.kept(f"predictor-{layer:03}") for layer in range(n_layers)],
        [job.kept(f"lookahead-{layer:03}") for layer in range(n_lookaheads)],
    )


def _publish(task: Task, manifest: Manifest, results: _Results, texts: Sequence[Path]) -> CalibrateReport:
    """Measure what has come out, and write it."""
    from flashd.tools.calibrate.train import default_epochs

    layers, tensors = _assemble(results)
    options = task.options
    calibration = Calibration(
        format="flashd-calibration",
        format_version=1,
        bundle_sha256=sums_sha256(manifest),
        predictors_sha256="",
        predictors_bytes=0,
        synthetic=False,
        predictor=options.predictor,
        tokens=task.sequences.total,
        layers=tuple(layers),
        provenance={
            "flashd": flashd.__version__,
            "texts": ", ".join(path.name for path in texts),
            "epochs": str(options.epochs or default_epochs(task.sequences.rows("train").stop)),
            "fn_target": f"{options.fn_target:g}",
            "fp_target": f"{options.fp_target:g}",
            "max_requested": f"{options.max_requested:g}",
        },
    )
    requested: dict[int, U8Array] = {
        index: arrays["requested"]
        for index, (facts, arrays) in enumerate(results.predictors)
        if facts["masked"]
    }
    missed = asyncio.run(recording.measure(task, manifest, calibration, tensors, requested))
    layers = [replace(layer, missed_norm=norm) for layer, norm in zip(layers, missed, strict=True)]
    nll = task.scratch.state.nll
    calibration = write_calibration(
        task.directory, manifest, replace(calibration, layers=tuple(layers)), tensors
    )
    looks = [facts or None for facts, _ in results.lookaheads]
    return CalibrateReport(
        directory=os.fspath(task.directory),
        calibration=calibration,
        thresholds=manifest.thresholds,
        perplexity={name: math.exp(total / max(1, count)) for name, (total, count) in nll.items()},
        test_tokens=sum(map(len, task.sequences.part("test"))),
        curves=[facts["curve"] for facts, _ in results.predictors],
        would_request=[facts["would_request"] for facts, _ in results.predictors],
        lookahead=[*looks, *[None] * (len(layers) - len(looks))],
    )


def _assemble(results: _Results) -> tuple[list[LayerCalibration], dict[str, WeightArray]]:
    layers: list[LayerCalibration] = []
    tensors: dict[str, WeightArray] = {}
    known = LayerCalibration.__dataclass_fields__.keys()
    for index, (facts, arrays) in enumerate(results.predictors):
        values = {key: value for key, value in facts.items() if key in known}
        look, look_arrays = results.lookaheads[index] if index < len(results.lookaheads) else ({}, {})
        if look:
            values |= {"lookahead_threshold": look["threshold"], "lookahead_rank": look["rank"]}
        for name in ("s_agg_requested", "s_agg_fired", "capacity_rows"):
            values[name] = tuple(values.get(name, ()))
        layers.append(LayerCalibration(**values))
        tensors[frequency_name(index)] = arrays["frequency"]
        for part in PARTS:
            if part in arrays:
                tensors[tensor_name(index, "predictor", part)] = arrays[part]
            if part in look_arrays:
                tensors[tensor_name(index, "lookahead", part)] = look_arrays[part]
    return layers, tensors
