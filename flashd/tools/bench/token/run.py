"""``flashd bench token``: time per token of each step from reading everything to the whole method.

Modes take turns within every round, each in a process of its own, so that whatever else the machine is
busy with meets all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from math import prod
from pathlib import Path

from flashd.errors import ConfigError, FlashdError, InternalError
from flashd.kv.contiguous import kv_bytes_per_token
from flashd.layout.calibration import CALIBRATION
from flashd.layout.manifest import Manifest
from flashd.store.open import open_manifest, resident_entries
from flashd.tools import host
from flashd.tools.bench.child import child, sigterm_unwinds
from flashd.tools.bench.subjects import open_source, warm
from flashd.tools.bench.token.budget import checked_budget
from flashd.tools.bench.token.limit import memory_group
from flashd.tools.bench.token.modes import Mode, modes_named
from flashd.tools.bench.token.options import Sample, Task, TokenOptions
from flashd.tools.bench.token.report import TokenReport, TokenRow, token_rows
from flashd.tools.bench.token.split import parts_of, split_copy

# Beside the budget: interpreter and libraries, scratch of a prompt's chunk, and what the free run keeps.
PROCESS_BYTES = 256 << 20
_DENSE_WARMUP = 1

# Told the phase, bytes done and bytes in all; or tasks done and tasks in all.
ByteProgress = Callable[[str, int, int], None]
TaskProgress = Callable[[int, int], None]


def bench_token(
    directory: Path,
    options: TokenOptions,
    preparing: ByteProgress = lambda phase, done_bytes, total_bytes: None,
    measuring: TaskProgress = lambda done, total: None,
) -> TokenReport:
    """Measure a bundle.

    Args:
        directory: the bundle, store ``file`` for modes without bundling.
        options: what to measure.
        preparing: told how far copying and the first pass over the files are.
        measuring: told how many modes were measured, each once a round.

    Raises:
        ConfigError: it cannot be measured like this; says why.
        BundleError: the directory is no bundle, or damaged.
        DiskReadError: the device failed.
        FlashdError: a mode failed; says what it said.
    """
    manifest = open_manifest(directory)
    modes, left_out = _modes(directory, manifest, options)
    budget_bytes = checked_budget(directory, manifest, modes, options.budget)
    longest = options.prompt_tokens + max(
        task_of(directory, options, mode, "", "").generated for mode in modes
    )
    kv_bytes = kv_bytes_per_token(manifest.model, "f16") * longest
    samples: dict[str, list[Sample]] = {mode.name: [] for mode in modes}
    with ExitStack() as stack:
        stack.enter_context(sigterm_unwinds())
        split = ""
        if any(mode.sparse and not mode.bundled for mode in modes):
            scratch = options.scratch or directory.resolve().parent
            split = str(stack.enter_context(split_copy(directory, manifest, scratch, preparing)))
        _warm(directory, preparing)
        group, why = stack.enter_context(memory_group(budget_bytes + kv_bytes + PROCESS_BYTES))
        for turn in range(options.rounds * len(modes)):
            measuring(turn, options.rounds * len(modes))
            round_, place = divmod(turn, len(modes))
            mode = modes[(place + round_) % len(modes)]
            task = task_of(directory, options, mode, split, str(group or ""))
            samples[mode.name].append(run_task(task))
        measuring(options.rounds * len(modes), options.rounds * len(modes))
    rows = token_rows(samples, budget_bytes)
    limit_mb = (budget_bytes + kv_bytes + PROCESS_BYTES) / 1e6
    enforced = (
        f"by a cgroup of {limit_mb:.0f} MB: the budget, {kv_bytes / 1e6:.0f} MB of KV cache and "
        f"{PROCESS_BYTES / 1e6:.0f} MB for the process"
        if group
        else f"by construction, and compared with the peak of resident memory ({why})"
    )
    return TokenReport(
        rows=rows,
        directory=str(directory),
        model=model_title(directory, manifest),
        synthetic="synthetic" in manifest.provenance,
        budget=options.budget,
        budget_bytes=budget_bytes,
        enforced=enforced,
        device=device_facts(directory),
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
        dense_tokens=options.dense_tokens,
        rounds=options.rounds,
        notes=[*left_out, *_notes(samples, rows)],
    )


def _modes(directory: Path, manifest: Manifest, options: TokenOptions) -> tuple[tuple[Mode, ...], list[str]]:
    """What is measured, and why other modes are not; what was named must be possible."""
    modes, why = list(modes_named(options.modes)), []
    for problem, concerned in (
        (_no_predictors(directory), [mode for mode in modes if mode.sparse]),
        (_no_split(manifest), [mode for mode in modes if mode.sparse and not mode.bundled]),
    ):
        if not problem or not concerned:
            continue
        text = f"{', '.join(mode.name for mode in concerned)}: {problem}"
        if options.modes is not None:
            raise ConfigError(f"{directory}: {text}")
        why.append(f"left out {text}")
        modes = [mode for mode in modes if mode not in concerned]
    others = max(task_of(directory, options, mode, "", "").generated for mode in modes)
    if options.prompt_tokens + others > manifest.model.max_context:
        raise ConfigError(
            f"{options.prompt_tokens} prompt tokens and {others} others are too many for a context of "
            f"{manifest.model.max_context}"
        )
    return tuple(modes), why


def _no_predictors(directory: Path) -> str:
    """Why there is nothing sparse; empty if there is."""
    found = (directory / CALIBRATION).is_file()
    return "" if found else "the bundle has no predictors; make some with flashd calibrate"


def _no_split(manifest: Manifest) -> str:
    """Why a split copy cannot be made; empty if it can."""
    if manifest.store != "file":
        return f"a {manifest.store} store cannot be compared with a split layout; convert with --store file"
    try:
        parts_of(manifest.ffn)
    except ConfigError as exc:
        return str(exc)
    return ""


def _warm(directory: Path, preparing: ByteProgress) -> None:
    """The first pass over a file may be ten times slower than the second."""
    import asyncio

    asyncio.run(warm(open_source(directory), preparing))


def task_of(directory: Path, options: TokenOptions, mode: Mode, split: str, group: str) -> Task:
    """A mode for a process of its own.

    Args:
        directory: the bundle.
        options: what to measure.
        mode: the mode.
        split: file of the split copy; empty without one.
        group: memory cgroup; empty without one.
    """
    tokens = options.tokens if mode.sparse else options.dense_tokens
    return Task(
        directory=str(directory.resolve()),
        mode=mode.name,
        split=split if mode.sparse and not mode.bundled else "",
        group=group,
        budget=options.budget,
        eviction=options.eviction,
        backend=options.backend,
        threads=options.threads,
        seed=options.seed,
        prompt_tokens=options.prompt_tokens,
        warmup_tokens=options.warmup_tokens if mode.sparse else _DENSE_WARMUP,
        tokens=tokens,
        free_steps=min(options.free_steps, max(1, tokens // 2)),
    )


def run_task(task: Task) -> Sample:
    """Run a task in a process of its own.

    Raises:
        FlashdError: it failed; says what it said.
        InternalError: it ended without a result.
    """
    command = [sys.executable, "-m", "flashd.tools.bench.token.worker", json.dumps(asdict(task))]
    with child(command) as process:
        output, _ = process.communicate()
    lines = output.splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError) as exc:
        killed = process.returncode == -9 and task.group
        why = "its memory limit was too small" if killed else f"exit status {process.returncode}"
        raise InternalError(f"mode {task.mode} ended without a result: {why}") from exc
    if "error" in result:
        raise FlashdError(f"mode {task.mode}: {result['error']}")
    return Sample(**{**result, "notes": tuple(result["notes"]), "overlaps": tuple(result["overlaps"])})


def _notes(samples: dict[str, list[Sample]], rows: list[TokenRow]) -> list[str]:
    notes = [f"{name}: {text}" for name, some in samples.items() for one in some for text in one.notes]
    if not all(sample.counted for some in samples.values() for sample in some):
        notes.append("bytes are the engines' own count: the kernel counts no reads of this file system")
    for row in rows:
        if not row.within_budget:
            notes.append(f"{row.mode} took more memory than the budget: {row.footprint_gb:.2f} GB")
    return list(dict.fromkeys(notes))


def model_title(directory: Path, manifest: Manifest) -> str:
    """A model for people: family, size and shape; says whether its weights are synthetic."""
    spec = manifest.model
    weights = sum(prod(entry.shape) for entry in resident_entries(directory).values())
    weights += manifest.ffn.n_layers * manifest.ffn.n_neurons * manifest.ffn.row_elements
    kind = "synthetic " if "synthetic" in manifest.provenance else ""
    return (
        f"{kind}{spec.family}, {weights / 1e6:,.0f} M parameters, {spec.n_layers} layers, d {spec.d_model}, "
        f"{manifest.dtype}"
    )


def device_facts(directory: Path) -> dict[str, str]:
    """Kernel, and where it is known file system and disk of a directory."""
    facts = {"kernel": host.kernel()}
    try:
        mount = host.mount_of(directory)
    except (OSError, ValueError):
        return facts
    return facts | {"file_system": mount.file_system, "disk": mount.disk, "model": mount.model}
