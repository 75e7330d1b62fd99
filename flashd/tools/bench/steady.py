"""``flashd bench steady``: whether long answers stay as fast, and as small, as they begin (LLM in a flash,
Figure 8).

The time that attention takes grows with the KV cache, and so does the memory of the cache; both are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from flashd.config import DaemonConfig
from flashd.errors import ConfigError
from flashd.kv.contiguous import ContiguousKV
from flashd.memory.system import footprint_bytes
from flashd.runtime.build import Runtime, build
from flashd.runtime.sampling import SamplingParams
from flashd.runtime.session import Session

# What counts as steady: the last tenth's time per token against the second tenth's, and how far apart the
# smallest and the largest footprint from the second tenth on are.
MAX_SLOWDOWN = 1.10
MAX_SPREAD = 0.02
_MIN_TOKENS = 20
_SAMPLES_PER_TENTH = 10
_PROMPT_TOKENS = 16

# (kind of sampling, tokens done, tokens in all)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SteadyRow:
    """One long answer.

    Attributes:
        sampling: ``greedy`` or ``nucleus``.
        early_ms: median time per token in the second tenth of the answer, attention over the KV cache left
            out: tokens 100 to 200 of 1000.
        late_ms: likewise in the last tenth.
        ratio: late / early.
        early_mean_ms, late_mean_ms: means of the same.
        attention_early_ms, attention_late_ms: mean of what was left out.
        kv_bytes: of the KV cache, all of whose pages are there from the start.
        footprint_bytes: RssAnon + RssShmem less the KV cache: mean from the second tenth on.
        footprint_spread: (largest - smallest) / mean of it.
        steady: whether both are within the limits.
    """

    sampling: str
    early_ms: float
    late_ms: float
    ratio: float
    early_mean_ms: float
    late_mean_ms: float
    attention_early_ms: float
    attention_late_ms: float
    kv_bytes: int
    footprint_bytes: int
    footprint_spread: float
    steady: bool


@dataclass(frozen=True)
class SteadyReport:
    """Both ways of choosing tokens."""

    model: str
    tokens: int
    prompt_tokens: int
    rounds: int
    rows: tuple[SteadyRow, ...]


@dataclass
class _Trace:
    """Clock readings in ns at each token, and (token, bytes) of the footprint now and then."""

    wall: list[int]
    attention: list[int]
    footprint: list[tuple[int, int]]


def bench_steady(
    config: DaemonConfig, tokens: int, prompt: str, rounds: int, progress: Progress
) -> SteadyReport:
    """Generate ``tokens`` tokens greedily, then as many by nucleus sampling.

    Args:
        config: what ``flashd start`` would be told.
        tokens: of each answer.
        prompt: what to continue; empty: tokens drawn at random.
        rounds: how often; the one with the median ratio counts, and the largest spread.
        progress: called after some tokens.

    Raises:
        ConfigError: more tokens than the model's context has, or too few to compare.
        BundleError, DiskReadError, TokenizerError: the bundle cannot be used.
    """
    if tokens < _MIN_TOKENS:
        raise ConfigError(f"--tokens is {tokens}, expected {_MIN_TOKENS} or more")
    return asyncio.run(_bench(config, tokens, prompt, rounds, progress))


async def _bench(
    config: DaemonConfig, tokens: int, prompt: str, rounds: int, progress: Progress
) -> SteadyReport:
    runtime = await build(config)
    try:
        ids = _prompt(runtime, prompt)
        spec = runtime.manifest.model
        if len(ids) + tokens - 1 > spec.max_context:
            raise ConfigError(
                f"{len(ids)} prompt tokens and {tokens} more do not fit into the model's context of "
                f"{spec.max_context}; give --tokens {max(0, spec.max_context - len(ids) + 1)} or less"
            )
        params = {
            "greedy": SamplingParams(tokens, temperature=0, ignore_eos=True),
            "nucleus": SamplingParams(tokens, temperature=1, top_p=0.9, seed=0, ignore_eos=True),
        }
        serving = asyncio.create_task(runtime.engine.run())
        try:
            tries = [
                [await _row(runtime, ids, name, each, progress) for name, each in params.items()]
                for _ in range(rounds)
            ]
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
    finally:
        await runtime.close()
    return SteadyReport(
        str(config.model_dir), tokens, len(ids), rounds, tuple(map(_middle, zip(*tries, strict=True)))
    )


def _prompt(runtime: Runtime, prompt: str) -> list[int]:
    if not prompt:
        ids: list[int] = (
            np.random.default_rng(0).integers(0, runtime.manifest.model.vocab_size, _PROMPT_TOKENS).tolist()
        )
        return ids
    if runtime.tokenizer is None:
        raise ConfigError("the model has no tokenizer, so it cannot read --prompt; leave it out")
    return runtime.tokenizer.encode(prompt)


async def _row(
    runtime: Runtime, ids: list[int], name: str, params: SamplingParams, progress: Progress
) -> SteadyRow:
    tokens = params.max_tokens or 0
    tenth = tokens // 10
    session = runtime.engine.submit(ids, params)
    trace = _Trace([], [], [])
    kv_bytes = 0
    progress(name, 0, tokens)
    async for _ in session.pieces():
        trace.wall.append(time.perf_counter_ns())
        trace.attention.append(runtime.lane.stats.attention_ns)
        count = len(trace.wall)
        if count == 1:
            kv_bytes = await _touch(runtime, session)
        # With its last token the answer has given its KV cache back.
        if tenth <= count < tokens and count % max(1, tenth // _SAMPLES_PER_TENTH) == 0:
            trace.footprint.append((count, footprint_bytes() - kv_bytes))
        progress(name, count, tokens)
    return _summary(name, trace, tenth, kv_bytes)


async def _touch(runtime: Runtime, session: Session) -> int:
    """Write to every page of the KV cache behind what it holds, so that it does not grow any more.

    On the lane, where nothing else writes to it. Returns its bytes.
    """
    kv = session.kv
    if kv is None:  # the answer has one token
        return 0
    await runtime.lane.run(_clear, kv, runtime.manifest.model.n_layers, kind="memory")
    return kv.nbytes


def _clear(kv: ContiguousKV, n_layers: int) -> None:
    for layer in range(n_layers):
        for part in kv.view(layer):
            part[:, kv.length + 1 :] = 0  # a step that is under way has appended one token


def _summary(name: str, trace: _Trace, tenth: int, kv_bytes: int) -> SteadyRow:
    wall, attention = np.diff(trace.wall) / 1e6, np.diff(trace.attention) / 1e6
    rest = (wall - attention).tolist()
    early, late = slice(tenth, 2 * tenth), slice(len(rest) - tenth, None)
    sizes = [nbytes for _, nbytes in trace.footprint]
    ratio = median(rest[late]) / median(rest[early])
    spread = (max(sizes) - min(sizes)) / fmean(sizes)
    return SteadyRow(
        sampling=name,
        early_ms=median(rest[early]),
        late_ms=median(rest[late]),
        ratio=ratio,
        early_mean_ms=fmean(rest[early]),
        late_mean_ms=fmean(rest[late]),
        attention_early_ms=float(attention[early].mean()),
        attention_late_ms=float(attention[late].mean()),
        kv_bytes=kv_bytes,
        footprint_bytes=round(fmean(sizes)),
        footprint_spread=spread,
        steady=ratio <= MAX_SLOWDOWN and spread <= MAX_SPREAD,
    )


def _middle(rows: tuple[SteadyRow, ...]) -> SteadyRow:
    """The row with the median ratio (of an even number the later), and the largest spread of all."""
    row = sorted(rows, key=lambda row: row.ratio)[len(rows) // 2]
    spread = max(row.footprint_spread for row in rows)
    return replace(row, footprint_spread=spread, steady=row.ratio <= MAX_SLOWDOWN and spread <= MAX_SPREAD)
