"""The trained ReLU model, calibrated as the README says: how its neurons are predicted, and served so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support import REPO

from flashd.config import DaemonConfig
from flashd.runtime.build import build
from flashd.runtime.sampling import SamplingParams
from flashd.stats import SparseStats
from flashd.tools.calibrate.options import CalibrateOptions
from flashd.tools.calibrate.run import calibrate
from flashd.tools.convert import ConvertOptions, convert
from flashd.tools.eval.run import EvalOptions, evaluate

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("relu-sparsity")]

HERE = REPO / "ops" / "relu_model"
TEXTS = tuple(sorted((HERE / "held_out").glob("*.txt")))
PROMPTS = ("Anne had always thought", "Background: The islands were", "Fellow-Citizens of the Senate", "The")
N_NEW = 48


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("relu") / "bundle"
    convert(HERE / "opt-relu-6m", path, ConvertOptions(), None)
    calibrate(path, [HERE / "calibration.txt"], CalibrateOptions(samples=30_000))
    return path


def test_predictors_are_as_good_as_the_papers(bundle: Path) -> None:
    """False negatives and positives of LLM in a flash, section 3.1, on texts that nothing was trained on."""
    report = evaluate(DaemonConfig(model=str(bundle)), EvalOptions(texts=TEXTS, tokens=6000), lambda *_: None)
    assert report.tokens == 6000
    assert sum(layer.masked for layer in report.layers) >= 5
    assert report.false_negative <= 0.05
    assert report.false_positive <= 0.07
    _, oracle, sparse = report.modes
    assert abs(oracle.perplexity_change) < 1e-3
    assert abs(sparse.perplexity_change) <= 0.01


async def answers(bundle: Path, together: bool, **settings: Any) -> tuple[list[list[int]], SparseStats]:
    """Greedy tokens of the prompts, served together or one after the other."""
    runtime = await build(DaemonConfig(model=str(bundle), **settings))
    assert runtime.tokenizer is not None
    params = SamplingParams(max_tokens=N_NEW, ignore_eos=True, temperature=0)
    prompts = [runtime.tokenizer.encode(prompt, plain=False) for prompt in PROMPTS]
    running = asyncio.create_task(runtime.engine.run())
    sessions = []
    for prompt in prompts:
        sessions.append(runtime.engine.submit(prompt, params))
        if not together:
            async for _ in sessions[-1].pieces():
                pass
    for session in sessions if together else ():
        async for _ in session.pieces():
            pass
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    sparse = runtime.ffn.source.sparse
    assert sparse is not None
    await runtime.close()
    return [session.generated for session in sessions], sparse.stats


def test_the_same_answer_at_every_setting(bundle: Path) -> None:
    """Bit for bit, though predictors miss neurons: what is missed doesn't depend on what is in RAM."""
    expected, at_rest = asyncio.run(answers(bundle, False, memory="130%"))
    demand = {}
    for name, together, settings in (
        ("small", False, {"memory": "88%", "prefetch": "on"}),
        ("no prefetch", False, {"memory": "88%", "prefetch": "off"}),
        ("together", True, {"memory": "92%", "max_sessions": 4}),
        ("lru", True, {"memory": "88%", "eviction": "lru", "prefetch": "on"}),
        ("window", False, {"memory": "100%", "eviction": "window", "window": 3}),
        ("buffered", False, {"memory": "88%", "backend": "buffered", "threads": 1}),
        ("in memory", True, {"backend": "memory"}),
    ):
        got, stats = asyncio.run(answers(bundle, together, **settings))
        assert got == expected, name
        demand[name] = stats.demand
    assert demand["in memory"] == 0
    assert demand["small"] < demand["no prefetch"]
    assert at_rest.demand < demand["no prefetch"] < at_rest.requested
