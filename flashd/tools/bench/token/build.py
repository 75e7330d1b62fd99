"""Building a mode: as the daemon builds it, but for what naive and the split layout need of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashd.config import DaemonConfig
from flashd.disk.curve import load_curve
from flashd.disk.probe import open_engine
from flashd.layout.manifest import BUNDLE, RESIDENT, Manifest
from flashd.memory.account import KV_BLOCK_TOKENS
from flashd.memory.budget import parse_budget
from flashd.prefetch.stream import RING_BUFFERS, ring_slice_rows
from flashd.runtime.accounting import as_share, whole_bytes
from flashd.runtime.background import in_thread
from flashd.runtime.build import Opened, Runtime, assemble, open_bundle
from flashd.runtime.ffn import BuiltFFN
from flashd.store.checked import CheckedStore
from flashd.store.metered import MeteredStore
from flashd.store.open import load_sums, open_manifest, open_store
from flashd.tools.bench.token.free_run import RecordedStore, Recorder
from flashd.tools.bench.token.modes import MODES, Mode
from flashd.tools.bench.token.naive import NaiveFFN, NaiveStore, ResidentImage
from flashd.tools.bench.token.options import Task
from flashd.tools.bench.token.split import SplitStore
from flashd.types import FFNSource


@dataclass(frozen=True)
class Built:
    """A loaded mode.

    Attributes:
        runtime: what generates.
        recorder: sees its reads.
        notes: what one should know about it.
    """

    runtime: Runtime
    recorder: Recorder
    notes: tuple[str, ...]


async def build_mode(task: Task) -> Built:
    """Load a bundle as one mode wants it.

    Raises:
        ConfigError: the budget is too small, or a backend does not work here.
        BundleError, DiskReadError: the bundle cannot be used.
    """
    mode, recorder = MODES[task.mode], Recorder()
    if not mode.resident:
        return await _naive(task, recorder)
    config = _config(task, mode, open_manifest(Path(task.directory)))
    opened = await open_bundle(config)
    if task.split:
        await opened.store.close()
        opened.store = await _split_store(task, opened, recorder)
    else:
        _record(opened.store, recorder)
    runtime = await assemble(config, opened, kv_tokens=_kv_tokens(task))
    notes = []
    sparse = runtime.ffn.source.sparse
    if sparse is not None and not mode.window:
        # A layer is over its capacity only while it is computed: nothing stays for the next token.
        sparse.window.capacity = [0] * len(sparse.window.capacity)
    if mode.sparse and sparse is None:
        notes.append("no layer of this bundle has a mask: calibrate it for sparse modes")
    return Built(runtime, recorder, tuple(notes))


def _kv_tokens(task: Task) -> int:
    """KV cache beside the budget."""
    return max(KV_BLOCK_TOKENS, task.prompt_tokens + task.generated)


def _config(task: Task, mode: Mode, manifest: Manifest, budget_bytes: int | None = None) -> DaemonConfig:
    other: dict[str, Any] = {"eviction": task.eviction} if task.eviction else {}
    all_bytes = whole_bytes(Path(task.directory), manifest)
    if budget_bytes is None:
        budget_bytes = parse_budget(task.budget, all_bytes, 0)
    return DaemonConfig(
        model=task.directory,
        **other,
        backend=task.backend,
        memory=as_share(budget_bytes, all_bytes),
        predictor="auto" if mode.sparse else "none",
        prefetch="on" if mode.prefetch else "off",
        max_sessions=1,
        threads=task.threads,
    )


def _record(store: MeteredStore, recorder: Recorder) -> None:
    """Put a recorder below the checks, where a store has any."""
    checked = store.inner
    assert isinstance(checked, CheckedStore), "rows are checked, as the daemon does by default"
    checked.inner = RecordedStore(checked.inner, recorder)


async def _split_store(task: Task, opened: Opened, recorder: Recorder) -> MeteredStore:
    """The split copy's rows, checked as the bundle's are."""
    directory, geometry = Path(task.directory), opened.manifest.ffn
    engine = await open_engine(Path(task.split), task.backend)
    curve = load_curve(directory / BUNDLE, engine.name)
    rows = SplitStore(engine, geometry, curve.break_even_bytes() if curve else 0)
    sums = await in_thread(load_sums, directory, opened.manifest)
    return MeteredStore(CheckedStore(RecordedStore(rows, recorder), sums, directory))


async def _naive(task: Task, recorder: Recorder) -> Built:
    directory = Path(task.directory)
    manifest: Manifest = await in_thread(open_manifest, directory)
    image = await in_thread(ResidentImage, directory, manifest.model.n_layers)
    rows = await open_store(directory, manifest, task.backend, verify="auto")
    _record(rows, recorder)
    engine = await open_engine(directory / RESIDENT, task.backend)
    why = engine.register(image.memory)
    store = MeteredStore(NaiveStore(rows.inner, engine, image, recorder))
    resident_bytes = sum(tensor.nbytes for tensor in image.weights.values())
    rows_bytes = ring_slice_rows(manifest.ffn) * manifest.ffn.stride_bytes
    # Not a byte for layers in RAM.
    config = _config(task, MODES[task.mode], manifest, resident_bytes + RING_BUFFERS * rows_bytes)

    def around(ffn: BuiltFFN) -> FFNSource:
        return NaiveFFN(ffn.source, ffn.source.stats, store, image)

    opened = Opened(manifest, image.weights, None, store)
    runtime = await assemble(config, opened, around, _kv_tokens(task))
    return Built(runtime, recorder, (f"resident file: {why}",) if why else ())
