"""The phases that run the model: finding thresholds, recording, and measuring what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashd.layout.calibration import Calibration
from flashd.layout.manifest import Manifest
from flashd.predictor.open import make_predictor
from flashd.store.open import load_gates
from flashd.tools.calibrate.dense import Blind, DenseModel, Masker, Recorder, dense_model
from flashd.tools.calibrate.measure import missed_norm
from flashd.tools.calibrate.options import CalibrateOptions, CalibrateProgress, OnProgress
from flashd.tools.calibrate.scratch import Scratch
from flashd.tools.calibrate.sparsify import threshold_of
from flashd.tools.calibrate.tokens import Sequences
from flashd.types import I64Array, U8Array, WeightArray

# Tokens whose activations thresholds are chosen from, and whose missed norm is measured.
_PROBE_TOKENS = 4096
_NORM_TOKENS = 1024


@dataclass(frozen=True)
class Task:
    """What the phases share."""

    directory: Path
    manifest: Manifest
    options: CalibrateOptions
    sequences: Sequences
    scratch: Scratch
    progress: OnProgress

    def tell(self, phase: str, done: int, total: int, unit: str = "tokens") -> None:
        """Report progress."""
        self.progress(CalibrateProgress(phase, done, total, unit))


async def find_thresholds(task: Task) -> tuple[float, ...]:
    """Choose a threshold for every layer, from the model as it is without any.

    What it is worth on the test text is measured on the way, to tell later what thresholds cost.
    """
    scratch, state = task.scratch, task.scratch.state
    if state.thresholds is not None:
        return tuple(state.thresholds)
    train = task.sequences.part("train")
    wanted = max(1, min(len(train), _PROBE_TOKENS // max(map(len, train))))
    probes = [train[i * len(train) // wanted] for i in range(wanted)]
    tests = task.sequences.part("test")
    async with dense_model(task.directory, ()) as model:
        scratch.open_records(sum(map(len, probes[: state.probed])))
        await _run(task, model, "thresholds", [*probes, *tests], "probed", record=len(probes), test="dense")
        tokens, spec = sum(map(len, probes)), task.manifest.model
        found = []
        for layer in range(spec.n_layers):
            bias = model.biases["gate" if spec.gated else "up"][layer]
            records = scratch.records(layer, tokens)
            found.append(
                await threshold_of(model.store, layer, spec.activation, bias, records, task.options.target)
            )
    state.thresholds = found
    scratch.commit(now=True)
    return tuple(found)


async def record(task: Task, thresholds: tuple[float, ...]) -> None:
    """Run all text through the model and write down what its FFNs do."""
    state, sequences = task.scratch.state, task.sequences.tokens
    if state.recorded == len(sequences):
        return
    kind = "thresholded" if any(thresholds) else "dense"
    async with dense_model(task.directory, thresholds) as model:
        task.scratch.open_records(sum(map(len, sequences[: state.recorded])))
        await _run(task, model, "record", sequences, "recorded", record=len(sequences), test=kind)
    task.scratch.close_records()


async def _run(
    task: Task,
    model: DenseModel,
    phase: str,
    sequences: list[I64Array],
    counter: str,
    *,
    record: int,
    test: str,
) -> None:
    """Run sequences from where ``state``'s counter stands: the first ``record`` are recorded, and the
    likelihood of the test part, which comes last, is summed up."""
    scratch, state = task.scratch, task.scratch.state
    recorder = Recorder(scratch, task.manifest.ffn.n_neurons)
    total = sum(map(len, sequences))
    first_test = len(sequences) - len(task.sequences.part("test"))
    done = sum(map(len, sequences[: getattr(state, counter)]))
    for index in range(getattr(state, counter), len(sequences)):
        task.tell(phase, done, total)
        model.observer = recorder if index < record else Blind()
        found = await model.run(sequences[index], likelihood=index >= first_test)
        if index >= first_test:
            sums = state.nll.get(test, (0.0, 0))
            state.nll[test] = (sums[0] + found[0], sums[1] + found[1])
        done += len(sequences[index])
        setattr(state, counter, index + 1)
        scratch.commit()
    scratch.commit(now=True)
    task.tell(phase, total, total)


async def measure(
    task: Task,
    manifest: Manifest,
    calibration: Calibration,
    tensors: Mapping[str, WeightArray],
    requested: Mapping[int, U8Array],
) -> list[float]:
    """What the predictors lose: share of each layer's output norm, and likelihood of the test text.

    Args:
        task: what the phases share.
        manifest: with the thresholds that hold.
        calibration: of the new predictors.
        tensors: of them.
        requested: masks of all recorded tokens, by masked layer.
    """
    scratch, spec = task.scratch, manifest.model
    tests = task.sequences.part("test")
    rows = task.sequences.rows("test")
    chosen = np.unique(np.linspace(rows.start, rows.stop - 1, _NORM_TOKENS).astype(np.int64))
    async with dense_model(task.directory, manifest.thresholds) as model:
        missed = []
        for layer in range(spec.n_layers):
            task.tell("measure", layer, spec.n_layers + len(tests), "steps")
            # What the gate itself says misses nothing (with the kept float16 inputs it would seem to).
            if layer not in requested or calibration.predictor == "gate":
                missed.append(0.0)
                continue
            biases = (model.biases["up"][layer], model.biases["gate"][layer])
            cut = manifest.thresholds[layer] if manifest.thresholds else 0.0
            x = _inputs(scratch.records(layer, task.sequences.total), chosen)
            mask = requested[layer][chosen]
            missed.append(await missed_norm(model.store, layer, spec.activation, biases, cut, x, mask))
        masked = [layer.masked for layer in calibration.layers]
        gates = await load_gates(model.store, masked) if calibration.predictor == "gate" else ()
        predictor = make_predictor(
            calibration,
            tensors,
            manifest.ffn,
            spec.activation,
            gates=gates,
            gate_bias=model.biases["gate"],
            thresholds=manifest.thresholds,
        )
        model.observer = Masker(predictor)
        sums = (0.0, 0)
        for index, tokens in enumerate(tests):
            task.tell("measure", spec.n_layers + index, spec.n_layers + len(tests), "steps")
            found = await model.run(tokens)
            sums = (sums[0] + found[0], sums[1] + found[1])
        scratch.state.nll["predicted"] = sums
    task.tell("measure", spec.n_layers + len(tests), spec.n_layers + len(tests), "steps")
    return missed


def _inputs(records: Any, chosen: I64Array) -> Any:
    return np.ascontiguousarray(records["x"][chosen], np.float32)
