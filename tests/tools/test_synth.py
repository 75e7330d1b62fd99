"""`flashd synth`: a bundle like any other, whose neurons fire as the paper says, as its predictors know."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from flashd import kernels
from flashd.errors import ConfigError, ConversionError, OutOfSpaceError
from flashd.kernels.lane import ComputeLane
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.calibration import from_json
from flashd.models.decoder import Decoder, Span
from flashd.predictor.oracle import OraclePredictor
from flashd.prefetch.resident import ResidentFFN
from flashd.runtime.ffn import _biases
from flashd.store.open import load_resident, open_manifest, open_store
from flashd.store.predictors import open_predictors
from flashd.tools.bench.token.budget import checked_budget, sensible_budget
from flashd.tools.bench.token.modes import MODES
from flashd.tools.convert.destination import Destination
from flashd.tools.inspect import inspect
from flashd.tools.synth import SynthOptions, synth
from flashd.tools.synth.shapes import CONFIGS, shape_plan
from flashd.tools.verify import verify

TINY = SynthOptions("opt-tiny")


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(like, curve)``: the bundle and its report."""
    root, cache = tmp_path_factory.mktemp("synth"), {}

    def get(like, curve):
        if (like, curve) not in cache:
            dest = root / f"{like}-{curve}"
            cache[like, curve] = dest, synth(dest, SynthOptions(like, curve))
        return cache[like, curve]

    return get


@pytest.mark.parametrize("like", ["opt-tiny", "llama-tiny"])
@pytest.mark.parametrize("curve", ["opt", "falcon"])
def test_the_bundle_is_whole_says_synthetic_and_its_curve_is_the_papers(made, like, curve):
    folder, report = made(like, curve)
    found = verify(folder)
    assert found.problems == []
    assert "made up" in inspect(folder).provenance["synthetic"]
    assert asdict(report)["synthetic"] is True
    for row in report.rows:
        assert row.measured == pytest.approx(row.target, rel=0.2), row
    text = (folder / "calibration.json").read_bytes()
    calibration = from_json(text, "calibration.json", open_manifest(folder))
    assert calibration.synthetic
    assert calibration.predictors_sha256 == hashes(folder)["predictors.safetensors"]
    for layer in calibration.layers:
        assert layer.masked
        assert len(layer.s_agg_requested) == len(layer.s_agg_fired) == len(layer.capacity_rows) == 64
        assert list(layer.capacity_rows) == sorted(layer.capacity_rows)
        assert layer.s_agg_requested[0] == pytest.approx(layer.requested, rel=0.05)
        assert layer.false_negative == 0


@pytest.mark.parametrize(("like", "curve"), [("opt-tiny", "opt"), ("llama-tiny", "falcon")])
def test_what_fires_in_the_model_is_what_the_predictors_and_lookaheads_request(made, like, curve):
    folder, report = made(like, curve)
    inputs, logits, oracle = asyncio.run(run_dense(folder, tokens=192))
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(axis=1).tolist())) > 20  # says more than one word
    _, tensors = open_predictors(folder, open_manifest(folder))
    fired, requested = [], []
    for layer, x in enumerate(inputs):
        true = oracle.predict_prompt(layer, x)
        for kind, source in (("predictor", layer), ("lookahead", layer - 1)):
            if source >= 0:
                guess = predicted(tensors, f"layers.{source}.{kind}", inputs[source])
                assert not (true & ~guess).any()
        fired.append(true.mean())
        requested.append(predicted(tensors, f"layers.{layer}.predictor", x).mean())
    assert np.mean(fired) == pytest.approx(report.fired, rel=0.15)
    assert np.mean(requested) == pytest.approx(report.requested, rel=0.15)


def predicted(tensors, name, x):
    w1, b1, w2, b2 = (tensors[f"{name}.{part}"] for part in ("w1", "b1", "w2", "b2"))
    mask = np.zeros((len(x), len(w2)), bool)
    for start in range(0, len(x), 16):
        ids, used = kernels.predict(w1, w2, np.ascontiguousarray(x[start : start + 16]), 0.0, b1, b2)
        mask[start : start + 16, ids] = used
    return mask


async def run_dense(folder, tokens):
    """Every layer's FFN input and the logits of random tokens, all neurons computed."""
    manifest = open_manifest(folder)
    spec, weights, lane = manifest.model, load_resident(folder, manifest), ComputeLane()
    store = await open_store(folder, manifest, "memory")
    biases = _biases(weights, spec.n_layers, "up"), _biases(weights, spec.n_layers, "gate")
    inner = ResidentFFN(store.inner, lane, spec.activation, *biases)
    inputs = []

    class Spy:
        async def apply(self, layer, x):
            def seen():
                inputs.append(x())
                return inputs[-1]

            return await inner.apply(layer, seen)

    decoder = Decoder(spec, weights, Spy(), lane)
    span = Span(
        np.random.default_rng(0).integers(spec.vocab_size, size=tokens), ContiguousKV(spec, tokens, "f32")
    )
    logits = await decoder.forward([span], every_position=True)
    lane.close()
    rows = [store.inner.layer(layer) for layer in range(spec.n_layers)]
    return inputs, logits, OraclePredictor(manifest.ffn, spec.activation, rows, *biases)


