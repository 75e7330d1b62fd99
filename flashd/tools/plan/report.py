"""What ``flashd plan`` says. ``dataclasses.asdict`` makes JSON of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryParts:
    """What memory goes to, in bytes.

    Attributes:
        process: interpreter, libraries, tokenizer, the window's tables, what serving adds.
        prompt: scratch of a prompt's chunk.
        kv_cache: set aside for KV caches even while nothing runs; longer answers take the window's rows.
        resident: attention weights, embeddings, norms.
        predictors: of all layers.
        stream_buffers: slices of streamed layers, and of prompts.
        layers: layers without a mask that are in RAM.
        window: rows of masked layers, spare ones included.
    """

    process: int
    prompt: int
    kv_cache: int
    resident: int
    predictors: int
    stream_buffers: int
    layers: int
    window: int

    @property
    def total(self) -> int:
        """All of it: the predicted peak."""
        return (
            self.process + self.prompt + self.kv_cache + self.resident + self.predictors
            + self.stream_buffers + self.layers + self.window
        )  # fmt: skip


@dataclass(frozen=True)
class PlanRow:
    """A budget.

    Attributes:
        memory: a setting of ``--memory`` that means it.
        feasible: whether the model can be started with it.
        problem: why not, and the least that works; or what is wrong with it all the same.
        weights_bytes: for resident weights, predictors, stream buffers, layers and rows.
        peak_bytes: predicted peak of RssAnon + RssShmem.
        k: steps whose requests stay in RAM; 0: not even one step's.
        window_rows: of all masked layers, without spare ones.
        spare_rows: kept free for reads on their way.
        window_share: ``window_rows`` of all neurons of masked layers.
        resident_layers: layers without a mask in RAM; streamed_layers: those that are streamed.
        found_share: requested rows that are in RAM; None without masks.
        read_bytes: per token.
        reads: device reads per token, of rows.
        ms_per_token: the sum of the next four.
        flash_wait_ms: nothing is computed because reads are missing.
        memory_ms: upkeep of the window.
        compute_ms: kernels.
        overhead_ms: the rest.
        flash_ms: with at least one read outstanding; beside the others.
    """

    memory: str
    feasible: bool
    problem: str = ""
    weights_bytes: int = 0
    peak_bytes: int = 0
    k: int = 0
    window_rows: int = 0
    spare_rows: int = 0
    window_share: float = 0.0
    resident_layers: int = 0
    streamed_layers: int = 0
    found_share: float | None = None
    read_bytes: float = 0.0
    reads: float = 0.0
    ms_per_token: float = 0.0
    flash_wait_ms: float = 0.0
    memory_ms: float = 0.0
    compute_ms: float = 0.0
    overhead_ms: float = 0.0
    flash_ms: float = 0.0


@dataclass(frozen=True)
class PlanReport:
    """A plan.

    Attributes:
        directory: the bundle.
        model: for people; says whether its weights are synthetic.
        synthetic: whether they are.
        memory: the setting that was asked about.
        all_weights_bytes: what 100% is.
        least_memory: the smallest ``--memory`` that works.
        available_bytes: memory that could be had when this was computed.
        context_tokens: that attention goes over in the figures.
        parts: what the memory goes to; None if it is not enough.
        chosen: the plan for ``memory``.
        rows: others, by budget.
        masked_layers, layers: of the model.
        requested_share: of a masked layer's neurons, requested by a token; None without masks.
        break_even_share: of a layer's neurons, above which reading it whole is as fast as reading its rows;
            None where nothing is read by rows.
        device_gb_per_s: of reads of one row, by the curve of ``flashd doctor``; None without one.
        row_gb_per_s: of a batch of scattered rows, measured now; None where nothing is read by rows.
        stream_gb_per_s: of whole layers, measured now; None where nothing is read.
        compute_share: speed of computing beside reads, of its own; flash_share: of reads beside computing.
        advice: in words.
        notes: what one should know.
    """

    directory: str
    model: str
    synthetic: bool
    memory: str
    all_weights_bytes: int
    least_memory: str
    available_bytes: int
    context_tokens: int
    parts: MemoryParts | None
    chosen: PlanRow
    rows: list[PlanRow]
    masked_layers: int
    layers: int
    requested_share: float | None
    break_even_share: float | None
    device_gb_per_s: float | None
    row_gb_per_s: float | None
    stream_gb_per_s: float | None
    compute_share: float
    flash_share: float
    advice: list[str]
    notes: list[str]
