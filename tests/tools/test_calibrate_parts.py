"""The parts of calibration that need no torch: texts, masks, windows, thresholds."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashd.errors import BundleError, CalibrationError, ConfigError
from flashd.store.in_memory import InMemoryStore
from flashd.store.predictors import open_predictors
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.testing.predictors import make_predictors
from flashd.tools.calibrate.dense import nll
from flashd.tools.calibrate.measure import frequency, missed_norm, quality, threshold_for, usage
from flashd.tools.calibrate.options import CalibrateOptions
from flashd.tools.calibrate.scratch import Scratch
from flashd.tools.calibrate.sparsify import threshold_of
from flashd.tools.calibrate.tokens import cut, default_samples, read_text, split_files, spread
from flashd.tools.calibrate.write import write_calibration
from flashd.types import BoolArray


def masks(tokens: int, n: int, share: float, seed: int = 0) -> BoolArray:
    return np.random.default_rng(seed).random((tokens, n)) < share


def packed(mask: BoolArray) -> np.ndarray:
    return np.packbits(mask, axis=1)


def test_quality_is_pooled_over_tokens() -> None:
    fired, wanted = masks(700, 45, 0.2), masks(700, 45, 0.3, 1)
    found = quality(packed(wanted), packed(fired), 45)
    assert found.false_negative == pytest.approx(np.mean(~wanted[fired]))
    assert found.false_positive == pytest.approx(np.mean(wanted[~fired]))
    assert found.requested == pytest.approx(wanted.mean())
    assert found.precision == pytest.approx(np.mean(fired[wanted]))
    np.testing.assert_allclose(frequency(packed(wanted), 45), wanted.mean(axis=0), rtol=1e-6)


def test_usage_against_brute_force() -> None:
    sequences = [masks(90, 45, 0.02, 1), masks(70, 45, 0.04, 2), masks(10, 45, 0.5, 3)]
    found = usage([packed(mask) for mask in sequences], 45)
    shares, capacities = [], []
    for k in range(1, 65):
        rows = [
            np.count_nonzero(mask[end - k : end].any(axis=0))
            for mask in sequences
            for end in range(k, len(mask) + 1)
        ]
        shares.append(np.mean(rows) / 45)
        capacities.append(np.percentile(rows, 99, method="higher"))
    # Fewer sequences have long windows: the curves are made to rise all the same.
    np.testing.assert_allclose(found.s_agg, np.maximum.accumulate(shares))
    np.testing.assert_array_equal(found.capacity_rows, np.maximum.accumulate(capacities))
    assert found.s_agg[0] == pytest.approx(np.concatenate(sequences).mean())
    short = usage([packed(masks(5, 45, 0.1))], 45)
    assert len(set(short.s_agg[4:])) == 1


def test_threshold_for_misses_no_more_than_allowed() -> None:
    scores = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    threshold = threshold_for(scores, 0.04, 9.0)
    assert np.count_nonzero(~(scores > np.float32(threshold))) == 40
    assert threshold_for(scores[:0], 0.04, 9.0) == 9.0
    tied = threshold_for(np.ones(10, np.float32), 0.04, 9.0)
    assert np.float32(1) > np.float32(tied)


def test_texts_are_cut_and_split() -> None:
    pieces = cut(range(100), 11, bos=7)
    assert [len(piece) for piece in pieces] == [11] * 10
    assert all(piece[0] == 7 for piece in pieces)
    assert pieces[1].tolist() == [7, *range(10, 20)]
    assert [len(piece) for piece in cut(range(25), 10, None)] == [10, 10]  # 5 tokens say nothing
    found = split_files([cut(range(200), 10, None), cut(range(1000, 1100), 10, None)])
    assert [len(found.part(name)) for name in ("train", "validation", "test")] == [24, 3, 3]
    assert [found.rows(name) for name in ("train", "validation", "test")] == [
        slice(0, 240),
        slice(240, 270),
        slice(270, 300),
    ]
    assert [int(piece[0]) for piece in found.part("test")] == [90, 190, 1090]
    few = split_files([cut(range(20), 10, None), cut(range(50, 70), 10, None)])
    assert [len(few.part(name)) for name in ("train", "validation", "test")] == [2, 1, 1]
    with pytest.raises(CalibrationError, match="2 sequences"):
        split_files([cut(range(20), 10, None)])
    assert default_samples(6_000_000) == 200_000
    assert default_samples(6_700_000_000) == 10_000


@pytest.mark.parametrize("limit_bytes", [5, 1 << 20, 1 << 60])
def test_a_short_text_is_read_whatever_the_limit(tmp_path: Path, limit_bytes: int) -> None:
    path = tmp_path / "text"
    path.write_text("words")
    assert read_text(path, limit_bytes) == "words"


def test_of_a_long_text_pieces_are_read_from_all_over_it(tmp_path: Path) -> None:
    path = tmp_path / "text"
    words = [f"wört{i}" for i in range(10_000)]
    path.write_text(" ".join(words))
    got = read_text(path, 8000).split()
    assert set(got) <= set(words)
    numbers = [int(word[4:]) for word in got]
    assert numbers == sorted(numbers)
    assert len(numbers) > 600
    assert {number // 1250 for number in numbers} == set(range(8))
    # A pipe has no length.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("x" * 9000))
    writer.start()
    assert read_text(pipe, 9001) == "x" * 9000
    writer.join()


@pytest.mark.parametrize("count", [0, 7, 8, 999, 1000, 5000])
def test_tokens_are_spread(count: int) -> None:
    ids = list(range(1000))
    kept = spread(ids, count)
    assert len(kept) == min(count, 1000)
    assert sorted(set(kept)) == list(kept)
    if 100 <= count < 1000:
        assert {i // 125 for i in kept} == set(range(8))


def test_a_calibration_that_cannot_be_written_leaves_the_one_there_is(tmp_path: Path) -> None:
    made = make_bundle(tmp_path)
    calibration, tensors = make_predictors(tmp_path, made.manifest)
    wrong = replace(calibration, layers=tuple(replace(each, rank=1000) for each in calibration.layers))
    with pytest.raises(BundleError, match="rank is 1000"):
        write_calibration(tmp_path, made.manifest, wrong, tensors)
    opened = open_predictors(tmp_path, made.manifest)
    assert opened is not None
    assert opened[0] == calibration


@pytest.mark.parametrize(
    "wrong",
    [
        {"predictor": "none"},
        {"sparsify": "relu"},
        {"samples": -1},
        {"target": 1.0},
        {"fn_target": 0.0},
        {"seed": 1 << 70},
        {"seed": -1},
    ],
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CalibrateOptions(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_nll() -> None:
    logits = np.random.default_rng(0).standard_normal((100, 30)).astype(np.float32) * 4
    following = np.random.default_rng(1).integers(0, 30, 99)
    odds = np.exp(logits[:99].astype(np.float64))
    expected = -np.log(odds[np.arange(99), following] / odds.sum(axis=1)).sum()
    assert nll(logits, following) == pytest.approx(expected)


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_missed_norm_and_threshold(tmp_path: Path, family: str) -> None:
    """Against the formulas, from the rows themselves."""
    made = make_bundle(tmp_path / "bundle", tiny_spec(family, activation="silu"), dtype="f32")
    store = InMemoryStore(made.manifest.ffn, made.rows)
    x = np.random.default_rng(0).standard_normal((20, 32)).astype(np.float32)
    parts = made.rows[1].view(np.float32)[:, : 32 * (3 if family == "llama" else 2)].reshape(80, -1, 32)
    z = (x @ parts[:, 1 if family == "llama" else 0].T).astype(np.float64)
    act = z / (1 + np.exp(-z))
    hidden = act * (x @ parts[:, 0].T) if family == "llama" else act
    wanted = masks(20, 80, 0.7)
    missed, whole = (hidden * ~wanted) @ parts[:, -1], hidden @ parts[:, -1]
    expected = np.linalg.norm(missed, axis=1).sum() / np.linalg.norm(whole, axis=1).sum()
    found = asyncio.run(missed_norm(store, 1, "silu", (None, None), 0.0, x, packed(wanted)))
    assert found == pytest.approx(expected, rel=1e-4)

    (tmp_path / "scratch").mkdir()
    with Scratch(tmp_path / "scratch", made.manifest.ffn, "x", print) as scratch:
        scratch.open_records(0)
        for layer in range(3):
            scratch.append(layer, x, wanted)
        scratch.close_records()
        records = scratch.records(1, 20)
        np.testing.assert_array_equal(np.unpackbits(records["mask"], axis=1, count=80).astype(bool), wanted)
        scratch.reserve(1000)
        with pytest.raises(CalibrationError, match=r"need \d+\.\d+ GB .*--samples"):
            scratch.reserve(1 << 50)
        threshold = asyncio.run(threshold_of(store, 1, "silu", None, records, 0.6))
    assert np.mean(np.abs(act) <= threshold) == pytest.approx(0.6, abs=0.01)
