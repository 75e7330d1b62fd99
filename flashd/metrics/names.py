"""The one table of metric names. Request-level names mirror vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A metric family; counters are listed without their ``_total`` suffix."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("flashd_build", "info", "Version, kernels and SIMD level of this daemon."),
        Metric("flashd_model", "info", "The model that is served and how its weights are read."),
        Metric("flashd_prompt_tokens", "counter", "Prompt tokens computed."),
        Metric("flashd_generation_tokens", "counter", "Tokens generated."),
        Metric("flashd_request_success", "counter", "Requests ended, by reason.", ("finished_reason",)),
        Metric("flashd_requests_rejected", "counter", "Requests answered with an error, by code.", ("code",)),
        Metric("flashd_num_requests_running", "gauge", "Sequences being prefilled or decoded."),
        Metric("flashd_num_requests_waiting", "gauge", "Requests in the queue."),
        Metric("flashd_kv_cache_bytes", "gauge", "Bytes reserved for the KV caches of running sequences."),
        Metric("flashd_resident_weight_bytes", "gauge", "Bytes of weights that stay in RAM."),
        Metric("flashd_time_to_first_token_seconds", "histogram", "From request to first token."),
        Metric("flashd_inter_token_latency_seconds", "histogram", "Between two tokens of a sequence."),
        Metric("flashd_e2e_request_latency_seconds", "histogram", "From request to last token."),
        Metric("flashd_request_queue_time_seconds", "histogram", "From request to admission."),
        Metric("flashd_step_seconds", "histogram", "Whole step of the engine.", ("phase",)),
        Metric("flashd_step_flash_wait_seconds", "histogram", "Step: compute waiting for flash.", ("phase",)),
        Metric(
            "flashd_step_flash_busy_seconds",
            "histogram",
            "Step: time with at least one read outstanding (runs beside the other costs).",
            ("phase",),
        ),
        Metric("flashd_step_memory_seconds", "histogram", "Step: window and KV upkeep.", ("phase",)),
        Metric("flashd_step_compute_seconds", "histogram", "Step: kernels.", ("phase",)),
        Metric("flashd_step_overhead_seconds", "histogram", "Step: everything else.", ("phase",)),
        Metric(
            "flashd_flash_reads",
            "counter",
            "Reads of FFN weights that the kernel answered, continued and retried ones included.",
        ),
        Metric(
            "flashd_flash_read_bytes",
            "counter",
            "Bytes that these reads delivered, those for alignment and over-read gaps included.",
        ),
        Metric("flashd_flash_delivered_bytes", "counter", "Bytes of FFN rows handed to the computation."),
        Metric("flashd_flash_continued_reads", "counter", "Reads that came short and went on."),
        Metric("flashd_flash_retried_reads", "counter", "Reads that failed with EIO and were tried again."),
        Metric("flashd_flash_scratch_reads", "counter", "Reads through scratch memory: not aligned."),
        Metric("flashd_flash_registered_reads", "counter", "Reads into registered memory."),
        Metric("flashd_flash_dropped_reads", "counter", "Reads given up before the kernel saw them."),
        Metric("flashd_flash_read_errors", "counter", "Batches of reads of FFN weights that failed."),
        Metric("flashd_flash_busy_seconds", "counter", "Time with at least one read outstanding."),
        Metric("flashd_flash_rows", "counter", "FFN rows delivered, checked or not."),
        Metric("flashd_flash_checked_rows", "counter", "FFN rows compared with their checksums."),
        Metric("flashd_flash_mismatched_rows", "counter", "FFN rows that differed from their checksums."),
        Metric("flashd_flash_mismatch_rereads", "counter", "Batches read again because a row differed."),
        Metric("flashd_flash_check_seconds", "counter", "CPU time spent on checksums."),
        Metric("flashd_neurons_requested", "counter", "Neurons asked for by predictors while decoding."),
        Metric("flashd_neurons_resident", "counter", "Of these, neurons in RAM or on their way there."),
        Metric("flashd_neurons_read", "counter", "Neurons read because a step needed them."),
        Metric("flashd_neurons_prefetched", "counter", "Neurons read ahead on a guess."),
        Metric("flashd_neurons_prefetched_used", "counter", "Of these, neurons that a step asked for later."),
        Metric("flashd_neurons_fired", "counter", "Neurons whose activation was not zero."),
        Metric("flashd_neurons_evicted", "counter", "Neurons that left RAM."),
        Metric("flashd_window_neurons", "gauge", "Neurons that are in RAM."),
        Metric("flashd_prefetch_layers", "gauge", "Layers that are read ahead."),
        Metric("flashd_memory_available_bytes", "gauge", "Memory that the daemon could still take."),
        Metric("flashd_memory_limit_bytes", "gauge", "What the daemon may take in all at present."),
        Metric("flashd_memory_reserve_bytes", "gauge", "Available memory that is left to others."),
        Metric("flashd_memory_footprint_bytes", "gauge", "The daemon's own memory: RssAnon and RssShmem."),
        Metric("flashd_memory_weights_bytes", "gauge", "Of it, weights, buffers and window."),
        Metric("flashd_memory_window_bytes", "gauge", "Pages of the window of neurons."),
        Metric("flashd_memory_kv_promised_bytes", "gauge", "KV caches that sequences may come to need."),
        Metric("flashd_memory_kv_counted_bytes", "gauge", "KV caches that memory is set aside for."),
        Metric("flashd_memory_stalled_ratio", "gauge", "Share of time that somebody waited for it (PSI)."),
        Metric("flashd_memory_admission_paused", "gauge", "1 while a request waits for memory."),
        Metric("flashd_memory_wake_ups", "counter", "Looks at memory that the kernel asked for."),
        Metric(
            "flashd_memory_changes",
            "counter",
            "Changes of what weights may take.",
            ("direction", "reason"),
        ),
        Metric("flashd_window_steps", "gauge", "k: steps whose requests fit into the window."),
        Metric("flashd_window_capacity_neurons", "gauge", "Neurons that the window has room for."),
        Metric("flashd_window_changes", "counter", "Changes of k."),
        Metric("flashd_dense_layers_resident", "gauge", "Layers without a mask that are in RAM."),
        Metric("flashd_process_resident_memory_bytes", "gauge", "RSS of the daemon."),
        Metric("flashd_process_open_fds", "gauge", "Open file descriptors."),
        Metric("flashd_process_start_time_seconds", "gauge", "Start of the daemon, Unix time."),
    )
}
