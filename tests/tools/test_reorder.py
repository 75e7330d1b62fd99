"""Neurons in another order: fewer reads, the same model."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import flashd_command, flashd_env
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from flashd.disk.buffers import aligned_empty
from flashd.errors import BundleError, CalibrationError, ConfigError, ConversionError, OutOfSpaceError
from flashd.layout.calibration import CALIBRATION, Calibration, LayerCalibration, tensor_shapes
from flashd.layout.manifest import MANIFEST, TOKENIZER, Manifest, to_json
from flashd.predictor.lowrank import LowRankPredictor
from flashd.store.open import load_resident, open_manifest, open_store
from flashd.store.predictors import open_predictors
from flashd.testing.bundles import list_files, make_bundle, tiny_spec
from flashd.tools.calibrate.dense import dense_model
from flashd.tools.calibrate.write import write_calibration
from flashd.tools.convert.destination import Destination
from flashd.tools.reorder.orders import by_coactivation, by_frequency, cost, missing
from flashd.tools.reorder.run import KINDS, ReorderReport, choose, record, reorder
from flashd.tools.verify import verify
from flashd.types import NUMPY_DTYPE, BoolArray, F32Array, TokenizerSpec, U8Array

N, STRIDE = 83, 512
MAKERS = {"frequency": by_frequency, "coactivation": by_coactivation}


def bits(fired: BoolArray) -> U8Array:
    return np.packbits(fired, axis=1)


def groups_that_fire_together(tokens: int, seed: int) -> BoolArray:
    """Ten groups of eight, scattered; each token fires two of them, and three neurons fire alone."""
    rng = np.random.default_rng(seed)
    group = np.random.default_rng(0).permutation(np.append(np.repeat(np.arange(10), 8), [10, 11, 12]))
    chosen = rng.random((tokens, 13)).argsort(axis=1) < 2
    return chosen[:, group] & (rng.random((tokens, N)) < 0.95)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", ["groups", "silent", "all", "one token", "one neuron"])
def test_an_order_has_every_neuron_once(name: str, kind: str) -> None:
    fired = {
        "groups": groups_that_fire_together(300, 1),
        "silent": np.zeros((50, N), np.bool_),
        "all": np.ones((50, N), np.bool_),
        "one token": np.random.default_rng(2).random((1, N)) < 0.2,
        "one neuron": np.ones((20, 1), np.bool_),
    }[kind]
    order = MAKERS[name](bits(fired), fired.shape[1])
    assert np.array_equal(np.sort(order), np.arange(fired.shape[1]))


def test_neurons_that_fire_together_become_neighbours() -> None:
    order = by_coactivation(bits(groups_that_fire_together(1500, 1)), N)
    missed = groups_that_fire_together(400, 2)
    before = cost(missed, np.arange(N), STRIDE, 0, 64)
    after = cost(missed, order, STRIDE, 0, 64)
    assert before.missing == after.missing
    assert before.nbytes == after.nbytes == before.missing * STRIDE
    assert after.reads < before.reads / 3
    over_gaps = cost(missed, order, STRIDE, 2, 64)
    assert over_gaps.reads < after.reads
    assert over_gaps.nbytes > after.nbytes
    assert over_gaps.weighed_bytes(1 << 20) < after.weighed_bytes(1 << 20)


def test_frequent_neurons_come_first() -> None:
    fired = np.random.default_rng(0).random((400, N)) < np.linspace(0.05, 0.9, N)
    order = by_frequency(bits(fired), N)
    assert (np.diff(fired.sum(axis=0)[order]) <= 0).all()


@pytest.mark.parametrize("capacity", [0, 7, 30, N])
def test_what_is_missing_with_the_least_recently_used_out(capacity: int) -> None:
    fired = np.random.default_rng(capacity).random((200, N)) < 0.15
    missed = missing(bits(fired), N, capacity)
    last: dict[int, int] = {}
    for token, row in enumerate(fired):
        wanted = set(np.flatnonzero(row).tolist())
        assert set(np.flatnonzero(missed[token]).tolist()) == wanted - last.keys()
        last |= dict.fromkeys(wanted, token)
        # Among those of the same age any may go, so the rest is asked of what has really gone.
        gone = len(last) - max(capacity, len(wanted))
        if gone > 0:
            following = missing(bits(np.vstack([fired[: token + 1], np.ones(N, np.bool_)])), N, capacity)[-1]
            out = set(np.flatnonzero(following).tolist()) & last.keys()
            assert len(out) == gone
            stay = last.keys() - out
            assert max(last[i] for i in out) <= min((last[i] for i in stay), default=token)
            for neuron in out:
                del last[neuron]


def sparse_bundle(path: Path, store: str = "file", family: str = "opt", calibrated: bool = True) -> Manifest:
    """A bundle most of whose neurons stay silent, with a tokenizer and made-up predictors."""
    spec = tiny_spec(family, activation="relu")
    made = make_bundle(path, spec, store=store, dtype="f32")  # type: ignore[arg-type]  # parametrised
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(spec.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(path / TOKENIZER))
    manifest = replace(
        made.manifest,
        files=list_files(path),
        tokenizer=TokenizerSpec(),
        thresholds=(0.3, 0.3, 0.3),
    )
    (path / MANIFEST).write_text(to_json(manifest))
    if calibrated:
        curves = {"s_agg_requested": (0.5,) * 64, "s_agg_fired": (0.5,) * 64, "capacity_rows": (40,) * 64}
        layers = [
            LayerCalibration(True, 0.1, 4, 0.2, 4, **curves),
            LayerCalibration(True, 0.1, 3, 0.2, 2, **curves),
            LayerCalibration(True, -0.1, 5, **curves),
        ]
        about = Calibration(
            "flashd-calibration", 1, "", "", 0, True, "low-rank", 7, tuple(layers), {"made": "up"}
        )
        rng = np.random.default_rng(3)
        tensors = {
            name: rng.standard_normal(shape, np.float32).astype(NUMPY_DTYPE[dtype])
            for name, (dtype, shape) in tensor_shapes(about, manifest).items()
        }
        for layer in range(3):
            tensors[f"layers.{layer}.frequency"][:] = rng.random(spec.d_ffn, np.float32)
        write_calibration(path, manifest, about, tensors)
    return manifest


async def rows_of(path: Path, layer: int) -> U8Array:
    manifest = open_manifest(path)
    store = await open_store(path, manifest)
    rows = aligned_empty(manifest.ffn.layer_bytes).reshape(manifest.ffn.n_neurons, -1)
    await store.read_rows(layer, np.arange(len(rows)), rows)
    await store.close()
    return rows


async def logits(path: Path, tokens: list[int]) -> tuple[float, int]:
    async with dense_model(path, open_manifest(path).thresholds) as model:
        return await model.run(np.array(tokens, np.int64))


def order_between(old: U8Array, new: U8Array) -> np.ndarray:
    places = {row.tobytes(): i for i, row in enumerate(old)}
    assert len(places) == len(old)
    return np.array([places[row.tobytes()] for row in new])


@pytest.mark.parametrize(("store", "family"), [("file", "opt"), ("zarr", "llama")])
def test_the_reordered_bundle_is_the_same_model(tmp_path: Path, store: str, family: str) -> None:
    source, dest = tmp_path / "a", tmp_path / "b"
    manifest = sparse_bundle(source, store, family)
    text = long_text(tmp_path)
    report = reorder(source, dest, [text], by="coactivation")
    assert (report.order, report.directory, report.layers) == ("coactivation", str(dest), 3)
    assert report.costs.keys() == {"original", "coactivation"}
    assert verify(dest).problems == []
    made = open_manifest(dest)
    assert made.provenance["neuron_order"] == "coactivation"
    assert made.thresholds == manifest.thresholds
    assert (dest / TOKENIZER).read_bytes() == (source / TOKENIZER).read_bytes()
    tokens = [3, 40, 7, 95, 12, 12, 60]
    assert asyncio.run(logits(dest, tokens)) == pytest.approx(asyncio.run(logits(source, tokens)), rel=1e-5)

    old, new = load_resident(source, manifest), load_resident(dest, made)
    before, after = open_predictors(source, manifest), open_predictors(dest, made)
    assert before is not None
    assert after is not None
    predictors = [LowRankPredictor(manifest.ffn, *found) for found in (before, after)]
    x = np.random.default_rng(1).standard_normal((3, manifest.ffn.d_model), np.float32)
    orders = [order_between(*(asyncio.run(rows_of(path, i)) for path in (source, dest))) for i in range(3)]
    for layer, order in enumerate(orders):
        assert (order != np.arange(len(order))).any()
        name = f"layers.{layer}.ffn.up.bias"
        if name in old:
            assert np.array_equal(new.pop(name), old.pop(name)[order])
        frequency = f"layers.{layer}.frequency"
        assert np.array_equal(after[1][frequency], before[1][frequency][order])
        theirs, ours = (requested(predictor, layer, x) for predictor in predictors)
        assert np.array_equal(ours, theirs[:, order])
        if layer:
            then, now = (predictor.lookahead(layer - 1, x) for predictor in predictors)
            assert then is not None
            assert set(order[now].tolist()) == set(then.tolist())
    for name, tensor in old.items():
        assert np.array_equal(new[name], tensor)


def requested(predictor: LowRankPredictor, layer: int, x: F32Array) -> BoolArray:
    return predictor.predict_prompt(layer, x)


def test_what_cannot_be_reordered(tmp_path: Path) -> None:
    manifest = sparse_bundle(tmp_path / "a", calibrated=False)
    text = tmp_path / "text"
    text.write_text("w1 w2 " * 75)
    with pytest.raises(ConfigError, match=f"expected one of: {', '.join(KINDS)}"):
        reorder(tmp_path / "a", tmp_path / "b", [text], by="size")
    with pytest.raises(CalibrationError, match="150 tokens, too few"):
        reorder(tmp_path / "a", tmp_path / "b", [text])
    with pytest.raises(ConversionError, match="exists"):
        reorder(tmp_path / "a", tmp_path / "a", [text])
    with pytest.raises(ConfigError, match="samples is -4, expected 1 or more"):
        reorder(tmp_path / "a", tmp_path / "b", [text], samples=-4)
    dense = [bits(np.ones((900, 80), np.bool_))] * 3
    with pytest.raises(CalibrationError, match="all orders are alike"):
        choose(tmp_path, manifest, dense, "auto", lambda *state: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "text"]


def long_text(folder: Path) -> Path:
    path = folder / "text"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 96, 1500)))
    return path


def test_that_nothing_can_be_written_is_said_before_the_text_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse_bundle(tmp_path / "a")
    text = long_text(tmp_path)
    monkeypatch.setattr("flashd.tools.reorder.run.record", lambda *_: pytest.fail("runs the text"))
    with pytest.raises(ConversionError, match=r"cannot write .*text"):
        reorder(tmp_path / "a", text / "b", [text])

    class Disk:
        f_frsize = 1
        f_bavail = 100_000

    monkeypatch.setattr("os.statvfs", lambda path: Disk)
    with pytest.raises(OutOfSpaceError, match=r"needs .* GB more, the disk has .* GB free"):
        reorder(tmp_path / "a", tmp_path / "b", [text])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "text"]


def test_stopped_at_the_end_it_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = sparse_bundle(tmp_path / "a")
    text, dest = long_text(tmp_path), tmp_path / "b"
    notes: list[str] = []

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    def again(by: str = "frequency") -> ReorderReport:
        return reorder(tmp_path / "a", dest, [text], by=by, note=notes.append)

    def nothing_left_but(*names: str) -> None:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a", "text", *names])

    for where in ("run.rewrite", "rewrite.write_calibration"):  # the latter with all else written
        with monkeypatch.context() as patch:
            patch.setattr(f"flashd.tools.reorder.{where}", stopped)
            patch.setattr(Destination, "__exit__", lambda self, *_: self._unlock())  # as if killed
            with pytest.raises(KeyboardInterrupt):
                again()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        with pytest.raises(KeyboardInterrupt):
            again()
    nothing_left_but("b.partial")
    monkeypatch.setattr("flashd.tools.reorder.run.record", lambda *_: pytest.fail("runs the text again"))
    for _ in range(2):  # before the last rename, and behind it
        report = again()
        assert (report.order, report.directory, report.costs) == ("frequency", str(dest), {})
        nothing_left_but("b")
        assert verify(dest).problems == []
        assert open_predictors(dest, open_manifest(dest)) is not None
    assert "is there already" in notes[-1]
    # What else it is made from.
    with pytest.raises(ConversionError, match="exists"):
        again("coactivation")
    (tmp_path / "a" / MANIFEST).write_text(to_json(replace(manifest, thresholds=(0.3, 0.3, 0.4))))
    with pytest.raises(BundleError, match="other thresholds"):
        again()
    (tmp_path / "a" / CALIBRATION).unlink()
    with pytest.raises(ConversionError, match="exists"):
        again()
    (tmp_path / "a" / MANIFEST).write_text(to_json(manifest))
    with pytest.raises(ConversionError, match="exists"):
        again()


def test_auto_takes_the_better_one_or_none(tmp_path: Path) -> None:
    spec = tiny_spec(d_ffn=N)
    manifest = make_bundle(tmp_path, spec).manifest
    fired = [bits(groups_that_fire_together(1200, layer)) for layer in range(spec.n_layers)]
    found = choose(tmp_path, manifest, fired, "auto", lambda *state: None)
    assert found.order == "coactivation"
    assert found.costs["coactivation"].weighed_bytes(4096) < found.costs["original"].weighed_bytes(4096)
    # In neighbours already, so that nothing is better.
    order = by_coactivation(fired[0], N)
    sorted_ = [bits(np.unpackbits(layer, axis=1, count=N)[:, order].astype(np.bool_)) for layer in fired]
    chosen = choose(tmp_path, manifest, sorted_, "frequency", lambda *state: None)
    assert chosen.order == "frequency"
    assert chosen.costs["frequency"].nbytes > chosen.costs["original"].nbytes


async def test_what_fires_is_recorded(tmp_path: Path) -> None:
    manifest = sparse_bundle(tmp_path, calibrated=False)
    seen = []
    sequences = [np.array([1, 2, 3]), np.array([4, 5])]
    fired = await record(tmp_path, manifest, sequences, lambda *state: seen.append(state))
    assert [layer.shape for layer in fired] == [(5, 10)] * 3
    share = np.unpackbits(fired[0], axis=1).mean()
    assert 0 < share < 0.5
    assert seen == [("record", 0, 5, "tokens"), ("record", 3, 5, "tokens"), ("record", 5, 5, "tokens")]


def test_the_command(tmp_path: Path) -> None:
    sparse_bundle(tmp_path / "a")
    long_text(tmp_path)
    arguments = ("reorder", "a", "b", "--text", "text", "--by", "frequency", "--json")
    done = subprocess.run(
        flashd_command(*arguments), env=flashd_env(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["directory"], facts["order"], facts["layers"]) == ("b", "frequency", 3)
    assert facts["costs"]["frequency"]["reads"] > 0
    without = subprocess.run(
        flashd_command("reorder", "a", "c"), env=flashd_env(tmp_path), cwd=tmp_path, capture_output=True
    )
    assert without.returncode == 2
    assert b"--text FILE" in without.stderr
