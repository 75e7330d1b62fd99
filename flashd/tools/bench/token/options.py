"""What ``flashd bench token`` can be told, and what a worker is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashd.config import EVICTION
from flashd.errors import ConfigError

FULL_TOKENS = 256


@dataclass(frozen=True)
class TokenOptions:
    """What to measure.

    Attributes:
        budget: bytes that weights, predictors, window and buffers may take: ``50%``, ``4GiB``.
        modes: some of ``modes.MODES``; None: all.
        rounds: how often; the median counts.
        prompt_tokens: before the first generated token.
        tokens: measured in each round by the sparse modes.
        warmup_tokens: generated before them, so that the window is as it will stay.
        dense_tokens: measured in each round by naive and hybrid, after one other.
        free_steps: so many others between them are done once more without dependencies; 0: none.
        scratch: directory for the split copy; None: beside the bundle.
        eviction: which neurons leave RAM first; empty: as the daemon does by default.
        backend: how files are read.
        threads: of the kernels; 0: all CPUs.
        seed: of the prompt.
    """

    budget: str
    modes: tuple[str, ...] | None = None
    rounds: int = 3
    prompt_tokens: int = 128
    tokens: int = 64
    warmup_tokens: int = 32
    dense_tokens: int = 8
    free_steps: int = 16
    scratch: Path | None = None
    eviction: str = ""
    backend: str = "auto"
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value, low in (
            ("rounds", self.rounds, 1),
            ("prompt tokens", self.prompt_tokens, 1),
            ("tokens", self.tokens, 1),
            ("warm-up tokens", self.warmup_tokens, 1),
            ("tokens of naive and hybrid", self.dense_tokens, 1),
            ("free steps", self.free_steps, 0),
        ):
            if not low <= value <= 100_000:
                raise ConfigError(f"{what}: {value}, expected {low} to 100000")
        if self.eviction not in ("", *EVICTION):
            raise ConfigError(f"eviction is {self.eviction!r}, expected one of: {', '.join(EVICTION)}")
        if self.backend == "memory":
            raise ConfigError("backend memory reads nothing: there would be nothing to measure")


@dataclass(frozen=True)
class Task:
    """One mode of one round, for a process of its own. Everything is JSON.

    Attributes:
        directory: the bundle.
        mode: its name.
        split: file of the split copy; empty for modes that read bundles.
        group: memory cgroup to join; empty for none.
        budget, eviction, backend, threads, seed, prompt_tokens: as in ``TokenOptions``.
        warmup_tokens, tokens, free_steps: of this mode.
    """

    directory: str
    mode: str
    split: str
    group: str
    budget: str
    eviction: str
    backend: str
    threads: int
    seed: int
    prompt_tokens: int
    warmup_tokens: int
    tokens: int
    free_steps: int

    @property
    def generated(self) -> int:
        """Tokens in all: the first one, warm-up, those that are measured, those done once more."""
        return 1 + self.warmup_tokens + self.tokens + self.free_steps


@dataclass(frozen=True)
class Sample:
    """What one task measured; times are ms per token.

    Attributes:
        ms_per_token: by the clock; the sum of wait, memory, compute and overhead.
        flash_wait_ms: nothing was computed because reads were started or missing.
        flash_busy_ms: at least one read was outstanding.
        memory_ms: upkeep of window and KV cache.
        compute_ms: kernels.
        overhead_ms: the rest.
        bytes_per_token: read from devices, by ``/proc/self/io``; where that is unknown, by the engines.
        counted: whether it is the kernel's figure.
        engine_bytes_per_token: by the engines; without the resident file.
        reads_per_token: of the device.
        needed_bytes_per_token: of the rows that were requested and not in RAM; of all rows without masks.
        requested, hits: rows per token; 0 without masks.
        free_ms: of the steps that were done once more, each, on their own; 0 if none.
        overlaps: of each turn, its steps' time over that of those done once more after it.
        peak_bytes: the most resident memory of the process, files that are mapped included.
        footprint_bytes: the most of its own memory (RssAnon and RssShmem), sampled 20 times a second, less
            what it had before anything was loaded.
        kv_bytes: of the KV cache in use at the end.
        budget_bytes: what the budget was.
        prefill_s: of the prompt.
        notes: what one should know.
    """

    ms_per_token: float
    flash_wait_ms: float
    flash_busy_ms: float
    memory_ms: float
    compute_ms: float
    overhead_ms: float
    bytes_per_token: float
    counted: bool
    engine_bytes_per_token: float
    reads_per_token: float
    needed_bytes_per_token: float
    requested: float
    hits: float
    free_ms: float
    overlaps: tuple[float, ...]
    peak_bytes: int
    footprint_bytes: int
    kv_bytes: int
    budget_bytes: int
    prefill_s: float
    notes: tuple[str, ...] = ()
