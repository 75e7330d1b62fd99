"""The engine over predicted neurons: the same tokens at every budget, window, prefetch setting and batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.runtime.accounting import as_share, whole_bytes
from flashd.runtime.build import Runtime, build
from flashd.runtime.sampling import SamplingParams
from flashd.stats import SparseStats
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec

MODELS = {
    "relu": tiny_spec("opt", d_ffn=400),
    "relu2": tiny_spec("opt", d_ffn=300, activation="relu2"),
    "gated": tiny_spec("llama", d_ffn=300, activation="relu"),
}
PROMPTS = [[1, 2, 3], list(range(5, 25)), [7], [9, 8, 7, 6]]
N_TOKENS = 12


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeBundle]:
    root = tmp_path_factory.mktemp("engines")
    return {name: make_bundle(root / name, spec) for name, spec in MODELS.items()}


async def start(bundle: MadeBundle, **settings_: Any) -> Runtime:
    return await build(DaemonConfig(model=str(bundle.directory), kv_dtype="f32", **settings_))


async def generate(
    bundle: MadeBundle, prompts: list[list[int]], **settings_: Any
) -> tuple[list[list[int]], SparseStats | None]:
    """Greedy tokens of some prompts served together, and what the sparse FFN counted."""
    runtime = await start(bundle, **settings_)
    running = asyncio.create_task(runtime.engine.run())
    params = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, temperature=0)
    sessions = [runtime.engine.submit(prompt, params) for prompt in prompts]
    for session in sessions:
        async for _ in session.pieces():
            pass
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    sparse = runtime.ffn.source.sparse
    if sparse is not None:
        await runtime.lane.run(sparse.window.check_integrity)
    await runtime.close()
    return [session.generated for session in sessions], None if sparse is None else sparse.stats


@pytest.fixture(scope="module")
def dense_tokens(bundles: dict[str, MadeBundle]) -> dict[str, list[list[int]]]:
    """What each prompt gives by itself, all neurons computed."""

    async def make(bundle: MadeBundle) -> list[list[int]]:
        return [(await generate(bundle, [prompt], predictor="none"))[0][0] for prompt in PROMPTS]

    return {name: asyncio.run(make(bundle)) for name, bundle in bundles.items()}


@pytest.mark.parametrize("model", MODELS)
def test_the_same_tokens_however_they_are_made(
    bundles: dict[str, MadeBundle], dense_tokens: dict[str, list[list[int]]], model: str
) -> None:
    @settings(max_examples=8, deadline=None, database=None)
    @given(
        memory=st.sampled_from(["auto", "76%", "85%", "100%", "130%"]),
        eviction=st.sampled_from(["lru", "window", "frequency"]),
        window=st.sampled_from([0, 0, 1, 3]),
        prefetch=st.sampled_from(["on", "off", "auto"]),
        max_sessions=st.integers(1, 4),
        predictor=st.sampled_from(["oracle", "oracle", "none"]),
        backend=st.sampled_from(["auto", "auto", "threads", "buffered", "memory"]),
    )
    def check(**settings_: Any) -> None:
        if settings_["backend"] == "memory":  # takes all there is
            settings_["memory"] = "auto"
        got, _ = asyncio.run(generate(bundles[model], PROMPTS, **settings_))
        assert got == dense_tokens[model]

    check()


async def test_a_smaller_budget_reads_more(bundles: dict[str, MadeBundle]) -> None:
    demand = []
    for budget in ("76%", "100%", "140%"):
        _, stats = await generate(bundles["relu"], [[1, 2, 3]], predictor="oracle", memory=budget)
        assert stats is not None
        assert stats.requested == stats.resident + stats.demand
        assert stats.fired == stats.requested
        demand.append(stats.demand)
    assert demand[0] > demand[1] > demand[2]
    # What fits is read once.
    assert demand[2] <= 3 * 400


async def test_a_budget_that_holds_nothing_is_refused(bundles: dict[str, MadeBundle]) -> None:
    why = r"too small: weights and predictors take 0\.\d MB.* the smallest that works is --memory [\d.]+%"
    with pytest.raises(ConfigError, match=why):
        await start(bundles["relu"], predictor="oracle", memory="1%")


async def test_layers_without_a_mask_are_in_ram_as_far_as_they_fit(
    bundles: dict[str, MadeBundle], caplog: pytest.LogCaptureFixture
) -> None:
    layer_bytes = bundles["relu"].manifest.ffn.layer_bytes
    everything = whole_bytes(bundles["relu"].directory, bundles["relu"].manifest)
    caplog.set_level("INFO", "flashd.build")
    least = 60_000 + layer_bytes  # resident weights and the ring
    for layers in (0, 1, 2, 3):
        caplog.clear()
        share = as_share(least + layers * layer_bytes, everything)
        runtime = await start(bundles["relu"], predictor="none", memory=share)
        await runtime.close()
        assert f"dense layers: {layers} in RAM, {3 - layers} streamed" in caplog.text


async def test_oracle_logits_are_those_of_the_dense_model(
    bundles: dict[str, MadeBundle], tmp_path: Path
) -> None:
    """At every position of a text, prompts and single tokens."""
    from flashd.kv.contiguous import ContiguousKV
    from flashd.models.decoder import Span

    for bundle in bundles.values():
        logits = []
        for predictor in ("none", "oracle"):
            runtime = await start(bundle, predictor=predictor, memory="85%")
            decoder = runtime.engine._decoder
            kv = ContiguousKV(decoder.spec, 40, "f32")
            parts = []
            for tokens in (np.arange(20), np.arange(3), np.array([5]), np.array([6])):
                parts.append(await decoder.forward([Span(tokens, kv)], every_position=True))
            logits.append(np.concatenate(parts))
            await runtime.close()
        np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
