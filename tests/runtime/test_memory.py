"""A running engine whose memory comes and goes: the same tokens, pages that go back, requests that wait."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashd.config import DaemonConfig
from flashd.errors import ConfigError, RequestError
from flashd.kv.contiguous import kv_bytes_per_token
from flashd.memory.account import KV_BLOCK_TOKENS
from flashd.memory.governor import HOLD_S, POLL_S
from flashd.memory.system import Reading, footprint_bytes
from flashd.runtime.accounting import as_share, bundle_demand, whole_bytes
from flashd.runtime.build import Runtime, build
from flashd.runtime.sampling import SamplingParams
from flashd.runtime.session import Session
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec

MODELS = {
    "relu": tiny_spec("opt", d_ffn=4000, max_context=2048),
    "gated": tiny_spec("llama", d_ffn=1500, activation="relu", max_context=2048),
}
PROMPTS = [[1, 2, 3], list(range(5, 45)), [7], [9, 8, 7, 6]]
N_TOKENS = 24
MB = 1_000_000


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeBundle]:
    root = tmp_path_factory.mktemp("elastic")
    return {name: make_bundle(root / name, spec) for name, spec in MODELS.items()}


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are smaller than what is left to others on a real machine."""
    monkeypatch.setattr("flashd.memory.governor.reserve_bytes", lambda limit_bytes, step_s: 20_000)


class Machine:
    """Says what is available; time goes on as one looks."""

    def __init__(self, runtime: Runtime, limit_bytes: int = 4000 * MB) -> None:
        self.runtime = runtime
        self.limit_bytes = limit_bytes
        self.now_s = 1000.0
        self.others_bytes = 0
        runtime.memory._read = self.read
        runtime.memory._now_s = lambda: self.now_s  # type: ignore[method-assign]  # this machine's clock

    def read(self) -> Reading:
        self.now_s += POLL_S
        # What is accounted for, so that other tests in this process don't show.
        account = self.runtime.memory.account
        footprint = account.beside_bytes(self.now_s) + self.runtime.memory.governor.weights_bytes
        # Below zero where others take all at once, which on a real machine they can't.
        available = self.limit_bytes - footprint - self.others_bytes
        return Reading(self.now_s, available, self.limit_bytes, "/made-up", footprint, 0.0)

    def leave_for_weights(self, nbytes: int) -> None:
        """Others take so much that weights can have no more than this, reserve and all else apart."""
        memory = self.runtime.memory
        self.runtime.memory.look()  # for the reserve
        beside = memory.account.beside_bytes(self.now_s)
        self.others_bytes = self.limit_bytes - beside - nbytes - memory.governor.reserve_bytes

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.runtime.memory.look()


@asynccontextmanager
async def serving(bundle: MadeBundle, **settings: Any) -> AsyncIterator[tuple[Runtime, Machine]]:
    runtime = await build(DaemonConfig(model=str(bundle.directory), kv_dtype="f32", **settings))
    machine = Machine(runtime)
    running = asyncio.create_task(runtime.engine.run())
    try:
        yield runtime, machine
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        sparse = runtime.ffn.source.sparse
        if sparse is not None:
            await runtime.lane.run(sparse.window.check_integrity)
        await runtime.close()


def ask(runtime: Runtime, prompt: list[int], max_tokens: int | None = N_TOKENS, **params: Any) -> Session:
    params = {"ignore_eos": True, "temperature": 0, **params}
    return runtime.engine.submit(prompt, SamplingParams(max_tokens=max_tokens, **params))


async def finish(*sessions: Session) -> list[list[int]]:
    async def one(session: Session) -> list[int]:
        async for _ in session.pieces():
            pass
        return session.generated

    return list(await asyncio.gather(*map(one, sessions)))


async def settled(runtime: Runtime) -> None:
    """Wait until the idle engine has done what was decided."""
    for _ in range(200):
        await asyncio.sleep(0.01)
        if runtime.memory._settled:
            await runtime.lane.run(int)  # the lane may be at it
            return
    raise AssertionError("the engine never settles")


