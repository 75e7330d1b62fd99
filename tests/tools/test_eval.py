"""``flashd eval`` on a tiny model with made-up predictors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from flashd.cli.main import app, main
from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.manifest import MANIFEST, to_json
from flashd.models.decoder import Span
from flashd.runtime.build import build
from flashd.store.in_memory import InMemoryStore
from flashd.store.open import open_manifest
from flashd.testing.predictors import make_predictors
from flashd.testing.tiny_checkpoints import write_opt, write_opt_tokenizer
from flashd.tools.bench.steady import bench_steady
from flashd.tools.convert import ConvertOptions, convert
from flashd.tools.eval.report import EvalReport, share_of
from flashd.tools.eval.run import EvalOptions, evaluate, evaluate_subject
from flashd.tools.eval.scores import log_probs
from flashd.tools.eval.subject import opened
from flashd.tools.eval.text import cloze_items, passages_in, passages_of, read_ids, windows
from flashd.types import BoolArray, F32Array

PARAGRAPH = (
    "The {0} stood at the old harbour wall. Nobody in the town had ever asked it why it looked out, {1}."
)
WORDS = ["ship", "tower", "lamp", "stone", "bell", "gate", "horse", "chair", "roof", "clock", "rope", "sail"]

TEXT = "\n\n".join(
    f"The {word} stood at the old harbour wall. Nobody in the town had asked it why, not even the {word}."
    for word in WORDS
)


def silent(*args: object) -> None:
    pass


def evaluated(bundle: Path, options: EvalOptions) -> EvalReport:
    return evaluate(DaemonConfig(model=str(bundle)), options, silent)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not calibrated."""
    root = tmp_path_factory.mktemp("eval")
    write_opt(root / "source", max_position_embeddings=512)
    write_opt_tokenizer(root / "source")
    convert(root / "source", root / "plain", ConvertOptions(dtype="f32"), None)
    return root / "plain"


@pytest.fixture(scope="module")
def calibrated(plain: Path) -> Path:
    """Random predictors for layers 0 and 2."""
    copy = plain.with_name("calibrated")
    shutil.copytree(plain, copy)
    make_predictors(copy, open_manifest(copy), masked=[True, False, True])
    return copy


@pytest.fixture(scope="module")
def text(plain: Path) -> Path:
    path = plain.with_name("text.txt")
    path.write_text(TEXT)
    return path


async def test_counts_and_losses_are_those_of_the_definition(calibrated: Path, text: Path) -> None:
    """Perplexity against a plain decoder's logits; FN, FP, precision and recall against counting."""
    options = EvalOptions(texts=(text,), tokens=300, context=64)
    seen: list[tuple[int, F32Array, BoolArray]] = []
    async with opened(DaemonConfig(model=str(calibrated), kv_dtype="f32")) as subject:
        rows = await InMemoryStore.load(subject._store)
        layers, d = range(rows.geometry.n_layers), rows.geometry.d_model
        up = [rows.layer(layer).view(np.float32)[:, :d] for layer in layers]
        bias = [np.asarray(subject._weights[f"layers.{i}.ffn.up.bias"]) for i in layers]
        predictor = subject._ffn.predictor
        ask = predictor.predict_prompt

        def spy(layer: int, x: F32Array) -> BoolArray:
            wanted = ask(layer, x)
            seen.append((layer, x, wanted))
            return wanted

        predictor.predict_prompt = spy  # type: ignore[method-assign]  # to see what it is asked
        report = await evaluate_subject(subject, "it", options, silent)
        assert subject.tokenizer is not None
        ids = subject.tokenizer.encode(TEXT, plain=False)
    dense, oracle, sparse = report.modes
    assert [row.mode for row in report.modes] == ["dense", "oracle", "predictor"]
    assert dense.loss == pytest.approx(await _loss(calibrated, ids), abs=1e-5)
    assert dense.perplexity == pytest.approx(np.exp(dense.loss))
    assert (dense.changed, dense.perplexity_change) == (0, 0)
    assert oracle.loss == pytest.approx(dense.loss, abs=1e-5)
    assert oracle.changed == 0
    assert sparse.loss != pytest.approx(dense.loss, abs=1e-5)
    assert sparse.perplexity_change == pytest.approx(sparse.perplexity / dense.perplexity - 1)
    assert sparse.changed_share == sparse.changed / 300
    assert report.tokens == 300
    for layer in (0, 2):
        # The dense pass comes first, five windows of it.
        pairs = [(x @ up[layer].T + bias[layer] > 0, wanted) for i, x, wanted in seen if i == layer][:5]
        fired, wanted = (np.concatenate(each) for each in zip(*pairs, strict=True))
        assert len(fired) == 300
        found = report.layers[layer]
        assert found.masked
        assert found.false_negative == pytest.approx((fired & ~wanted).sum() / fired.sum(), abs=1e-3)
        assert found.false_positive == pytest.approx((wanted & ~fired).sum() / (~fired).sum(), abs=1e-3)
        assert found.precision == pytest.approx((wanted & fired).sum() / wanted.sum(), abs=1e-3)
        assert found.recall == pytest.approx(1 - found.false_negative)
    assert not report.layers[1].masked
    assert report.layers[1].false_negative == 0
    masked = report.layers[::2]
    assert report.false_negative == pytest.approx(sum(layer.false_negative for layer in masked) / 2)


