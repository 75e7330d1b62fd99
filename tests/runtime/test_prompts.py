"""Prompts of the whole model: memory does not show in them, and the oracle changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.config import DaemonConfig
from flashd.kv.contiguous import ContiguousKV
from flashd.layout.manifest import MANIFEST, to_json
from flashd.models.decoder import Span
from flashd.prefetch.prompt import ReadCosts
from flashd.runtime.accounting import PREFILL_CHUNK_TOKENS, as_share, whole_bytes
from flashd.runtime.build import Runtime, build
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.testing.predictors import make_predictors
from flashd.types import F32Array

CONTEXT = 320
# One chunk by the decoder's way, one that is just a prompt, two chunks, two with a small rest.
LENGTHS = (16, 17, 300, 260)


@asynccontextmanager
async def loaded(bundle: Path, **options: Any) -> AsyncIterator[Runtime]:
    runtime = await build(DaemonConfig(model=str(bundle), kv_dtype="f32", **options))
    try:
        yield runtime
    finally:
        await runtime.close()


async def answer(runtime: Runtime, length: int) -> tuple[F32Array, list[int]]:
    """Logits of every position of a prompt and of four greedy tokens, and these tokens."""
    ids = np.random.default_rng(length).integers(0, 96, length)
    kv = ContiguousKV(runtime.manifest.model, CONTEXT, "f32")
    decoder = runtime.engine._decoder
    logits, tokens = [], []
    for start in range(0, length, PREFILL_CHUNK_TOKENS):
        span = Span(ids[start : start + PREFILL_CHUNK_TOKENS], kv)
        logits.append(await decoder.forward([span], every_position=True))
    for _ in range(4):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(await decoder.forward([Span(np.array(tokens[-1:]), kv)]))
    return np.concatenate(logits), tokens


@pytest.mark.parametrize("masked", [[True] * 3, [False, True, False]])
async def test_memory_does_not_show(tmp_path: Path, masked: list[bool]) -> None:
    made = make_bundle(tmp_path, tiny_spec("opt", d_ffn=400, max_context=CONTEXT))
    make_predictors(tmp_path, made.manifest, masked=masked)
    expected, everything = {}, whole_bytes(tmp_path, made.manifest)
    async with loaded(tmp_path, backend="memory") as runtime:
        for length in LENGTHS:
            expected[length] = await answer(runtime, length)
    for budget in (360_000, 480_000, 4_000_000):  # some rows, more, and all
        async with loaded(tmp_path, memory=as_share(budget, everything)) as runtime:
            sparse = runtime.ffn.source.sparse
            assert sparse is not None
            for whole_s in (1e-9, 1.0):  # slices whole, then by their missing rows
                sparse._prompt._costs = ReadCosts(np.array([1.0, 1e9]), np.array([1e-6, whole_s]))  # type: ignore[attr-defined]  # PromptFFN's
                before = replace(runtime.ffn.source.stats)
                for length in (*LENGTHS, LENGTHS[0]):
                    logits, tokens = await answer(runtime, length)
                    np.testing.assert_array_equal(logits, expected[length][0])
                    assert tokens == expected[length][1]
                in_part = runtime.ffn.source.stats.partial_slices - before.partial_slices
                assert (in_part > 0) == (whole_s == 1.0) or budget > 1e6
                sparse.window.check_integrity()


@pytest.mark.parametrize(
    ("family", "options", "threshold"),
    [("opt", {}, 0.0), ("llama", {"activation": "relu2"}, 0.0), ("llama", {"activation": "relu"}, 0.3)],
)
async def test_the_oracle_changes_nothing(
    tmp_path: Path, family: str, options: dict[str, Any], threshold: float
) -> None:
    """ReLU, squared ReLU, and FATReLU in a gated FFN."""
    made = make_bundle(tmp_path, tiny_spec(family, d_ffn=200, max_context=CONTEXT, **options))
    manifest = replace(made.manifest, thresholds=(threshold,) * 3)
    (tmp_path / MANIFEST).write_text(to_json(manifest))
    async with loaded(tmp_path, predictor="none") as dense, loaded(tmp_path, predictor="oracle") as oracle:
        for length in LENGTHS:
            wanted, tokens = await answer(dense, length)
            got, same = await answer(oracle, length)
            assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max()
            assert same == tokens
