"""The one place where the daemon's objects are wired together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from flashd import kernels
from flashd.config import DaemonConfig
from flashd.kernels.lane import ComputeLane
from flashd.layout.manifest import TOKENIZER, Manifest
from flashd.memory.account import KV_BLOCK_TOKENS
from flashd.memory.system import SystemMemory
from flashd.memory.wake import MemoryWake
from flashd.models.decoder import Decoder
from flashd.runtime.accounting import check_memory
from flashd.runtime.background import in_thread
from flashd.runtime.costs import CostClock
from flashd.runtime.engine import Engine
from flashd.runtime.ffn import BuiltFFN, build_ffn
from flashd.runtime.memory import MemoryKeeper
from flashd.runtime.tokenizer import Tokenizer
from flashd.store.metered import MeteredStore
from flashd.store.open import load_resident, open_manifest, open_store
from flashd.types import FFNSource, WeightArray

log = logging.getLogger("flashd.build")


@dataclass
class Runtime:
    """A loaded model and everything that serves it."""

    manifest: Manifest
    store: MeteredStore
    lane: ComputeLane
    ffn: BuiltFFN
    engine: Engine
    memory: MemoryKeeper
    tokenizer: Tokenizer | None
    resident_bytes: int

    async def close(self) -> None:
        """Release files and threads; waits for reads in flight."""
        await self.ffn.close()
        await self.store.close()
        self.lane.close()


@dataclass
class Opened:
    """What a model is made of, before anything is built from it.

    Attributes:
        manifest: of the bundle.
        weights: resident tensors by name.
        tokenizer: None for a model without.
        store: where the FFN's rows are.
        base_bytes: what the process had before the weights were loaded; None: not known.
    """

    manifest: Manifest
    weights: dict[str, WeightArray]
    tokenizer: Tokenizer | None
    store: MeteredStore
    base_bytes: int | None = None


async def build(config: DaemonConfig) -> Runtime:
    """Open a bundle and load what stays in RAM.

    Raises:
        BundleError: the directory is no bundle, is incomplete or damaged.
        ConfigError: the memory is too small.
        TokenizerError: its tokenizer or chat template is unusable.
    """
    return await assemble(config, await open_bundle(config))


async def open_bundle(config: DaemonConfig) -> Opened:
    """Open a bundle's rows, and load its resident weights and tokenizer; errors as ``build``."""
    directory = config.model_dir
    manifest = await in_thread(open_manifest, directory)
    tokenizer = None
    if manifest.tokenizer is not None and any(f.name == TOKENIZER for f in manifest.files):
        tokenizer = await in_thread(Tokenizer, directory / TOKENIZER, manifest.tokenizer)
    base_bytes = await in_thread(check_memory, config, manifest)
    weights = await in_thread(load_resident, directory, manifest)
    store = await open_store(directory, manifest, config.backend, verify=config.verify)
    return Opened(manifest, weights, tokenizer, store, base_bytes)


async def assemble(
    config: DaemonConfig,
    opened: Opened,
    around: Callable[[BuiltFFN], FFNSource] | None = None,
    kv_tokens: int = KV_BLOCK_TOKENS,
) -> Runtime:
    """Wire a model that is open.

    Args:
        config: all settings.
        opened: its parts; the store is closed with the runtime, and if this fails.
        around: what the decoder shall use in the place of the FFN's source, made from it.
        kv_tokens: KV cache that is set aside even while nothing runs; comes on top of a share of memory.

    Raises:
        BundleError, ConfigError: as ``build``.
    """
    kernels.set_threads(_threads(config.threads))
    manifest, weights, tokenizer, store = opened.manifest, opened.weights, opened.tokenizer, opened.store
    lane = ComputeLane()
    spec = manifest.model
    try:
        ffn = await build_ffn(config, manifest, weights, store, lane, opened.base_bytes, kv_tokens)
    except BaseException:
        await store.close()
        lane.close()
        raise
    decoder = Decoder(spec, weights, ffn.source if around is None else around(ffn), lane)
    memory = MemoryKeeper(ffn, lane, config.window, SystemMemory().read, MemoryWake())
    engine = Engine(
        decoder,
        tokenizer,
        manifest.tokenizer.eos_ids if manifest.tokenizer else (),
        lane,
        CostClock(store.stats, ffn.source.stats, lane.stats),
        max_sessions=config.max_sessions,
        max_queue=config.max_queue,
        kv_dtype=config.kv_dtype,
        memory=memory,
    )
    resident_bytes = sum(tensor.nbytes for tensor in weights.values())
    log.info(
        "loaded %s: %d layers, %s, resident %.1f MB, FFN %.1f MB through %s",
        config.model_dir.name,
        spec.n_layers,
        manifest.dtype,
        resident_bytes / 1e6,
        manifest.ffn.n_layers * manifest.ffn.layer_bytes / 1e6,
        store.name,
    )
    if "synthetic" in manifest.provenance:
        log.warning("the weights are synthetic (flashd synth): answers mean nothing")
    if not kernels.NATIVE:
        log.warning("the native kernels are not installed: NumPy twins compute, far slower")
    log.info(
        "kernels %s on %d threads, KV cache %s, %d sessions, tokenizer %s, chat template %s",
        kernels.simd_level() if kernels.NATIVE else "numpy",
        kernels.threads(),
        config.kv_dtype,
        config.max_sessions,
        "yes" if tokenizer else "no",
        "yes" if tokenizer and tokenizer.has_chat_template else "no",
    )
    return Runtime(manifest, store, lane, ffn, engine, memory, tokenizer, resident_bytes)


def _threads(wanted: int) -> int:
    """Kernel threads: never more than can run at once, which would only wait for each other."""
    usable = kernels.default_threads()
    if wanted > usable:
        log.warning("%d kernel threads are too many for %d usable CPUs: taking %d", wanted, usable, usable)
    return min(wanted or usable, usable, kernels.MAX_THREADS)
