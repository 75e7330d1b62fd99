"""``flashd calibrate`` on models of a few kilobytes: what it writes, and how it goes on after a kill."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from convert_tokens import byte_bpe
from support import REPO, flashd_command, flashd_env

from flashd.errors import BundleError, CalibrationError
from flashd.layout.calibration import CALIBRATION, PREDICTORS
from flashd.layout.manifest import MANIFEST
from flashd.store.open import open_manifest, open_predictors
from flashd.testing.tiny_checkpoints import (
    LLAMA_CONFIG,
    OPT_CONFIG,
    llama_shapes,
    opt_shapes,
    random_tensors,
    write_hf,
)
from flashd.tools.calibrate.options import CalibrateOptions, CalibrateProgress
from flashd.tools.calibrate.report import REPORT, write_report
from flashd.tools.calibrate.run import calibrate, remove_thresholds
from flashd.tools.calibrate.scratch import SCRATCH
from flashd.tools.convert import convert
from flashd.tools.inspect import inspect
from flashd.tools.verify import verify

QUICK = CalibrateOptions(samples=2000, rank=6, epochs=2, workers=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((REPO / "docs/architecture.md").read_text()[:3000])
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles by family; not to be changed."""
    root = tmp_path_factory.mktemp("bundles")
    for name, config, shapes in (
        ("opt", OPT_CONFIG, opt_shapes(OPT_CONFIG)),
        ("llama", LLAMA_CONFIG, llama_shapes(LLAMA_CONFIG)),
    ):
        source = write_hf(root / f"{name}-hf", config, random_tensors(shapes, 3))
        byte_bpe().save(str(source / "tokenizer.json"))
        convert(source, root / name)
    return {name: root / name for name in ("opt", "llama")}


@pytest.fixture
def opt(converted: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted["opt"], tmp_path / "opt"))


@pytest.fixture
def llama(converted: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted["llama"], tmp_path / "llama"))


def test_relu_model(opt: Path, text: Path) -> None:
    seen: list[CalibrateProgress] = []
    report = calibrate(opt, [text], QUICK, seen.append)
    manifest = open_manifest(opt)
    opened = open_predictors(opt, manifest)
    assert opened is not None
    assert opened[0] == report.calibration
    assert manifest.thresholds == ()
    assert not (opt / SCRATCH).exists()
    assert [state.phase for state in seen if state.done == state.total] == ["record", "train", "measure"]
    for index, layer in enumerate(report.calibration.layers):
        # Random weights: about half of the neurons fire, of which a rank of 6 in 32 knows little.
        assert 0.3 < layer.fired < 0.7
        assert layer.s_agg_fired[0] == pytest.approx(layer.fired, abs=0.05)
        assert list(layer.s_agg_fired) == sorted(layer.s_agg_fired)
        assert opened[1][f"layers.{index}.frequency"].mean() == pytest.approx(
            1 if layer.masked and layer.requested > 0.99 else layer.fired, abs=0.3
        )
    assert verify(opt).problems == []
    assert verify(opt).unlisted == []


def test_masks_reach_the_target_on_other_text(opt: Path, text: Path) -> None:
    """Every layer gets a mask where any is allowed; what is missed stays near 4 %."""
    report = calibrate(opt, [text], replace(QUICK, max_requested=0.99, rank=8, late_rank=12))
    layers = report.calibration.layers
    assert all(layer.masked and layer.rank == 12 for layer in layers)  # all of three are among the last four
    for layer in layers:
        assert layer.false_negative < 0.09
        assert layer.false_positive < 0.95
        assert 0 < layer.missed_norm < 0.3
        assert layer.capacity_rows[0] >= layer.requested * 72
        assert layer.s_agg_requested[0] == pytest.approx(layer.requested, abs=0.05)
        assert layer.capacity_rows == tuple(sorted(layer.capacity_rows))
    assert [layer.lookahead_rank for layer in layers] == [12, 12, 0]
    assert report.lookahead[0] is not None
    assert report.lookahead[0]["recall"] > 0.5
    assert report.perplexity["predicted"] == pytest.approx(report.perplexity["dense"], rel=0.1)
    files = write_report(report)
    assert [path.name for path in files] == ["calibration.md", "calibration.png"]
    content = (opt / REPORT).read_text()
    assert "perplexity on" in content
    assert content.count("\n| 2 | yes | 12 |") == 1
    facts = inspect(opt)
    assert facts.calibrated
    assert facts.calibration is not None
    assert facts.calibration.masked_layers == 3


class _Killed(BaseException):
    """As sudden as a signal."""