@pytest.mark.parametrize(
    ("model", "predictor"), [("relu", "oracle"), ("relu", "none"), ("gated", "oracle"), ("gated", "none")]
)
async def test_the_same_tokens_while_memory_comes_and_goes(
    bundles: dict[str, MadeBundle], model: str, predictor: str
) -> None:
    bundle = bundles[model]
    async with serving(bundle, predictor="none") as (runtime, _):
        expected = [(await finish(ask(runtime, prompt)))[0] for prompt in PROMPTS]
    demand = bundle_demand(bundle.directory, bundle.manifest, predictor)
    rng = np.random.default_rng(0)
    async with serving(bundle, predictor=predictor, max_sessions=4) as (runtime, machine):

        async def trouble(_: str) -> None:
            if rng.random() < 0.5:
                room = rng.integers(demand.least_bytes, demand.everything_bytes)
                machine.leave_for_weights(int(room))
                machine.look(1 if rng.random() < 0.5 else round(HOLD_S / POLL_S) + 3)

        runtime.engine.before_step = trouble
        for _ in range(2):
            got = await finish(*[ask(runtime, prompt) for prompt in PROMPTS])
            assert got == expected
        changes = runtime.memory.stats.changes
        assert changes["shrink", "pressure"] > 3
        assert changes["grow", "room"] > 3
        if predictor == "none":
            layers = runtime.ffn.layers
            assert layers is not None
            assert len(layers.kept) <= bundle.manifest.ffn.n_layers


async def test_rows_go_within_a_layer_not_only_between_steps(bundles: dict[str, MadeBundle]) -> None:
    """What is decided while a step is on its way is done before its next layer."""
    async with serving(bundles["relu"], predictor="oracle") as (runtime, machine):
        sparse, demand = runtime.ffn.source.sparse, runtime.memory.account.demand
        assert sparse is not None
        rows_by_layer: list[int] = []
        apply = sparse.between_layers
        assert apply is not None

        def watched() -> None:
            if len(rows_by_layer) == 1:  # on the lane, before the second layer
                machine.leave_for_weights(demand.least_bytes + 100 * 512)
                machine.look()
            apply()
            rows_by_layer.append(sparse.window.pool.n_rows)

        sparse.between_layers = watched
        runtime.memory.on_change = None
        before = sparse.window.pool.n_rows
        await finish(ask(runtime, [1, 2, 3], 2))
        assert rows_by_layer[0] == before
        assert rows_by_layer[1] < before / 10


