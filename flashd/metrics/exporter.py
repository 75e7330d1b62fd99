"""Prometheus text from the rooms' plain counters; nothing else imports prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from flashd.metrics.names import METRICS
from flashd.stats import EngineStats, Histogram, MemoryStats, ServerStats, SparseStats, StoreStats

__all__ = ["CONTENT_TYPE", "Exporter", "ModelView"]

_COSTS = ("step", "flash_wait", "flash_busy", "memory", "compute", "overhead")
Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True)
class ModelView:
    """What the exporter reads of a loaded model."""

    engine: EngineStats
    store: StoreStats
    sparse: SparseStats
    memory: MemoryStats
    resident_bytes: int
    info: dict[str, str]


class Exporter(Collector):
    """All metrics of one daemon, in a registry of its own.

    Args:
        server: counters of the HTTP side.
        build: label values of ``flashd_build_info``.
    """

    def __init__(self, server: ServerStats, build: Callable[[], dict[str, str]]) -> None:
        self._server = server
        self._build = build
        self._model: ModelView | None = None
        self._process = psutil.Process()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def attach(self, model: ModelView) -> None:
        """Export a model's counters from now on."""
        self._model = model

    def text(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: registration must not run ``collect``."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One family per line of the table; samples are taken now."""
        yield _info("flashd_build", self._build())
        yield _counter("flashd_requests_rejected", _labelled(self._server.rejected))
        with self._process.oneshot():
            yield _gauge("flashd_process_resident_memory_bytes", self._process.memory_info().rss)
            yield _gauge("flashd_process_open_fds", self._process.num_fds())
            yield _gauge("flashd_process_start_time_seconds", self._process.create_time())
        if self._model is not None:
            yield _info("flashd_model", self._model.info)
            yield _gauge("flashd_resident_weight_bytes", self._model.resident_bytes)
            yield from _engine(self._model.engine)
            yield from _store(self._model.store)
            yield from _sparse(self._model.sparse)
            yield from _memory(self._model.memory)


def _engine(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("flashd_prompt_tokens", [((), stats.prompt_tokens)])
    yield _counter("flashd_generation_tokens", [((), stats.generated_tokens)])
    yield _counter("flashd_request_success", _labelled(stats.finished))
    yield _gauge("flashd_num_requests_running", stats.running)
    yield _gauge("flashd_num_requests_waiting", stats.waiting)
    yield _gauge("flashd_kv_cache_bytes", stats.kv_bytes)
    for name, histogram in (
        ("flashd_time_to_first_token_seconds", stats.time_to_first_token_s),
        ("flashd_inter_token_latency_seconds", stats.inter_token_latency_s),
        ("flashd_e2e_request_latency_seconds", stats.e2e_latency_s),
        ("flashd_request_queue_time_seconds", stats.queue_time_s),
    ):
        yield _histogram(name, [((), histogram)])
    for cost in _COSTS:
        name = "flashd_step_seconds" if cost == "step" else f"flashd_step_{cost}_seconds"
        per_phase = [((phase,), getattr(costs, f"{cost}_s")) for phase, costs in stats.costs.items()]
        yield _histogram(name, per_phase)


def _store(stats: StoreStats) -> Iterator[Metric]:
    device, checks = stats.device, stats.checks
    for name, value in (
        ("flashd_flash_reads", device.reads),
        ("flashd_flash_read_bytes", device.bytes_read),
        ("flashd_flash_delivered_bytes", stats.bytes_delivered),
        ("flashd_flash_continued_reads", device.continued),
        ("flashd_flash_retried_reads", device.retried),
        ("flashd_flash_scratch_reads", device.scratch_reads),
        ("flashd_flash_registered_reads", device.registered_reads),
        ("flashd_flash_dropped_reads", device.dropped),
        ("flashd_flash_read_errors", stats.errors),
        ("flashd_flash_busy_seconds", stats.busy_ns / 1e9),
        ("flashd_flash_rows", checks.rows),
        ("flashd_flash_checked_rows", checks.checked_rows),
        ("flashd_flash_mismatched_rows", checks.mismatched_rows),
        ("flashd_flash_mismatch_rereads", checks.rereads),
        ("flashd_flash_check_seconds", checks.check_ns / 1e9),
    ):
        yield _counter(name, [((), value)])


def _sparse(stats: SparseStats) -> Iterator[Metric]:
    for name, value in (
        ("flashd_neurons_requested", stats.requested),
        ("flashd_neurons_resident", stats.resident),
        ("flashd_neurons_read", stats.demand),
        ("flashd_neurons_prefetched", stats.prefetched),
        ("flashd_neurons_prefetched_used", stats.prefetched_used),
        ("flashd_neurons_fired", stats.fired),
        ("flashd_neurons_evicted", stats.evicted),
    ):
        yield _counter(name, [((), value)])
    yield _gauge("flashd_window_neurons", stats.window_rows)
    yield _gauge("flashd_prefetch_layers", stats.prefetch_layers)


def _memory(stats: MemoryStats) -> Iterator[Metric]:
    for name, value in (
        ("flashd_memory_available_bytes", stats.available_bytes),
        ("flashd_memory_limit_bytes", stats.limit_bytes),
        ("flashd_memory_reserve_bytes", stats.reserve_bytes),
        ("flashd_memory_footprint_bytes", stats.footprint_bytes),
        ("flashd_memory_weights_bytes", stats.weights_bytes),
        ("flashd_memory_window_bytes", stats.window_bytes),
        ("flashd_memory_kv_promised_bytes", stats.kv_promised_bytes),
        ("flashd_memory_kv_counted_bytes", stats.kv_counted_bytes),
        ("flashd_memory_stalled_ratio", stats.stalled),
        ("flashd_memory_admission_paused", stats.admission_paused),
        ("flashd_window_steps", stats.k),
        ("flashd_window_capacity_neurons", stats.window_capacity),
        ("flashd_dense_layers_resident", stats.dense_layers),
    ):
        yield _gauge(name, value)
    yield _counter("flashd_memory_wake_ups", [((), stats.wake_ups)])
    yield _counter("flashd_window_changes", [((), stats.k_changes)])
    yield _counter("flashd_memory_changes", list(stats.changes.items()))


def _labelled(counts: dict[str, int]) -> list[Sample]:
    return [((label,), count) for label, count in counts.items()]


def _counter(name: str, samples: Iterable[Sample]) -> Metric:
    metric = METRICS[name]
    family = CounterMetricFamily(name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, METRICS[name].help, value=value)


def _info(name: str, values: dict[str, str]) -> Metric:
    return InfoMetricFamily(name, METRICS[name].help, value=values)


def _histogram(name: str, samples: Iterable[tuple[tuple[str, ...], Histogram]]) -> Metric:
    metric = METRICS[name]
    family = HistogramMetricFamily(name, metric.help, labels=metric.labels)
    for labels, histogram in samples:
        running, buckets = 0, []
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), running))
        family.add_metric(labels, buckets, histogram.total)
    return family
