"""Greedy tokens and logits against Hugging Face transformers in float32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import CHECKPOINTS, CONTEXT, greedy

from flashd.config import DaemonConfig
from flashd.kv.contiguous import ContiguousKV
from flashd.models.decoder import Span
from flashd.runtime.build import Runtime, build

Tiny = Callable[[str], tuple[Any, Path]]
N_NEW = 64


@asynccontextmanager
async def loaded(bundle: Path, **options: Any) -> AsyncIterator[Runtime]:
    runtime = await build(DaemonConfig(model=str(bundle), kv_dtype="f32", **options))
    try:
        yield runtime
    finally:
        await runtime.close()


def a_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 515, length).tolist()


def new_kv(runtime: Runtime) -> ContiguousKV:
    return ContiguousKV(runtime.manifest.model, CONTEXT, "f32")


async def forward(runtime: Runtime, kv: ContiguousKV, tokens: list[int]) -> np.ndarray:
    decoder = runtime.engine._decoder
    return (await decoder.forward([Span(np.array(tokens, np.int64), kv)]))[0]


async def generate(runtime: Runtime, prompt: list[int], n_new: int) -> list[int]:
    kv = new_kv(runtime)
    out = [int((await forward(runtime, kv, prompt)).argmax())]
    while len(out) < n_new:
        out.append(int((await forward(runtime, kv, out[-1:])).argmax()))
    return out


@pytest.mark.parametrize("backend", ["uring", "memory"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
async def test_greedy_tokens_equal_transformers(tiny: Tiny, kind: str, backend: str) -> None:
    model, bundle = tiny(kind)
    async with loaded(bundle, backend=backend) as runtime:
        for length, seed in ((1, 1), (5, 2), (40, 3)):
            prompt = a_prompt(length, seed)
            assert await generate(runtime, prompt, N_NEW) == greedy(model, prompt, N_NEW)


@pytest.mark.parametrize("kind", CHECKPOINTS)
async def test_logits_equal_transformers_at_every_position(tiny: Tiny, kind: str) -> None:
    """From position 0 to the last one of the context."""
    model, bundle = tiny(kind)
    prompt = a_prompt(CONTEXT, 4)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    scale = np.abs(expected).max()
    async with loaded(bundle) as runtime:
        kv = new_kv(runtime)
        for position, token in enumerate(prompt):
            got = await forward(runtime, kv, [token])
            assert np.abs(got - expected[position]).max() <= 1e-4 * scale, position
        assert kv.length == CONTEXT
        whole = await forward(runtime, new_kv(runtime), prompt)
        assert np.abs(whole - expected[-1]).max() <= 1e-4 * scale


@pytest.mark.parametrize("kind", CHECKPOINTS)
async def test_prefill_of_n_tokens_equals_n_single_steps(tiny: Tiny, kind: str) -> None:
    _, bundle = tiny(kind)
    async with loaded(bundle) as runtime:
        for length in (2, 16, 17, 60):
            prompt = a_prompt(length, length)
            whole, single = new_kv(runtime), new_kv(runtime)
            at_once = await forward(runtime, whole, prompt)
            for token in prompt:
                stepped = await forward(runtime, single, [token])
            assert np.abs(at_once - stepped).max() <= 1e-4
            for _ in range(N_NEW):
                token = int(at_once.argmax())
                assert token == int(stepped.argmax())
                at_once = await forward(runtime, whole, [token])
                stepped = await forward(runtime, single, [token])


async def test_a_batch_gives_each_sequence_the_bits_it_gets_alone(tiny: Tiny) -> None:
    _, bundle = tiny("llama_gqa")
    async with loaded(bundle) as runtime:
        decoder = runtime.engine._decoder
        prompts = [a_prompt(length, 10 + length) for length in (3, 9, 31, 1)]
        alone, together = [], [new_kv(runtime) for _ in prompts]
        for prompt in prompts:
            kv = new_kv(runtime)
            await forward(runtime, kv, prompt)
            alone.append([await forward(runtime, kv, [7]), await forward(runtime, kv, [8])])
        for prompt, kv in zip(prompts, together, strict=True):
            await forward(runtime, kv, prompt)
        for step, token in enumerate((7, 8)):
            spans = [Span(np.array([token], np.int64), kv) for kv in together]
            logits = await decoder.forward(spans)
            for row, single in zip(logits, alone, strict=True):
                assert np.array_equal(row, single[step])


async def test_half_precision_weights_stay_close(tiny: Tiny, tmp_path: Path) -> None:
    """f16 and bf16 bundles lose what their mantissa loses, no more."""
    from flashd.tools.convert import ConvertOptions, convert

    model, bundle = tiny("llama_tied")
    prompt = a_prompt(30, 5)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
    for dtype, tolerance in (("f16", 5e-3), ("bf16", 5e-2)):
        dest = tmp_path / dtype
        convert(bundle.parent / "llama_tied", dest, ConvertOptions(dtype=dtype), None)
        async with loaded(dest) as runtime:
            got = await forward(runtime, new_kv(runtime), prompt)
            assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()