async def test_pages_really_go_back_and_k_follows(
    bundles: dict[str, MadeBundle], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flashd.memory")
    async with serving(bundles["relu"], predictor="oracle", prefetch="off") as (runtime, machine):
        await finish(ask(runtime, list(range(2, 60)), 40))
        memory = runtime.ffn.pool_memory
        assert memory is not None
        size, before = memory.size_bytes, footprint_bytes()
        assert size > 6 * MB
        k = runtime.memory.stats.k
        machine.leave_for_weights(runtime.memory.account.demand.least_bytes)
        machine.look()
        await settled(runtime)
        assert memory.size_bytes <= 4 << 20  # one slab
        assert footprint_bytes() < before - (size - (4 << 20)) // 2
        assert runtime.memory.stats.k < k
        line = caplog.messages[-1]
        assert re.match(rf"window shrink: k={k}->0 rows=\d+->\d+ .*reason=pressure available_mb=-\d+", line)
        assert "source=/made-up" in line
        assert "stalled=0%" in line
        machine.others_bytes = 0
        machine.look(round(HOLD_S / POLL_S) + 2)
        await settled(runtime)
        assert memory.size_bytes == size
        assert runtime.memory.stats.k == k
        assert "window grow: k=0->" in "".join(caplog.messages)


async def test_layers_without_a_mask_leave_and_come_back(bundles: dict[str, MadeBundle]) -> None:
    async with serving(bundles["relu"], predictor="none") as (runtime, machine):
        expected = await finish(ask(runtime, PROMPTS[0]))
        layers, source = runtime.ffn.layers, runtime.ffn.source
        assert layers is not None
        assert layers.kept == {0, 1, 2}
        machine.leave_for_weights(runtime.memory.account.demand.least_bytes)
        machine.look()
        await settled(runtime)
        assert layers.kept == set()
        assert source.stream is not None
        assert source.stream.layers == (0, 1, 2)
        read = runtime.store.stats.bytes_delivered
        assert await finish(ask(runtime, PROMPTS[0])) == expected
        assert runtime.store.stats.bytes_delivered > read
        machine.others_bytes = 0
        for _ in range(40):
            machine.look()
            await asyncio.sleep(0.02)
        await settled(runtime)
        assert layers.kept == {0, 1, 2}
        assert not source.stream.layers
        read = runtime.store.stats.bytes_delivered
        assert await finish(ask(runtime, PROMPTS[0])) == expected
        assert runtime.store.stats.bytes_delivered == read


async def test_a_request_that_never_fits_is_refused_with_the_numbers(bundles: dict[str, MadeBundle]) -> None:
    bundle = bundles["relu"]
    demand = bundle_demand(bundle.directory, bundle.manifest, "oracle")
    share = as_share(demand.least_bytes, whole_bytes(bundle.directory, bundle.manifest))
    async with serving(bundle, predictor="oracle", memory=share) as (runtime, machine):
        machine.look()
        assert len((await finish(ask(runtime, [5] * 200, 313)))[0]) == 313  # 512 places: what is set aside
        with pytest.raises(
            RequestError, match=r"cannot fit: its KV cache takes \d.*MB hold at most .* --memory"
        ) as no:
            ask(runtime, [5] * 200, 1000)
        assert (no.value.status, no.value.code) == (400, "out_of_memory")


async def test_a_request_that_does_not_fit_now_is_told_to_come_back(bundles: dict[str, MadeBundle]) -> None:
    async with serving(bundles["relu"], predictor="oracle") as (runtime, machine):
        machine.leave_for_weights(0)
        machine.look()
        with pytest.raises(
            RequestError, match=r"has no room now \(-\d.* MB are available\).*try again later"
        ) as no:
            ask(runtime, [5] * 200, 1000)
        assert no.value.status == 429
        machine.others_bytes = 0
        machine.look()
        assert len((await finish(ask(runtime, [5] * 200, 30)))[0]) == 30


async def test_admission_waits_for_memory_and_goes_on_when_it_is_back(
    bundles: dict[str, MadeBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(bundles["relu"], predictor="oracle") as (runtime, machine):
        machine.look()
        first = ask(runtime, [1, 2, 3], 40)
        await anext(first.pieces())
        second = ask(runtime, [4, 5, 6], 30)  # fits now
        machine.leave_for_weights(0)
        machine.look()
        await finish(first)  # what runs comes to its end
        await asyncio.sleep(0.05)
        assert not second.generated
        assert runtime.memory.stats.admission_paused
        assert not runtime.engine.idle.is_set()
        machine.others_bytes = 0
        machine.look()
        assert len((await finish(second))[0]) == 30
        assert not runtime.memory.stats.admission_paused
        # Nobody waits for ever.
        monkeypatch.setattr("flashd.runtime.engine.ADMISSION_PATIENCE_S", 0.1)
        third = ask(runtime, [4, 5, 6], 30)
        machine.leave_for_weights(0)
        machine.look()
        await asyncio.sleep(0.15)
        machine.look()
        with pytest.raises(RequestError, match="has no room now"):
            await finish(third)


async def test_answers_without_a_limit_share_what_there_is(tmp_path: Path) -> None:
    """Each has a block set aside, not the model's whole context; all come to their end."""
    bundle = make_bundle(tmp_path, tiny_spec("opt", d_ffn=200, max_context=1100))
    token_bytes = kv_bytes_per_token(bundle.manifest.model, "f32")
    demand = bundle_demand(bundle.directory, bundle.manifest, "oracle")
    room = 1700 * token_bytes
    share = as_share(
        demand.least_bytes + room - KV_BLOCK_TOKENS * token_bytes,
        whole_bytes(bundle.directory, bundle.manifest),
    )
    async with serving(bundle, predictor="oracle", memory=share, max_sessions=4) as (runtime, machine):
        machine.look()
        sessions = [ask(runtime, [i + 1, 2], None) for i in range(4)]
        assert [session.limit for session in sessions] == [1099] * 4
        await asyncio.gather(*(anext(session.pieces()) for session in sessions[:2]))
        assert runtime.engine.stats.running >= 2
        assert sessions[0].granted_tokens == KV_BLOCK_TOKENS
        assert runtime.memory.stats.kv_promised_bytes > room  # not all of it at once
        lengths = [len(tokens) for tokens in await finish(*sessions)]
        assert lengths == [1099] * 4
        assert runtime.memory.stats.kv_promised_bytes == 0


async def test_an_answer_goes_on_with_less_than_it_was_promised_and_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory gets short while an answer without a limit runs: it gets its next block as long as that fits;
    where it doesn't, it waits, and is ended with an error when nothing has gone on for too long."""
    monkeypatch.setattr("flashd.runtime.engine.ADMISSION_PATIENCE_S", 0.4)
    bundle = make_bundle(tmp_path, tiny_spec("opt", d_ffn=200, max_context=1500))
    token_bytes = kv_bytes_per_token(bundle.manifest.model, "f32")
    async with serving(bundle, predictor="oracle") as (runtime, machine):
        machine.look()
        first = ask(runtime, [1, 2], None)
        pieces = first.pieces()
        await anext(pieces)
        assert first.limit == 1499
        least = runtime.memory.account.demand.least_bytes
        machine.leave_for_weights(least + (2 * KV_BLOCK_TOKENS + 8 - KV_BLOCK_TOKENS) * token_bytes)
        machine.look()
        waiting = ask(runtime, [3, 4], 5)
        with pytest.raises(RequestError, match="has no room now") as ended:
            async for _ in pieces:
                pass
        assert ended.value.status == 429
        assert len(first.generated) + 2 > 2 * KV_BLOCK_TOKENS - 3
        assert len((await finish(waiting))[0]) == 5
        assert not runtime.memory.stats.admission_paused
        # What is back in time lets it go on.
        monkeypatch.setattr("flashd.runtime.engine.ADMISSION_PATIENCE_S", 30.0)
        machine.others_bytes = 0
        machine.look()
        again = ask(runtime, [1, 2], None)
        pieces = again.pieces()
        await anext(pieces)
        machine.leave_for_weights(least)
        machine.look()
        while not runtime.memory.stats.admission_paused:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        machine.others_bytes = 0
        machine.look()
        async for _ in pieces:
            pass
        assert len(again.generated) == 1499
        assert again.generated[: len(first.generated)] == first.generated


async def test_too_little_is_refused_and_what_is_advised_works(bundles: dict[str, MadeBundle]) -> None:
    directory = str(bundles["relu"].directory)
    for memory in ("1%", "1MB"):
        with pytest.raises(ConfigError, match=r"too small: weights and predictors take") as caught:
            await build(DaemonConfig(model=directory, predictor="none", memory=memory))
        advised = str(caught.value).rpartition("--memory ")[2]
        assert advised.endswith(memory[1:])
        runtime = await build(DaemonConfig(model=directory, predictor="none", memory=advised))
        await runtime.close()


async def test_a_machine_too_small_for_the_model_is_told_before_it_is_loaded(
    bundles: dict[str, MadeBundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    footprint = footprint_bytes()
    small = Reading(0.0, 3 * MB, 500 * MB, "/group", footprint, None)
    monkeypatch.setattr("flashd.runtime.accounting.SystemMemory.read", lambda self: small)
    monkeypatch.setattr("flashd.runtime.build.load_resident", lambda *args: pytest.fail("it was loaded"))
    with pytest.raises(
        ConfigError, match=r"MB of memory can be had \(/group: 3 MB are available\), expected"
    ):
        await build(DaemonConfig(model=str(bundles["relu"].directory)))


async def test_readings_that_fail_stop_nothing(
    bundles: dict[str, MadeBundle], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(bundles["relu"], predictor="oracle") as (runtime, _):
        calls = 0

        def fails() -> Reading:
            nonlocal calls
            calls += 1
            raise OSError("no such file")

        runtime.memory._read = fails
        looking = asyncio.create_task(runtime.memory.run())
        await asyncio.sleep(0.05)
        assert len((await finish(ask(runtime, [1, 2])))[0]) == N_TOKENS
        await asyncio.sleep(POLL_S)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert calls >= 2
        assert "memory cannot be looked at" in caplog.text