async def _loss(bundle: Path, ids: list[int]) -> float:
    """Mean loss of 300 tokens in windows of 64 with BOS in front, one forward pass a window."""
    runtime = await build(DaemonConfig(model=str(bundle), kv_dtype="f32", predictor="none"))
    losses: list[float] = []
    for start in range(0, 300, 63):
        window = np.array([2, *ids[start : start + min(63, 300 - start)]])
        kv = ContiguousKV(runtime.manifest.model, 64, "f32")
        logits = await runtime.engine._decoder.forward([Span(window, kv)], every_position=True)
        shifted = logits.astype(np.float64)
        norm = np.log(np.exp(shifted).sum(axis=1))
        losses += (norm[:-1] - shifted[np.arange(len(window) - 1), window[1:]]).tolist()
    await runtime.close()
    assert len(losses) == 300
    return float(np.mean(losses))


def test_both_tasks_from_the_command_line(calibrated: Path, plain: Path, text: Path) -> None:
    def flashd(*args: str) -> Result:
        return CliRunner().invoke(app, ["eval", *args])

    shown = flashd(str(calibrated), "--text", str(text), "--task", "both", "--tokens", "200", "--json")
    assert shown.exit_code == 0, shown.output
    report = json.loads(shown.stdout)
    assert report["synthetic"] is True
    assert [row["mode"] for row in report["modes"]] == ["dense", "oracle", "predictor"]
    assert [layer["masked"] for layer in report["layers"]] == [True, False, True]
    assert report["cloze"][0]["exact"]["of"] == len(WORDS)
    assert "dense: 200 to do" in shown.stderr
    for task in ("both", "perplexity"):
        table = flashd(str(calibrated), "--text", str(text), "--tokens", "50", "--task", task).stdout
        assert "made up" in table
        assert "1 (no mask)" in table
        assert ("GAINED" in table) == (task == "both")
    table = flashd(str(plain), "--text", str(text), "--tokens", "50")
    assert table.exit_code == 0, table.output
    assert "not calibrated" in table.stderr
    assert table.stdout.count("dense") == 2
    assert "oracle" not in table.stdout
    wrong = flashd(str(plain), "--text", str(text), "--task", "guess")
    assert "expected one of: perplexity, cloze, both" in str(wrong.exception)


