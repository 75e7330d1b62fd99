"""The compute lane: order, costs, cancellation, shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import uvloop

from flashd.kernels.lane import ComputeLane


@pytest.fixture
def lane() -> Iterator[ComputeLane]:
    lane = ComputeLane()
    yield lane
    lane.close()


async def test_runs_on_one_thread_in_order(lane: ComputeLane) -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> int:
        seen.append((number, threading.current_thread().name))
        return number * 2

    assert await asyncio.gather(*(lane.run(note, i) for i in range(50))) == [i * 2 for i in range(50)]
    assert seen == [(i, "flashd-lane") for i in range(50)]


async def test_the_loop_goes_on_meanwhile(lane: ComputeLane) -> None:
    task = asyncio.create_task(lane.run(time.sleep, 0.2))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks >= 5


async def test_counts_time_by_kind(lane: ComputeLane) -> None:
    await lane.run(time.sleep, 0.02)
    await lane.run(time.sleep, 0.05, kind="memory")
    assert 20e6 <= lane.stats.compute_ns < 50e6 <= lane.stats.memory_ns


async def test_exceptions_reach_the_caller(lane: ComputeLane) -> None:
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0)
    assert await lane.run(lambda: 3) == 3
    assert lane.stats.compute_ns > 0


async def test_cancelling_does_not_stop_the_work(lane: ComputeLane) -> None:
    started, finish, finished = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        finish.wait(5)
        finished.set()

    running = asyncio.create_task(lane.run(work))
    queued = asyncio.create_task(lane.run(time.sleep, 0))
    await asyncio.to_thread(started.wait, 5)
    running.cancel()
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert not finished.is_set()
    finish.set()
    assert await lane.run(lambda: "next") == "next"
    assert finished.is_set()


async def test_a_failure_that_nobody_awaits_is_logged(
    lane: ComputeLane, caplog: pytest.LogCaptureFixture
) -> None:
    started, finish = threading.Event(), threading.Event()

    def fail() -> None:
        started.set()
        finish.wait(5)
        raise ValueError("lost")

    loop_errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
    task = asyncio.create_task(lane.run(fail))
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with caplog.at_level(logging.ERROR, "flashd.kernels.lane"):
        finish.set()
        await lane.run(time.sleep, 0)
        await asyncio.sleep(0)
    gc.collect()
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["lost"]
    assert loop_errors == []


def test_a_loop_that_closed_meanwhile(lane: ComputeLane) -> None:
    finish, done = threading.Event(), threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(lane.run(lambda: (finish.wait(5), done.set())))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(leave())
    finish.set()
    assert done.wait(5)
    assert asyncio.run(lane.run(lambda: 5)) == 5


async def test_close_finishes_what_was_submitted() -> None:
    lane = ComputeLane()
    done: list[int] = []
    tasks = [asyncio.create_task(lane.run(done.append, i)) for i in range(5)]
    await asyncio.sleep(0)
    lane.close()
    lane.close()
    assert done == [0, 1, 2, 3, 4]
    await asyncio.gather(*tasks)
    with pytest.raises(RuntimeError, match="the compute lane is closed"):
        await lane.run(print)


async def test_arguments_are_let_go(lane: ComputeLane) -> None:
    """A window's rows must not stay alive because the lane touched them last."""

    class Rows:
        pass

    import weakref

    rows = Rows()
    gone = weakref.ref(rows)
    await lane.run(id, rows)
    del rows
    for _ in range(100):
        if gone() is None:
            break
        await asyncio.sleep(0.01)
    assert gone() is None


def test_exit_without_close() -> None:
    code = (
        "import asyncio, numpy as np\nfrom flashd import kernels\n"
        "from flashd.kernels.lane import ComputeLane\n"
        "w = np.ones((20000, 1000), np.float32); x = np.ones((16, 1000), np.float32)\n"
        "out = np.empty((16, 20000), np.float32)\nlane = ComputeLane()\n"
        "async def main():\n"
        "    tasks = [asyncio.ensure_future(lane.run(kernels.gemv, w, x, out)) for _ in range(5)]\n"
        "    await asyncio.sleep(0)\n"
        "    [task.cancel() for task in tasks]\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_hop_under_uvloop_is_cheap(lane: ComputeLane) -> None:
    async def hops() -> float:
        for _ in range(100):
            await lane.run(int)
        times = []
        for _ in range(500):
            start = time.perf_counter()
            await lane.run(int)
            times.append(time.perf_counter() - start)
        return sorted(times)[250]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(hops()) < 2e-3  # some 50 us on an idle machine
