"""Daemons whose memory is limited, or taken by others: real processes, real cgroups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from support import serving

from flashd.cli.base_process import base_bytes
from flashd.config import DaemonConfig
from flashd.memory.system import SystemMemory, footprint_bytes
from flashd.runtime.build import build
from flashd.runtime.sampling import SamplingParams
from flashd.testing.bundles import make_bundle, tiny_spec
from flashd.testing.pressure import Options, daemon, run
from flashd.tools.bench.token.limit import memory_group
from flashd.tools.plan.subject import Subject
from flashd.tools.synth.run import SynthOptions, synth

MB = 1_000_000


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Synthetic, some 700 MB: large enough for a window beside the process, in a group of its size."""
    directory = tmp_path_factory.mktemp("memory") / "opt"
    synth(directory, SynthOptions("opt-1.3b", layers=5))
    yield directory
    for path in directory.iterdir():
        path.unlink()


def needs_groups() -> None:
    with memory_group(1 << 30) as (group, why):
        if group is None:
            pytest.skip(f"no memory cgroup can be made here: {why}")


@pytest.mark.slow
def test_a_neighbour_that_comes_and_goes_costs_time_and_nothing_else(medium: Path) -> None:
    """Nobody is killed or refused, tokens stay the same, and the window goes down and comes back."""
    needs_groups()
    report = run(
        Options(medium, share=1.0, seconds=16, hold_s=2, rest_s=6, max_tokens=16, clients=4, top_share=0.15)
    )
    assert report.survived, report
    assert report.answers >= 4
    low = report.k.index(min(report.k))
    assert max(report.k[: low + 1]) > min(report.k) < max(report.k[low:])
    assert report.lowest_available_bytes > 0


@pytest.mark.slow
def test_the_limit_of_an_outer_group_counts(medium: Path, tmp_path: Path) -> None:
    """A small group on a large machine, and in it one that says nothing."""
    needs_groups()
    with memory_group(700 * MB) as (outer, _):
        assert outer is not None
        inner = outer / "inner"
        inner.mkdir()
        try:
            with daemon(medium, tmp_path, "auto", inner) as (process, socket):
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as client:
                    lines = client.get("http://flashd/metrics").text.splitlines()
                values = dict(
                    line.split() for line in lines if line.startswith("flashd_memory_") and " " in line
                )
                assert 550 * MB < float(values["flashd_memory_limit_bytes"]) < 700 * MB
                assert process.poll() is None
        finally:
            for _ in range(100):
                if not (inner / "cgroup.procs").read_text():
                    break
            inner.rmdir()


def peaks(bundle: Path, scratch: Path, memory: str, prompt: list[int]) -> tuple[int, int]:
    """The most that a daemon takes of its own, and that its cgroup counts as anonymous, while it answers; 20
    times a second."""
    with memory_group(8 << 30) as (group, _):
        assert group is not None
        most, anonymous, over = 0, 0, threading.Event()
        with daemon(bundle, scratch, memory, group) as (process, socket):

            def watch() -> None:
                nonlocal most, anonymous
                while not over.wait(0.05):
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    own = [
                        int(line.split()[1]) << 10
                        for line in lines
                        if line.startswith(("RssAnon", "RssShmem"))
                    ]
                    most = max(most, sum(own))
                    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    anonymous = max(anonymous, int(stat.get("rss", stat.get("anon", 0))))

            thread = threading.Thread(target=watch)
            thread.start()
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=60) as client:
                for length in (300, 30):
                    body = {"prompt": prompt[:length], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
                    answer = client.post("http://flashd/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
            over.set()
            thread.join()
        for _ in range(100):
            if not (group / "cgroup.procs").read_text():
                break
            time.sleep(0.05)
    return most, anonymous


@pytest.mark.slow
def test_a_daemon_takes_what_was_planned(medium: Path, smollm2: Path, tmp_path: Path) -> None:
    """Within 10 %: two models, one with masks and one without, three settings each."""
    needs_groups()
    for bundle, settings in ((medium, ("60%", "80%", "700MB")), (smollm2, ("50%", "90%", "auto"))):
        for memory in settings:
            config = DaemonConfig(model=str(bundle), memory=memory)
            subject = Subject.open(config, base_bytes(config))
            reading = SystemMemory().read()
            account = subject.account(memory, reading)
            planned = subject.parts(subject.allocation(account.weights_bytes(reading.at_s))).total
            for found in peaks(bundle, tmp_path, memory, [4 + i % 90 for i in range(300)]):
                assert 0.9 * planned < found < 1.1 * planned, (bundle.name, memory, planned, found)


@pytest.mark.slow
def test_loading_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    made = make_bundle(tmp_path, tiny_spec("opt", d_ffn=4000))
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)

    async def cycle() -> int:
        runtime = await build(DaemonConfig(model=str(made.directory), predictor="oracle", memory="120%"))
        running = asyncio.create_task(runtime.engine.run())
        async for _ in runtime.engine.submit([1, 2, 3], params).pieces():
            pass
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runtime.close()
        return footprint_bytes()

    sizes = [asyncio.run(cycle()) for _ in range(20)]
    slope = np.polyfit(np.arange(15), sizes[5:], 1)[0]
    model_bytes = 3 * 4000 * 512
    assert slope < 0.02 * model_bytes, sizes


@pytest.mark.slow
def test_hundreds_of_requests_leave_nothing_behind(
    tiny: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """RssAnon of the daemon, after each fifty of 500 requests."""

    def anonymous(pid: int) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

    with serving(tiny("opt")[1], tmp_path) as running, running.http() as http:
        sizes = []
        for number in range(500):
            body = {
                "prompt": [5 + number % 90] * (1 + number % 50),
                "max_tokens": 1 + number % 8,
                "seed": number,
            }
            assert http.post("/v1/completions", json=body).status_code == 200
            if number % 50 == 49:
                sizes.append(anonymous(running.process.pid))
    slope = np.polyfit(np.arange(7), sizes[3:], 1)[0]  # bytes each fifty requests
    assert slope < 200_000, sizes
