"""A decoding step is one call on the lane where no layer is streamed, and can end between two layers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashd.config import DaemonConfig
from flashd.kv.contiguous import ContiguousKV
from flashd.models.decoder import ForwardCancelled, Span
from flashd.runtime.build import Runtime, build
from flashd.testing.bundles import MadeBundle, make_bundle, tiny_spec

PROMPT = list(range(3, 40))
LAYERS = 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> MadeBundle:
    return make_bundle(tmp_path_factory.mktemp("lane") / "bundle", tiny_spec("opt", d_ffn=400))


async def start(bundle: MadeBundle, **settings: Any) -> Runtime:
    return await build(DaemonConfig(model=str(bundle.directory), kv_dtype="f32", **settings))


async def forward(
    runtime: Runtime, kv: ContiguousKV, tokens: list[int], cancelled: Callable[[], bool] = lambda: False
) -> np.ndarray:
    decoder = runtime.engine._decoder
    return await decoder.forward([Span(np.array(tokens, np.int64), kv)], cancelled)


def count_calls(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that is handed to the lane."""
    calls: list[int] = []
    real = runtime.lane.run

    async def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return await real(*args, **kwargs)

    monkeypatch.setattr(runtime.lane, "run", run)
    return calls


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"predictor": "oracle", "memory": "80%"}, 1, 1),
        ({"predictor": "none", "memory": "auto"}, 1, 1),  # all in RAM
        ({"predictor": "none", "memory": "60%"}, LAYERS, 1000),
    ],
)
async def test_calls_of_a_step(
    bundle: MadeBundle, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], least: int, most: int
) -> None:
    runtime = await start(bundle, **settings)
    kv = ContiguousKV(runtime.manifest.model, 64, "f32")
    await forward(runtime, kv, PROMPT)
    calls = count_calls(runtime, monkeypatch)
    await forward(runtime, kv, [5])
    assert least <= len(calls) <= most
    await runtime.close()


@pytest.mark.parametrize("settings", [{"predictor": "oracle", "memory": "80%"}, {"predictor": "none"}])
async def test_a_step_that_nobody_wants_ends_before_the_next_layer(
    bundle: MadeBundle, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    runtime = await start(bundle, **settings)
    kv = ContiguousKV(runtime.manifest.model, 64, "f32")
    await forward(runtime, kv, PROMPT)
    asked: list[int] = []

    def stop_at_second() -> bool:
        asked.append(1)
        return len(asked) == 2

    with pytest.raises(ForwardCancelled):
        await forward(runtime, kv, [5], stop_at_second)
    assert len(asked) == 2

    asked.clear()
    loop = asyncio.get_running_loop()

    def cancel_at_first() -> bool:
        asked.append(1)
        loop.call_soon_threadsafe(task.cancel)
        time.sleep(0.1)
        return False

    task = asyncio.create_task(forward(runtime, kv, [5], cancel_at_first))
    with pytest.raises(asyncio.CancelledError):
        await task
    await runtime.lane.run(lambda: None)
    assert len(asked) == 1
    assert not caplog.records

    assert kv.length == len(PROMPT)
    after = await forward(runtime, kv, [5])
    untouched = ContiguousKV(runtime.manifest.model, 64, "f32")
    await forward(runtime, untouched, PROMPT)
    np.testing.assert_array_equal(after, await forward(runtime, untouched, [5]))
    await runtime.close()


async def test_the_first_layer_is_guessed_before_its_attention(bundle: MadeBundle) -> None:
    """The oracle looks ahead at no layer, but what it says of the first one's input without attention."""
    small = {"memory": "60%", "window": 1, "eviction": "window"}
    runtime = await start(bundle, predictor="oracle", prefetch="on", **small)
    sparse = runtime.ffn.source.sparse
    assert sparse is not None
    kv = ContiguousKV(runtime.manifest.model, 64, "f32")
    await forward(runtime, kv, PROMPT)
    assert sparse.stats.prefetched == 0
    for token in range(5, 13):
        await forward(runtime, kv, [token])
    stats = sparse.stats
    assert stats.prefetch_layers == 1
    assert stats.prefetched > 0
    assert stats.prefetched_used > stats.prefetched / 2
    await runtime.close()
