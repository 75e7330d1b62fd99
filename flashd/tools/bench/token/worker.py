"""One mode of one round, in a process of its own: ``python -m flashd.tools.bench.token.worker TASK``.

A process of its own has its own ``/proc/self/io``, peak memory and cgroup, and begins with nothing that
another mode has left in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import uvloop

from flashd.errors import FlashdError
from flashd.tools.bench.token.limit import join_group
from flashd.tools.bench.token.options import Sample, Task

if TYPE_CHECKING:
    from flashd.runtime.build import Runtime
    from flashd.runtime.costs import Reading
    from flashd.runtime.session import Session
    from flashd.tools.bench.token.build import Built

_WATCH_S = 0.05


@dataclass(frozen=True)
class _Moment:
    """All counters between two tokens."""

    costs: Reading
    kernel_bytes: int | None
    engine_bytes: int
    reads: int
    delivered: int
    requested: int
    hits: int
    needed_rows: int


def main() -> None:
    """Run the task given as JSON; print its ``Sample`` as JSON, or ``{"error": ...}``."""
    logging.disable(logging.WARNING)  # once would do, and the parent says it
    task = Task(**json.loads(sys.argv[1]))
    try:
        if task.group:
            join_group(Path(task.group))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemon's
            sample = runner.run(run_task(task))
    except (FlashdError, OSError, MemoryError) as exc:
        print(json.dumps({"error": str(exc) or type(exc).__name__}))
        sys.exit(1)
    print(json.dumps(asdict(sample)))


async def run_task(task: Task) -> Sample:
    """Load, generate, measure, and do the last steps once more without dependencies."""
    from flashd.tools.bench.token.build import build_mode

    footprint = _Footprint()  # everything is imported
    built = await build_mode(task)
    try:
        return await _measured(task, built, footprint)
    finally:
        await built.runtime.close()


async def _measured(task: Task, built: Built, footprint: _Footprint) -> Sample:
    from flashd.kv.contiguous import kv_bytes_per_token
    from flashd.tools.bench.token.free_run import free_run

    runtime = built.runtime
    began_s = perf_counter()
    session = _submit(task, runtime)
    recorder, moments, prefill_s = built.recorder, [], 0.0
    first, last = 1 + task.warmup_tokens, 1 + task.warmup_tokens + task.tokens
    n_tokens = 0

    def before_step(phase: str) -> None:
        """Counters are read where no step is half done. Each step of this phase follows on a token."""
        nonlocal n_tokens
        n_tokens += phase == "decode"
        if n_tokens >= first:
            moments.append(_moment(runtime))
        recorder.on = last - task.free_steps <= n_tokens < last
        if recorder.on:
            recorder.next_step()

    runtime.engine.before_step = before_step
    serving = asyncio.create_task(runtime.engine.run())
    watching = asyncio.create_task(footprint.watch())
    try:
        with recorder.kernel_calls():
            async for _ in session.pieces():
                prefill_s = prefill_s or perf_counter() - began_s
        recorder.on = False
        moments.append(_moment(runtime))
    finally:
        serving.cancel()
        watching.cancel()
        await asyncio.wait([serving, watching])
    peak_bytes = _status_bytes("VmHWM")
    free_s = await free_run(recorder.steps, runtime.lane) if recorder.steps else []
    start, end = moments[0], moments[-1]
    tokens = len(moments) - 1
    linked = min(len(free_s), tokens)
    linked_ns = end.costs.wall - moments[-1 - linked].costs.wall
    return Sample(
        **_costs(start.costs, end.costs, tokens),
        **_bytes(runtime, start, end, tokens),
        requested=(end.requested - start.requested) / tokens,
        hits=(end.hits - start.hits) / tokens,
        free_ms=1e3 * sum(free_s[-linked:]) / linked if linked else 0.0,
        linked_ms=linked_ns / 1e6 / linked if linked else 0.0,
        peak_bytes=peak_bytes,
        footprint_bytes=footprint.peak_bytes,
        kv_bytes=kv_bytes_per_token(runtime.manifest.model, "f16") * (task.prompt_tokens + last),
        budget_bytes=runtime.ffn.allocation.budget_bytes if runtime.ffn.allocation else 0,
        prefill_s=prefill_s,
        notes=built.notes,
    )


def _submit(task: Task, runtime: Runtime) -> Session:
    import numpy as np

    from flashd.runtime.sampling import SamplingParams

    # Made-up models repeat themselves in words, but not in neurons: the cheapest choice will do. A real
    # one that repeats itself would have everything in its window.
    greedy = "synthetic" in runtime.manifest.provenance
    params = SamplingParams(
        max_tokens=1 + task.warmup_tokens + task.tokens,
        temperature=0.0 if greedy else 1.0,
        seed=task.seed,
        ignore_eos=True,
    )
    vocabulary = runtime.manifest.model.vocab_size
    prompt = np.random.default_rng(task.seed).integers(vocabulary, size=task.prompt_tokens)
    return runtime.engine.submit(prompt.tolist(), params)


def _moment(runtime: Runtime) -> _Moment:
    from flashd.runtime.costs import CostClock
    from flashd.stats import SparseStats
    from flashd.tools.bench.measure import kernel_read_bytes

    source, store = runtime.ffn.source, runtime.store.stats
    sparse = SparseStats() if source.sparse is None else source.sparse.stats
    return _Moment(
        costs=CostClock(store, source.stats, runtime.lane.stats).read(),
        kernel_bytes=kernel_read_bytes(),
        engine_bytes=store.device.bytes_read,
        reads=store.device.reads,
        delivered=store.bytes_delivered,
        requested=sparse.requested,
        hits=sparse.resident,
        needed_rows=sparse.demand + sparse.prefetched_used,
    )


def _costs(start: Reading, end: Reading, tokens: int) -> dict[str, Any]:
    def ms(name: str) -> float:
        return float(getattr(end, name) - getattr(start, name)) / 1e6 / tokens

    total, parts = ms("wall"), {name: ms(name) for name in ("flash_wait", "memory", "compute")}
    return {
        "ms_per_token": total,
        "flash_wait_ms": parts["flash_wait"],
        "flash_busy_ms": ms("flash_busy"),
        "memory_ms": parts["memory"],
        "compute_ms": parts["compute"],
        "overhead_ms": total - sum(parts.values()),
    }


def _bytes(runtime: Runtime, start: _Moment, end: _Moment, tokens: int) -> dict[str, Any]:
    by_engine = (end.engine_bytes - start.engine_bytes) / tokens
    counted = bool(end.kernel_bytes) and start.kernel_bytes is not None
    by_kernel = ((end.kernel_bytes or 0) - (start.kernel_bytes or 0)) / tokens
    needed = (end.needed_rows - start.needed_rows) * runtime.manifest.ffn.stride_bytes / tokens
    return {
        "bytes_per_token": by_kernel if counted else by_engine,
        "counted": counted,
        "engine_bytes_per_token": by_engine,
        "reads_per_token": (end.reads - start.reads) / tokens,
        "needed_bytes_per_token": needed or (end.delivered - start.delivered) / tokens,
    }


class _Footprint:
    """The process's own memory from now on.

    Attributes:
        peak_bytes: the most that it has grown by.
    """

    def __init__(self) -> None:
        self._base_bytes = _status_bytes("RssAnon", "RssShmem")
        self.peak_bytes = 0

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            grown = _status_bytes("RssAnon", "RssShmem") - self._base_bytes
            self.peak_bytes = max(self.peak_bytes, grown)
            await asyncio.sleep(_WATCH_S)


def _status_bytes(*names: str) -> int:
    """Lines of ``/proc/self/status`` added up."""
    wanted = tuple(f"{name}:" for name in names)
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(wanted))


if __name__ == "__main__":
    main()