@pytest.mark.parametrize("stop_at", ["resident", "ffn", "finish", "calibration", "publish"])
def test_stopped_anywhere_the_rerun_ends_with_the_same_files(made, tmp_path, monkeypatch, stop_at):
    folder, _ = made("opt-tiny", "opt")
    dest = tmp_path / "out"

    def stop(progress):
        if progress.phase == stop_at:
            raise KeyboardInterrupt

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flashd.tools.convert.run._COMMIT_BYTES", 1)
        if stop_at == "calibration":
            patch.setattr("flashd.tools.synth.predictors.write_durably", stopped)
        if stop_at == "publish":
            patch.setattr(Destination, "publish", stopped)
        with pytest.raises(KeyboardInterrupt):
            synth(dest, TINY, stop)
    assert not dest.exists()
    synth(dest, TINY, note=lambda line: pytest.fail(line))
    assert hashes(dest) == hashes(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_it_leaves_nothing_that_opens_and_the_rerun_finishes(tmp_path):
    dest = tmp_path / "out"
    command = [sys.executable, "-m", "flashd", "synth", "--like", "opt-tiny", "--layers", "24", str(dest)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "ffn" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    report = synth(dest, SynthOptions("opt-tiny", layers=24), note=lambda line: pytest.fail(line))
    assert verify(dest).ok
    assert report.bytes > 8e6


def test_other_options_are_other_weights(made, tmp_path):
    folder, _ = made("opt-tiny", "opt")
    report = synth(tmp_path / "out", SynthOptions("opt-tiny", sparsity=0.9, seed=1, dtype="bf16"))
    assert report.fired == pytest.approx(0.1, rel=0.1)
    assert {row.what for row in report.rows} == {"requested", "fired"}
    assert hashes(folder)["ffn.bundle"] != hashes(tmp_path / "out")["ffn.bundle"]
    assert open_manifest(tmp_path / "out").dtype == "bf16"


def test_shapes_are_the_published_ones():
    sizes = {name: shape_plan(name).spec for name in CONFIGS}
    opt = sizes["opt-6.7b"]
    assert (opt.n_layers, opt.d_model, opt.d_ffn, opt.vocab_size, opt.max_context) == (
        32,
        4096,
        16384,
        50272,
        2048,
    )
    llama = sizes["llama-2-7b"]
    assert (llama.d_ffn, llama.gated, llama.activation, llama.rope) == (11008, True, "relu", False)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"like": "opt-7b"}, "unknown shape 'opt-7b'; known: opt-tiny"),
        ({"curve": "mistral"}, "unknown curve 'mistral'; known: opt, falcon"),
        ({"sparsity": 0.1}, "sparsity is 0.1, expected 0.2 to 0.9999"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"layers": 0}, "layers is 0, expected 1 to 1000"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_options(tmp_path, wrong, what):
    with pytest.raises(ConfigError, match=what):
        synth(tmp_path / "out", SynthOptions(**{"like": "opt-tiny", **wrong}))
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_looked_at_first(tmp_path, monkeypatch):
    need = synth(tmp_path / "one", TINY).bytes

    class Disk:
        f_frsize = 1
        f_bavail = need  # the files fit, the directory around them doesn't

    monkeypatch.setattr("os.statvfs", lambda path: Disk)
    with pytest.raises(OutOfSpaceError, match=r"needs .* GB more, the disk has .* GB free"):
        synth(tmp_path / "two", TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "flashd", "synth", "--like", "opt-tiny", str(tmp_path / "out")]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "synthetic opt-tiny, f16" in plain.stdout
    assert "requested\t5\t24.0%\t" in plain.stdout
    # As after a kill right behind the last rename.
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, plain.stdout)
    assert "is there already, made by the same command" in again.stderr
    budget = plain.stdout.splitlines()[-1].split()[-1]
    manifest = open_manifest(tmp_path / "out")
    assert budget == sensible_budget(tmp_path / "out", manifest)
    checked_budget(tmp_path / "out", manifest, MODES.values(), budget)


def test_only_what_the_same_command_made_is_there_already(made, tmp_path):
    folder, report = made("opt-tiny", "opt")
    notes = []
    assert asdict(synth(folder, SynthOptions("opt-tiny", "opt"), note=notes.append)) == asdict(report)
    assert "is there already" in notes[0]
    with pytest.raises(ConversionError, match="exists; choose another place"):
        synth(folder, SynthOptions("opt-tiny", seed=1))
    dest = shutil.copytree(folder, tmp_path / "out")
    (dest / "predictors.safetensors").unlink()
    with pytest.raises(ConversionError, match="exists; choose another place"):
        synth(dest, TINY)
    synth(dest, replace(TINY, overwrite=True), note=lambda line: pytest.fail(line))
    assert hashes(dest) == hashes(folder)
