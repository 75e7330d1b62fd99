"""One mode of one round, in a process of its own: ``python -m flashd.tools.bench.token.worker TASK``.

A process of its own has its own ``/proc/self/io``, peak memory and cgroup, and begins with nothing that
another mode has left in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import uvloop

from flashd.errors import FlashdError
from flashd.memory.system import footprint_bytes, status_bytes
from flashd.tools.bench.token.limit import join_group
from flashd.tools.bench.token.options import Sample, Task

if TYPE_CHECKING:
    from flashd.runtime.build import Runtime
    from flashd.runtime.costs import Reading
    from flashd.runtime.session import Session
    from flashd.tools.bench.token.build import Built

_WATCH_S = 0.05
# Steps in a row that are done once more.
_RECORDED_STEPS = 4


@dataclass(frozen=True)
class _Moment:
    """All counters before a step."""

    step: int
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

    runtime = built.runtime
    began_s = perf_counter()
    session = _submit(task, runtime)
    measuring, prefill_s = _Measuring(task, built), 0.0
    runtime.engine.before_step = measuring.before_step
    serving = asyncio.create_task(runtime.engine.run())
    watching = asyncio.create_task(footprint.watch())
    try:
        with built.recorder.kernel_calls():
            async for _ in session.pieces():
                prefill_s = prefill_s or perf_counter() - began_s
            await measuring.end()
    finally:
        serving.cancel()
        watching.cancel()
        await asyncio.wait([serving, watching])
    free_s = measuring.free_s
    return Sample(
        **measuring.costs(),
        **measuring.bytes(),
        free_ms=1e3 * sum(free_s) / len(free_s) if free_s else 0.0,
        overlaps=tuple(measuring.overlaps),
        peak_bytes=status_bytes("VmHWM"),
        footprint_bytes=footprint.peak_bytes,
        kv_bytes=kv_bytes_per_token(runtime.manifest.model, "f16") * (task.prompt_tokens + task.generated),
        budget_bytes=runtime.ffn.allocation.budget_bytes if runtime.ffn.allocation else 0,
        prefill_s=prefill_s,
        notes=built.notes,
    )


class _Measuring:
    """Takes the counters of steps, and between them does others once more without dependencies.

    Both take turns, some steps at a time: whatever else the machine is busy with meets both. Steps that are
    recorded for the free run, which takes time, are not measured.

    Attributes:
        free_s: seconds of each step that was done once more.
        overlaps: by turn, the time of a step over that of one done once more.
    """

    def __init__(self, task: Task, built: Built) -> None:
        self.free_s: list[float] = []
        self.overlaps: list[float] = []
        self._runtime, self._recorder = built.runtime, built.recorder
        self._first = 1 + task.warmup_tokens
        turns = max(1, task.free_steps // _RECORDED_STEPS)
        self._recorded: list[bool] = []
        for turn in range(turns):
            for steps, recorded in ((task.tokens, False), (task.free_steps, True)):
                self._recorded += [recorded] * (steps * (turn + 1) // turns - steps * turn // turns)
        self._n_tokens = 0
        self._measured: list[tuple[_Moment, _Moment]] = []
        self._since: _Moment | None = None
        self._tokens = task.tokens

    async def before_step(self, phase: str) -> None:
        """See ``Engine.before_step``: each step of this phase follows on a token."""
        self._n_tokens += phase == "decode"
        await self._between(self._n_tokens - self._first)

    async def end(self) -> None:
        """The last step is over."""
        await self._between(len(self._recorded))

    async def _between(self, step: int) -> None:
        """Before a step, counted from the first that is measured."""
        if step < 0:
            return
        recorded = self._recorded[step] if step < len(self._recorded) else None
        if self._since is not None and recorded is not False:
            self._measured.append((self._since, _moment(self._runtime, step)))
            self._since = None
        recorder = self._recorder
        recorder.on = recorded is True
        if recorded:
            recorder.next_step()
        elif recorder.steps:
            from flashd.tools.bench.token.free_run import free_run

            free_s = await free_run(recorder.steps, self._runtime.lane)
            recorder.steps.clear()
            self.free_s += free_s
            start, end = self._measured[-1]
            step_s = (end.costs.wall - start.costs.wall) / 1e9 / (end.step - start.step)
            self.overlaps.append(step_s * len(free_s) / sum(free_s))
        if self._since is None and recorded is False:
            self._since = _moment(self._runtime, step)

    def costs(self) -> dict[str, Any]:
        """What a token cost, by kind."""

        def ms(name: str) -> float:
            return self._sum(lambda moment: getattr(moment.costs, name)) / 1e6

        total, parts = ms("wall"), {name: ms(name) for name in ("flash_wait", "memory", "compute")}
        return {
            "ms_per_token": total,
            "flash_wait_ms": parts["flash_wait"],
            "flash_busy_ms": ms("flash_busy"),
            "memory_ms": parts["memory"],
            "compute_ms": parts["compute"],
            "overhead_ms": total - sum(parts.values()),
        }

    def bytes(self) -> dict[str, Any]:
        """What a token read."""
        by_engine = self._sum(lambda moment: moment.engine_bytes)
        by_kernel = self._sum(lambda moment: moment.kernel_bytes or 0)
        counted = by_kernel > 0
        needed = self._sum(lambda moment: moment.needed_rows) * self._runtime.manifest.ffn.stride_bytes
        return {
            "bytes_per_token": by_kernel if counted else by_engine,
            "counted": counted,
            "engine_bytes_per_token": by_engine,
            "reads_per_token": self._sum(lambda moment: moment.reads),
            "needed_bytes_per_token": needed or self._sum(lambda moment: moment.delivered),
            "requested": self._sum(lambda moment: moment.requested),
            "hits": self._sum(lambda moment: moment.hits),
        }

    def _sum(self, value: Callable[[_Moment], float]) -> float:
        """By how much a counter grew in the steps that were measured, per token."""
        return sum(value(end) - value(start) for start, end in self._measured) / self._tokens


def _submit(task: Task, runtime: Runtime) -> Session:
    import numpy as np

    from flashd.runtime.sampling import SamplingParams

    # Made-up models repeat themselves in words, but not in neurons: the cheapest choice will do. A real
    # one that repeats itself would have everything in its window.
    greedy = "synthetic" in runtime.manifest.provenance
    params = SamplingParams(
        max_tokens=task.generated,
        temperature=0.0 if greedy else 1.0,
        seed=task.seed,
        ignore_eos=True,
    )
    vocabulary = runtime.manifest.model.vocab_size
    prompt = np.random.default_rng(task.seed).integers(vocabulary, size=task.prompt_tokens)
    return runtime.engine.submit(prompt.tolist(), params)


def _moment(runtime: Runtime, step: int) -> _Moment:
    from flashd.runtime.costs import CostClock
    from flashd.stats import SparseStats
    from flashd.tools.bench.measure import kernel_read_bytes

    source, store = runtime.ffn.source, runtime.store.stats
    sparse = SparseStats() if source.sparse is None else source.sparse.stats
    return _Moment(
        step=step,
        costs=CostClock(store, source.stats, runtime.lane.stats).read(),
        kernel_bytes=kernel_read_bytes(),
        engine_bytes=store.device.bytes_read,
        reads=store.device.reads,
        delivered=store.bytes_delivered,
        requested=sparse.requested,
        hits=sparse.resident,
        needed_rows=sparse.demand + sparse.prefetched_used,
    )


class _Footprint:
    """The process's own memory from now on.

    Attributes:
        peak_bytes: the most that it has grown by.
    """

    def __init__(self) -> None:
        self._base_bytes = footprint_bytes()
        self.peak_bytes = 0

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            grown = footprint_bytes() - self._base_bytes
            self.peak_bytes = max(self.peak_bytes, grown)
            await asyncio.sleep(_WATCH_S)


if __name__ == "__main__":
    main()