@pytest.mark.parametrize(("phase", "done"), [("record", 1000), ("train", 3), ("measure", 4)])
def test_goes_on_after_a_kill(
    opt: Path, text: Path, tmp_path: Path, phase: str, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashd.tools.calibrate.scratch._COMMIT_S", 0.0)
    options = replace(QUICK, max_requested=0.99, epochs=1)
    twin = Path(shutil.copytree(opt, tmp_path / "twin"))
    whole = calibrate(twin, [text], options)

    def kill(state: CalibrateProgress) -> None:
        if (state.phase, state.done >= done) == (phase, True):
            raise _Killed

    with pytest.raises(_Killed):
        calibrate(opt, [text], options, kill)
    assert (opt / SCRATCH).is_dir()
    assert open_predictors(opt, open_manifest(opt)) is None
    seen: list[CalibrateProgress] = []
    again = calibrate(opt, [text], options, seen.append)
    started = {state.phase: state.done for state in reversed(seen)}
    assert started.get("record", 2000) >= (900 if phase == "record" else 2000)
    if phase == "measure":
        assert "record" not in started
    assert again.calibration == whole.calibration
    assert (opt / PREDICTORS).read_bytes() == (twin / PREDICTORS).read_bytes()
    assert (opt / CALIBRATION).read_bytes() == (twin / CALIBRATION).read_bytes()
    assert again.perplexity == whole.perplexity


def test_other_options_start_anew(opt: Path, text: Path) -> None:
    def kill(state: CalibrateProgress) -> None:
        if state.phase == "train":
            raise _Killed

    notes: list[str] = []
    with pytest.raises(_Killed):
        calibrate(opt, [text], QUICK, kill)
    calibrate(opt, [text], replace(QUICK, rank=3, epochs=1), note=notes.append)
    assert any("starting anew" in line for line in notes)


def test_gate_is_exact(llama: Path, text: Path) -> None:
    """With thresholds and the gate in RAM, what is not requested is nothing: not a bit changes."""
    before = (llama / MANIFEST).read_bytes()
    options = replace(QUICK, sparsify="fatrelu", target=0.7, predictor="gate", epochs=1)
    report = calibrate(llama, [text], options)
    manifest = open_manifest(llama)
    assert manifest.thresholds == report.thresholds
    assert all(value > 0 for value in manifest.thresholds)
    assert manifest.provenance["sparsify"] == "fatrelu 0.7"
    for layer in report.calibration.layers:
        assert layer.masked
        assert layer.false_negative == layer.missed_norm == 0
        assert layer.fired == pytest.approx(0.3, abs=0.1)
    assert report.perplexity["predicted"] == report.perplexity["thresholded"]
    assert report.perplexity["dense"] != report.perplexity["thresholded"]
    assert remove_thresholds(llama)
    assert (llama / MANIFEST).read_bytes() == before
    assert open_predictors(llama, open_manifest(llama)) is None
    assert not remove_thresholds(llama)


def test_killed_with_thresholds_written_it_goes_on(
    llama: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has the thresholds already, calibration.json is not there yet."""
    options = replace(QUICK, sparsify="fatrelu", target=0.7, predictor="gate", lookahead=False)

    def kill(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr("flashd.tools.calibrate.write._write_tensors", kill)
        with pytest.raises(_Killed):
            calibrate(llama, [text], options)
    thresholds = open_manifest(llama).thresholds
    assert thresholds
    assert not (llama / CALIBRATION).exists()
    phases: set[str] = set()
    again = calibrate(llama, [text], options, lambda state: phases.add(state.phase), pytest.fail)
    assert phases == {"train", "measure"}
    assert again.thresholds == thresholds


def test_low_rank_of_a_thresholded_model(llama: Path, text: Path) -> None:
    options = replace(QUICK, sparsify="fatrelu", target=0.9, lookahead=False, max_requested=0.99, epochs=1)
    first = calibrate(llama, [text], options)
    assert first.calibration.predictor == "low-rank"
    assert all(look is None for look in first.lookahead)
    assert any(layer.masked for layer in first.calibration.layers)
    # The thresholds stay when it is calibrated again.
    second = calibrate(llama, [text], replace(QUICK, rank=3, epochs=1, lookahead=False))
    assert second.thresholds == first.thresholds
    assert set(second.perplexity) == {"thresholded", "predicted"}


def test_what_cannot_be_calibrated(opt: Path, llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="--sparsify fatrelu --target"):
        calibrate(llama, [text], QUICK)
    with pytest.raises(CalibrationError, match="--predictor low-rank"):
        calibrate(opt, [text], replace(QUICK, predictor="gate"))
    with pytest.raises(CalibrationError, match="late rank is 100000, but a layer has only"):
        calibrate(opt, [text], replace(QUICK, late_rank=100_000))
    with pytest.raises(CalibrationError, match=r"nothing\.txt: .*No such file"):
        calibrate(opt, [tmp_path / "nothing.txt"], QUICK)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(CalibrationError, match="at least 3 are needed"):
        calibrate(opt, [short], QUICK)
    with pytest.raises(BundleError, match="no such directory"):
        calibrate(tmp_path / "none", [text], QUICK)
    (opt / "calibration.json").mkdir()
    with pytest.raises(CalibrationError, match=r"calibration\.json: a directory, expected a file; move it"):
        calibrate(opt, [text], QUICK)
    (opt / "calibration.json").rmdir()
    manifest = json.loads((opt / MANIFEST).read_text())
    (opt / MANIFEST).write_text(json.dumps(manifest | {"tokenizer": None}))
    with pytest.raises(CalibrationError, match="--tokenizer"):
        calibrate(opt, [text], QUICK)
    assert not (opt / SCRATCH).exists()


def test_two_at_once(opt: Path, text: Path) -> None:
    errors: list[Exception] = []

    def second(state: CalibrateProgress) -> None:
        if not errors:
            with pytest.raises(CalibrationError, match="another calibration works there") as caught:
                calibrate(opt, [text], QUICK)
            errors.append(caught.value)

    # From inside the first one's training: its recording runs an event loop.
    calibrate(opt, [text], QUICK, lambda state: second(state) if state.phase == "train" else None)
    assert errors


def test_without_torch(opt: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("layer", "train"):
        monkeypatch.delitem(sys.modules, f"flashd.tools.calibrate.{name}", raising=False)
        monkeypatch.delattr(f"flashd.tools.calibrate.{name}", raising=False)
    with pytest.raises(CalibrationError, match=r"pip install 'flashd\[calibrate\]'"):
        calibrate(opt, [text], QUICK)


def test_training_learns() -> None:
    """A mask that a rank of 4 explains is learned from a few thousand tokens, far better than chance."""
    from flashd.tools.calibrate import train
    from flashd.tools.calibrate.measure import bits

    rng = np.random.default_rng(0)
    x = rng.standard_normal((6000, 24), np.float32) * 3 + 1
    scores = np.maximum((x - 1) @ rng.standard_normal((24, 4), np.float32), 0) @ rng.standard_normal((4, 50))
    mask = scores > np.quantile(scores, 0.8)
    wanted = np.packbits(mask, axis=1)
    train.use_threads(1, 50)
    weights = train.train(x[:5000].astype(np.float16), wanted[:5000], 50, 8, epochs=5, seed=0)
    found = train.scores(weights, x[5000:])
    truth = bits(wanted[5000:], 50)
    threshold = np.quantile(found[truth], 0.04)
    assert np.mean(found[~truth] > threshold) < 0.1


def test_gradients_are_those_of_torch() -> None:
    import torch

    from flashd.tools.calibrate.train import _set_gradients

    torch.manual_seed(0)
    x, target = torch.randn(7, 5), (torch.rand(7, 11) < 0.3).float()
    shapes = (3, 5), (3,), (11, 3), (11,)
    ours = [torch.randn(shape) for shape in shapes]
    theirs = [each.clone().requires_grad_() for each in ours]
    logits = torch.relu(x @ theirs[0].T + theirs[1]) @ theirs[2].T + theirs[3]
    weight = torch.where(target > 0, 0.5 / 0.2, 0.5 / 0.8)
    torch.nn.functional.binary_cross_entropy_with_logits(logits, target, weight).backward()
    _set_gradients(ours, x, target.clone(), 0.2)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


@pytest.mark.slow
def test_command_is_killed_and_goes_on(opt: Path, text: Path, tmp_path: Path) -> None:
    """SIGKILL as soon as something is kept; the same command finishes and leaves nothing but its results."""
    command = flashd_command(
        "calibrate", str(opt), "--text", str(text), "--samples", "2000", "--rank", "4", "--json"
    )
    env = flashd_env(tmp_path) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not any((opt / SCRATCH).glob("predictor-*.npz")):
            time.sleep(0.01)
        process.kill()
    assert (opt / SCRATCH).is_dir()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "record" not in done.stderr
    assert json.loads(done.stdout)["calibration"]["tokens"] > 1000
    assert {path.name for path in opt.iterdir()} >= {"calibration.json", "calibration.md"}
    assert not (opt / SCRATCH).exists()
    undone = subprocess.run(
        flashd_command("calibrate", str(opt), "--sparsify", "none"), env=env, capture_output=True, text=True
    )
    assert undone.returncode == 0
    assert "no thresholds to remove" in undone.stderr
