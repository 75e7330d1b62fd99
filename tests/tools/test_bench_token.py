"""`flashd bench token`: what its modes read and hold, and that its figures add up."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashd.cli.bench_token import print_token
from flashd.config import DaemonConfig
from flashd.disk.probe import open_engine
from flashd.errors import ConfigError, FlashdError
from flashd.layout.manifest import BUNDLE
from flashd.runtime.build import build
from flashd.runtime.sampling import SamplingParams
from flashd.store.open import open_manifest
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.testing.store_suite import MadeStore, WeightStoreTests
from flashd.tools.bench.token import TokenOptions, TokenReport, TokenRow, bench_token
from flashd.tools.bench.token.budget import _demand, checked_budget, sensible_budget
from flashd.tools.bench.token.build import Built, build_mode
from flashd.tools.bench.token.free_run import Recorder, free_run
from flashd.tools.bench.token.limit import memory_group
from flashd.tools.bench.token.modes import MODES, modes_named
from flashd.tools.bench.token.options import Sample, Task
from flashd.tools.bench.token.report import token_rows
from flashd.tools.bench.token.run import _modes
from flashd.tools.bench.token.split import SplitStore, split_copy
from flashd.tools.bench.token.worker import _Measuring
from flashd.tools.synth import SynthOptions, synth

BUDGET = "3MB"  # of 1.8 MB of weights, 1 MB of stream buffers and 0.3 MB of predictors
NOTHING = lambda *_: None  # noqa: E731 - a progress that nobody watches
WIDE = tiny_spec(d_model=128, d_embed=128, d_head=32)  # rows without padding


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("token") / "tiny"
    synth(folder, SynthOptions("opt-tiny"))
    return folder


def task(bundle: Path, mode: str, **other) -> Task:
    given = {
        "split": "", "group": "", "budget": BUDGET, "eviction": "", "backend": "auto", "threads": 0,
        "seed": 0, "prompt_tokens": 32, "warmup_tokens": 2, "tokens": 4, "free_steps": 2,
    }  # fmt: skip
    return Task(directory=str(bundle), mode=mode, **(given | other))


class TestSplitStore(WeightStoreTests):
    spec = WIDE

    @pytest.fixture
    async def made(self, tmp_path):
        made = make_bundle(tmp_path / "bundle", self.spec, align_bytes=512)
        with split_copy(made.directory, made.manifest, tmp_path, NOTHING) as path:
            store = SplitStore(await open_engine(path), made.manifest.ffn)
            yield MadeStore(store, made.rows, data_files=[path])
            await store.close()


class TestSplitStoreGated(TestSplitStore):
    spec = tiny_spec("llama", d_model=256, d_embed=256, d_head=64)


async def test_a_neuron_without_bundling_costs_two_reads(tmp_path):
    made = make_bundle(tmp_path / "bundle", tiny_spec(d_model=256, d_embed=256, d_head=64))
    ids = np.arange(0, made.manifest.ffn.n_neurons, 2)
    out = np.zeros((len(ids), made.manifest.ffn.stride_bytes), np.uint8)
    with split_copy(made.directory, made.manifest, tmp_path, NOTHING) as path:
        store = SplitStore(await open_engine(path, "buffered"), made.manifest.ffn)
        before = store.read_stats.reads
        await store.read_rows(1, ids, out)
        assert store.read_stats.reads - before == 2 * len(ids)
        await store.close()
    assert np.array_equal(out, made.rows[1, ids])


def test_the_split_copy_goes_whatever_happens(tmp_path, monkeypatch):
    made = make_bundle(tmp_path / "bundle", WIDE)
    before = sorted(tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    with pytest.raises(KeyboardInterrupt), split_copy(made.directory, made.manifest, tmp_path, NOTHING):
        raise KeyboardInterrupt
    monkeypatch.setattr("os.pwrite", full)
    with (
        pytest.raises(OSError, match="no space"),
        split_copy(made.directory, made.manifest, tmp_path, NOTHING),
    ):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_rows_with_padding_cannot_be_split(tmp_path):
    made = make_bundle(tmp_path / "bundle")
    message = r"rows of 128 bytes lie 512 apart"
    with (
        pytest.raises(ConfigError, match=message),
        split_copy(made.directory, made.manifest, tmp_path, NOTHING),
    ):
        pass


async def test_every_mode_says_the_same(bundle, tmp_path):
    """Predictors of made-up bundles are exact, so that even dense and sparse modes agree."""
    manifest = open_manifest(bundle)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompt = np.random.default_rng(1).integers(manifest.model.vocab_size, size=40).tolist()
    said = {}

    async def says(runtime):
        serving = asyncio.create_task(runtime.engine.run())
        session = runtime.engine.submit(prompt, params)
        said_ = [token async for piece in session.pieces() for token in piece.tokens]
        serving.cancel()
        await asyncio.wait([serving])
        await runtime.close()
        return said_

    with split_copy(bundle, manifest, tmp_path, NOTHING) as split:
        for mode in MODES.values():
            path = str(split) if mode.sparse and not mode.bundled else ""
            eviction = "frequency" if mode.prefetch else ""
            built = await build_mode(task(bundle, mode.name, split=path, eviction=eviction))
            said[mode.name] = await says(built.runtime)
    daemon = await says(await build(DaemonConfig(model=str(bundle), predictor="none", backend="memory")))
    assert said == dict.fromkeys(MODES, daemon)
    assert len(set(daemon)) > 2


def test_the_least_budget_is_known_without_loading_anything(bundle):
    """The worker, which loads everything, takes the first budget that is not refused, and no smaller one."""
    manifest = open_manifest(bundle)
    mode = MODES["+prefetch"]
    with pytest.raises(ConfigError) as caught:
        checked_budget(bundle, manifest, [mode], "1MB")
    least = _demand(bundle, manifest, mode).least_bytes
    assert f"give it {least / 1e6:.1f} MB or more" in str(caught.value)

    async def load(budget):
        built = await build_mode(task(bundle, mode.name, budget=str(budget)))
        await built.runtime.close()

    asyncio.run(load(least))
    with pytest.raises(ConfigError, match="too small: weights"):
        asyncio.run(load(least - 1))
    share = sensible_budget(bundle, manifest)
    assert least <= checked_budget(bundle, manifest, MODES.values(), share) < 1.15 * least


async def test_what_is_recorded_can_be_done_once_more(bundle):
    built = await build_mode(task(bundle, "+bundling"))
    runtime, recorder = built.runtime, built.recorder
    serving = asyncio.create_task(runtime.engine.run())
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    before = runtime.store.inner.read_stats.bytes_read
    with recorder.kernel_calls():
        recorder.on = True
        recorder.next_step()
        session = runtime.engine.submit(list(range(20)), params)
        async for _ in session.pieces():
            recorder.next_step()
        recorder.on = False
    serving.cancel()
    await asyncio.wait([serving])
    stats = runtime.store.inner.read_stats
    read = stats.bytes_read - before
    calls = {name: sum(c.func.__name__ == name for step in recorder.steps for c in step.calls)
             for name in ("ffn_dots", "ffn_down", "attention", "predict")}  # fmt: skip
    assert min(calls.values()) >= 6 * 4  # steps times layers
    before = stats.bytes_read
    seconds = await free_run(recorder.steps, runtime.lane)
    assert len(seconds) == len(recorder.steps)
    assert runtime.store.inner.read_stats.bytes_read - before == read > 0
    # Nothing that later steps need has changed.
    window = runtime.ffn.source.sparse.window
    rows = np.fromfile(bundle / BUNDLE, np.uint8)
    manifest = runtime.manifest
    stride = manifest.ffn.stride_bytes
    for layer, offset in enumerate(manifest.layer_offset_bytes):
        here = np.flatnonzero((window.row_of[layer] >= 0) & ~window.in_flight[layer])
        assert len(here) > 10
        region = rows[offset : offset + manifest.ffn.n_neurons * stride].reshape(-1, stride)
        np.testing.assert_array_equal(window.pool.matrix[window.row_of[layer][here]], region[here])
    assert runtime.store.stats.checks.mismatched_rows == 0
    await runtime.close()


def test_steps_are_measured_between_those_that_are_done_once_more(bundle):
    def order(tokens: int, free_steps: int) -> str:
        built = Built(None, Recorder(), ())
        recorded = _Measuring(
            task(bundle, "+prefetch", tokens=tokens, free_steps=free_steps), built
        )._recorded
        return "".join("fm"[not one] for one in recorded)

    assert order(8, 8) == "mmmmffffmmmmffff"
    assert order(5, 0) == "mmmmm"
    assert order(1, 1) == "mf"
    assert order(7, 9) == "mmmffffmmmmfffff"


@pytest.fixture(scope="module")
def found(bundle):
    """A whole run by the command."""
    plot = bundle.parent / "plot.png"
    options = [
        "--rounds",
        "1",
        "--tokens",
        "4",
        "--warmup",
        "3",
        "--prompt",
        "32",
        "--plot",
        str(plot),
        "--json",
    ]
    command = [sys.executable, "-m", "flashd", "bench", "token", str(bundle), "--budget", BUDGET, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["plot.png", "tiny"]
    return json.loads(done.stdout)


def test_the_commands_figures_add_up(found, bundle):
    rows = {row["mode"]: row for row in found["rows"]}
    assert list(rows) == list(MODES)
    assert found["synthetic"] is True
    assert "synthetic opt" in found["model"]
    for row in rows.values():
        parts = ("flash_wait_ms", "memory_ms", "compute_ms", "overhead_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["ms_per_token"])
        assert all(row[part] >= 0 for part in parts)
        assert row["gb_per_s"] * row["flash_busy_ms"] / 1e3 == pytest.approx(row["gb_read_per_token"])
        assert row["overlap"] > 0
        assert row["within_budget"]
    naive = rows["naive"]
    whole = sum((bundle / name).stat().st_size for name in ("resident.safetensors", "ffn.bundle"))
    assert naive["gb_read_per_token"] * 1e9 == pytest.approx(whole, rel=0.3)  # reads ahead come in lumps
    assert naive["speedup_naive"] == 1
    assert rows["hybrid"]["gb_read_per_token"] < naive["gb_read_per_token"]
    assert rows["+predictor"]["hit_ratio"] == 0
    assert 0 < rows["+window"]["hit_ratio"] <= rows["+prefetch"]["hit_ratio"] <= 1
    assert rows["+bundling"]["hit_ratio"] == rows["+window"]["hit_ratio"]
    assert rows["+bundling"]["reads_per_token"] < rows["+window"]["reads_per_token"]
    assert rows["+window"]["gb_read_per_token"] < rows["+predictor"]["gb_read_per_token"]


def test_the_table_for_people(found, capsys):
    print_token(TokenReport(**{**found, "rows": [TokenRow(**row) for row in found["rows"]]}))
    lines = capsys.readouterr().out.splitlines()
    assert "synthetic opt" in lines[0]
    assert "budget 3MB" in lines[0]
    assert [line.split("\t")[0] for line in lines[2:8]] == list(MODES)
    assert "Budget enforced by" in lines[8]


SAMPLE = Sample(
    ms_per_token=10.0, flash_wait_ms=4.0, flash_busy_ms=5.0, memory_ms=1.0, compute_ms=4.0, overhead_ms=1.0,
    bytes_per_token=1e7, counted=True, engine_bytes_per_token=1e7, reads_per_token=9.0,
    needed_bytes_per_token=5e6, requested=100.0, hits=75.0, free_ms=8.0, overlaps=(1.0, 1.2),
    peak_bytes=1 << 30, footprint_bytes=1 << 30, kv_bytes=0, budget_bytes=1 << 30, prefill_s=1.0,
)  # fmt: skip


def test_a_row_is_the_median_round_beside_the_baselines():
    rounds = [
        replace(SAMPLE, ms_per_token=ms, hits=ms, overlaps=(ms / 10, 1.25)) for ms in (30.0, 10.0, 20.0)
    ]
    rows = token_rows({"naive": [replace(SAMPLE, ms_per_token=60.0)], "+prefetch": rounds}, 1 << 29)
    naive, all_ = rows
    assert (all_.ms_per_token, all_.hit_ratio, all_.rounds_ms) == (20.0, 0.2, [30.0, 10.0, 20.0])
    assert (all_.speedup_naive, all_.speedup_hybrid, all_.flash_busy_vs_hybrid) == (3.0, None, None)
    assert (all_.gb_per_s, all_.amplification, all_.overlap) == (2.0, 2.0, 1.25)
    assert not all_.within_budget
    assert naive.speedup_naive == 1.0


def test_what_cannot_be_measured_is_said_first(bundle, tmp_path, monkeypatch):
    for late in ("split_copy", "_warm"):
        monkeypatch.setattr(f"flashd.tools.bench.token.run.{late}", lambda *_, late=late: pytest.fail(late))
    made = make_bundle(tmp_path / "plain", WIDE)
    for folder, options, message in (
        (
            made.directory,
            TokenOptions("50%", modes=("prefetch",)),
            r"\+prefetch: the bundle has no predictors",
        ),
        (made.directory, TokenOptions("50%", tokens=64), "too many for a context of 64"),
        (bundle, TokenOptions("50%", modes=("fast",)), "unknown mode 'fast'; known: naive, hybrid"),
        (bundle, TokenOptions("auto"), "the budget is auto"),
        (bundle, TokenOptions("lots"), "budget is 'lots'"),
        (bundle, TokenOptions("50%", tokens=512), "too many for a context of 512"),
        (bundle, TokenOptions("1MB"), r"mode hybrid: a budget of 1.0 MB is too small"),
        (bundle, TokenOptions("1.2MB", modes=("window",)), r"mode \+window: a budget of 1.2 MB is too small"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench_token(folder, options)
    with pytest.raises(ConfigError, match="backend memory reads nothing"):
        TokenOptions("50%", backend="memory")
    with pytest.raises(ConfigError, match="eviction is 'random', expected one of: "):
        TokenOptions("50%", eviction="random")
    with pytest.raises(ConfigError, match="rounds: 0, expected 1"):
        TokenOptions("50%", rounds=0)
    assert [mode.name for mode in modes_named(("prefetch", "naive"))] == ["naive", "+prefetch"]


def test_a_mode_that_fails_says_which_and_why(bundle):
    options = TokenOptions(BUDGET, modes=("hybrid",), rounds=1, tokens=1, backend="none")
    with pytest.raises(FlashdError, match=r"mode hybrid: .*'none'"):
        bench_token(bundle, options)


def test_a_group_of_its_own_enforces_its_limit():
    code = "import sys; from flashd.tools.bench.token.limit import join_group; from pathlib import Path; " \
           "join_group(Path(sys.argv[1])); print('in', flush=True); bytearray(128 << 20)"  # fmt: skip
    with memory_group(64 << 20) as (group, why):
        if group is None:
            assert why
            pytest.skip(f"no cgroup here: {why}")
        done = subprocess.run(
            [sys.executable, "-c", code, str(group)], capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.returncode) == ("in\n", -9)
    assert not group.exists()


def test_modes_that_a_bundle_cannot_have_are_left_out_with_a_note(tmp_path):
    padded = make_bundle(tmp_path / "padded", tiny_spec(max_context=128))
    plain = make_bundle(tmp_path / "zarr", replace(WIDE, max_context=128), store="zarr")
    options = TokenOptions("50%", tokens=4, warmup_tokens=4, prompt_tokens=16)
    for made in (padded, plain):
        modes, notes = _modes(made.directory, made.manifest, options)
        assert [mode.name for mode in modes] == ["naive", "hybrid"]
        assert "the bundle has no predictors" in notes[0]
        (made.directory / "calibration.json").touch()
        modes, notes = _modes(made.directory, made.manifest, options)
        assert [mode.name for mode in modes] == ["naive", "hybrid", "+bundling", "+prefetch"]
        assert notes[0].startswith("left out +predictor, +window: ")