def test_interrupted_it_says_so(
    plain: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashd.tools.eval.run.evaluate", interrupted)
    monkeypatch.setattr("sys.argv", ["flashd", "eval", str(plain), "--text", str(text)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert capsys.readouterr().err.strip() == "flashd: note: interrupted"


def test_thresholds_have_a_row_without_them(calibrated: Path, text: Path) -> None:
    cut = calibrated.with_name("cut")
    shutil.copytree(calibrated, cut)
    manifest = replace(open_manifest(cut), thresholds=(0.3, 0.3, 0.3))
    (cut / MANIFEST).write_text(to_json(manifest))
    make_predictors(cut, manifest)
    report = evaluate(
        DaemonConfig(model=str(cut)),
        EvalOptions(texts=(text,), tokens=100, modes=("no-threshold", "oracle")),
        silent,
    )
    dense, free, oracle = report.modes
    assert free.mode == "no-threshold"
    assert free.loss != pytest.approx(dense.loss, abs=1e-4)
    assert oracle.loss == pytest.approx(dense.loss, abs=1e-4)
    before = evaluate(
        DaemonConfig(model=str(calibrated)), EvalOptions(texts=(text,), tokens=100, modes=("dense",)), silent
    )
    assert [row.loss for row in before.modes] == pytest.approx([free.loss])


async def test_a_cloze_item_is_scored_as_its_whole_text(plain: Path) -> None:
    """Branches of the cache give what running context and word at once gives."""
    from flashd.tools.eval.cloze import _guess

    async with opened(DaemonConfig(model=str(plain), kv_dtype="f32")) as subject:
        assert subject.tokenizer is not None
        encode = subject.tokenizer.encode
        passages = passages_of(TEXT)
        item = cloze_items(passages, encode, items=1, distractors=5, max_tokens=256)[0]
        assert len({len(word) for word in item.words}) > 1
        scores, greedy = await _guess(subject, item)
        greedy_words = []
        for word, score in zip(item.words, scores, strict=True):
            ids = np.array([*item.context, *word])
            kv = subject.new_kv(len(ids))
            logits = (await subject.decoder.forward([Span(ids, kv)], every_position=True))[:-1]
            tail = logits[len(item.context) - 1 :]
            assert log_probs(tail, np.array(word)).sum() == pytest.approx(score, abs=1e-3)
            greedy_words.append(bool((tail.argmax(axis=1) == word).all()))
        assert greedy == greedy_words[0]


def test_windows_take_turns_and_stop_at_the_tokens_asked_for() -> None:
    found = windows([list(range(10)), [20, 21, 22]], 1, context=5, tokens=7)
    assert [window.tolist() for window in found] == [[1, 0, 1, 2, 3], [1, 20, 21, 22]]
    alone = windows([list(range(10))], None, context=4, tokens=0)
    assert [window.tolist() for window in alone] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(ConfigError, match="too short"):
        windows([[5]], None, context=4, tokens=0)


def test_passages(tmp_path: Path) -> None:
    body = "It was a long day at the river for all of them, and nobody had much left to say."
    assert passages_of(f'{body} "Then  we go\nhome."\n\nShort. One.\n\n{body}') == [
        (f'{body} "Then we go', "home")
    ]
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "He was tired and went to sleep"}\nplain text ends here.\n\n')
    assert passages_in(lines) == [("He was tired and went to", "sleep"), ("plain text ends", "here")]
    lines.write_text('{"txt": "x"}')
    with pytest.raises(ConfigError, match="text"):
        passages_in(lines)
    lines.write_text("word\n")
    with pytest.raises(ConfigError, match="one a line"):
        passages_in(lines)


def test_ids_from_a_file(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text("[1, 2,\n 3]\n")
    assert read_ids(ids, 4) == [1, 2, 3]
    with pytest.raises(ConfigError, match="vocabulary has 3"):
        read_ids(ids, 3)
    ids.write_text("1 two")
    with pytest.raises(ConfigError, match="'two'"):
        read_ids(ids, 4)


def test_what_cannot_be_evaluated_is_named(plain: Path, text: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text(" ".join(map(str, range(50))))
    assert evaluated(plain, EvalOptions(token_files=(ids,))).tokens == 50
    wrong = [
        (EvalOptions(), "--text"),
        (EvalOptions(texts=(tmp_path / "none",)), "cannot read"),
        (EvalOptions(texts=(text,), context=9999), "--context"),
        (EvalOptions(texts=(text,), modes=("oracle",)), "--mode"),
        (EvalOptions(texts=(text,), cloze=True, distractors=50), "--distractors"),
        (EvalOptions(token_files=(ids,), cloze=True), "two sentences"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            evaluated(plain, options)
    bare = tmp_path / "bare"
    shutil.copytree(plain, bare)
    (bare / MANIFEST).write_text(to_json(replace(open_manifest(bare), tokenizer=None)))
    with pytest.raises(ConfigError, match="no tokenizer"):
        evaluated(bare, EvalOptions(texts=(text,)))
    assert evaluated(bare, EvalOptions(token_files=(ids,), tokens=10)).tokens == 10


def test_intervals_are_wilsons() -> None:
    half = share_of(50, 100)
    assert (half.low_95, half.high_95) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    none = share_of(0, 10)
    assert (none.low_95, none.high_95) == (0, pytest.approx(0.2775, abs=1e-4))


def test_a_long_answer_is_steady(plain: Path) -> None:
    report = bench_steady(DaemonConfig(model=str(plain)), 200, "hello", 2, silent)
    assert [row.sampling for row in report.rows] == ["greedy", "nucleus"]
    for row in report.rows:
        assert row.kv_bytes == (report.prompt_tokens + 199) * 3 * 2 * 32 * 2
        assert 0 < row.attention_early_ms < row.early_mean_ms + row.attention_early_ms
        assert row.footprint_spread < 0.05
    for tokens, message in ((600, "context of 512"), (5, "20 or more")):
        with pytest.raises(ConfigError, match=message):
            bench_steady(DaemonConfig(model=str(plain)), tokens, "hello", 1, silent)
