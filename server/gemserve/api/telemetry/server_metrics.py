"""Prometheus metrics with vLLM's names and our prefix. Label values come from fixed sets."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.api.telemetry.cache_metrics import CacheCollector
from gemserve.api.telemetry.internal_errors import InternalErrors
from gemserve.api.telemetry.loop_watch import LoopWatch
from gemserve.contract.events import (
    Event,
    Filtered,
    Finished,
    FinishReason,
    SegmentsRead,
    TextDelta,
)
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.engine.worker import Engine
from gemserve_kernels import Backend

_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0),
)
_BYTES = tuple(float(1 << power) for power in range(16, 40, 2))
_SHARES = tuple(tenth / 10 for tenth in range(1, 11))
_KEPT_SHARES = tuple(1 / (1 << power) for power in range(8, -1, -1))
_TOKENS = tuple(float(1 << power) for power in range(21))


class Metrics:
    """The metrics of one server, which has its own registry."""

    def __init__(
        self, engine: Engine, adapters: AdapterStore, model_name: str, backend: Backend
    ) -> None:
        self._registry = CollectorRegistry()
        self.rejections = self._counter(
            "admission_rejections", "Requests refused before they ran", ["reason"]
        )
        self.http_responses = self._counter("http_responses", "Replies to any path", ["status"])
        self._success = self._counter("request_success", "Requests ended", ["finish_reason"])
        for reason in get_args(FinishReason):  # else a rate would miss the first one
            self._success.labels(reason)
        self.rejections.labels("queue_full")
        self._with_adapter = self._counter("adapter_requests", "Requests that name an adapter")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens received")
        self._kept = self._counter("kept_prompt_tokens", "Prompt tokens left after filtering")
        self._cached = self._counter(
            "cached_prompt_tokens", "Prompt tokens that were found in the document cache"
        )
        self._segments = self._counter(
            "windows", "Windows of documents, by where their keys came from", ["source"]
        )
        for source in ("read", "cache"):
            self._segments.labels(source)
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._proposed = self._counter(
            "proposed_tokens",
            "Tokens that prompt-lookup decoding has tried, by whether they came",
            ["outcome"],
        )
        for outcome in ("accepted", "rejected"):
            self._proposed.labels(outcome)
        self._ttft = self._seconds("time_to_first_token", "From arrival to first token")
        self._itl = self._seconds("inter_token_latency", "Between consecutive tokens")
        self._e2e = self._seconds("e2e_request_latency", "From arrival to last token")
        self._queue = self._seconds("request_queue_time", "From arrival to start")
        self._inference = self._seconds("request_inference_time", "From start to last token")
        self._per_token = self._seconds(
            "request_time_per_output_token", "One request's tokens after its first, on average"
        )
        self._filter = self._seconds("filter_time", "Filter pass and selection")
        self._prefill = self._seconds("request_prefill_time", "From selection to first token")
        self._decode = self._seconds("request_decode_time", "From first token to last")
        self._kv = self._histogram(
            "request_kv_cache_bytes",
            "KV cache of one request: at its peak, and while decoding",
            _BYTES,
            ["stage"],
        )
        self._prompt_lengths = self._histogram("request_prompt_tokens", "Of one prompt", _TOKENS)
        self._answer_lengths = self._histogram(
            "request_generation_tokens", "Of one answer", _TOKENS
        )
        self._outcomes = self._counter(
            "filter_requests", "Prompts, by what became of their filter", ["method", "outcome"]
        )
        self._coverage = self._histogram(
            "filter_coverage",
            "How focused attention is: the share that the best sixteenth of a document gets",
            _SHARES,
        )
        self._kept_shares = self._histogram(
            "filter_kept_ratio", "Share of a filtered prompt that was kept", _KEPT_SHARES
        )
        self._gauge("engine_up", "0 if the engine is dead", lambda: engine.death is None)
        self._gauge(
            "calibrating",
            "1 while the model is calibrated between requests (--calibrate later)",
            lambda: engine.has_idle_work,
        )
        self._gauge("num_requests_running", "Requests running", lambda: engine.num_running)
        self._gauge("num_requests_waiting", "Requests waiting", lambda: engine.num_waiting)
        self._gauge("kv_cache_usage_ratio", "KV memory in use", lambda: engine.kv_usage_ratio)
        self._gauge(
            "document_cache_usage_ratio",
            "KV memory that holds documents for further questions",
            lambda: engine.cache_usage_ratio,
        )
        self._gauge("adapters_loaded", "Adapters in memory", lambda: adapters.num_loaded)
        self._gauge(
            "adapter_memory_bytes", "Of adapters loaded or in use", lambda: adapters.num_bytes
        )
        self._gauge("event_loop_tasks", "Tasks of the event loop, this scrape's too", _num_tasks)
        self.loop_watch = LoopWatch()
        self._gauge(
            "event_loop_longest_stall_seconds",
            "For how long the event loop was held up at most, since the last scrape",
            self.loop_watch.take_longest_s,
        )
        self._gauge("process_peak_memory_bytes", "Most resident memory so far", _peak_rss_bytes)
        ProcessCollector(registry=self._registry)
        self._registry.register(CacheCollector(lambda: engine.cache_state))
        self.internal_errors = InternalErrors(lambda: engine.internal_errors)
        self._registry.register(self.internal_errors)
        self._gpu_gauges()
        info = Gauge(
            "gemserve_model_info",
            "The served model, and what its operations run on",
            ["model", "attention_backend", "kernels"],
            registry=self._registry,
        )
        info.labels(model_name, backend.name, backend.kernels).set(1)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def observer(self, request: Request, arrived_s: float) -> RequestObserver:
        if request.adapter is not None:
            self._with_adapter.inc()
        return RequestObserver(self, arrived_s, len(request.prompt_ids))

    def count_filter(self, report: FilterReport) -> None:
        """Count the outcome of filtering one prompt."""
        self._outcomes.labels(report.method, report.reason or "applied").inc()
        if report.applied:
            self._kept_shares.observe(report.kept_tokens / max(1, report.prompt_tokens))
        if report.windows is not None:
            self.count_segments(report.windows, report.cached_windows or 0)
        if report.coverage is not None:
            self._coverage.observe(report.coverage)

    def count_segments(self, count: int, num_cached: int) -> None:
        self._segments.labels("cache").inc(num_cached)
        self._segments.labels("read").inc(count - num_cached)

    def lent_segments(self) -> Counter:
        """A counter that only a server with replicas has."""
        return self._counter(
            "lent_windows", "Windows that other replicas were to read, by outcome", ["outcome"]
        )

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"gemserve_{name}", text, labels or [], registry=self._registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text, _SECONDS)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"gemserve_{name}", text, labels, buckets=buckets, registry=self._registry)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(f"gemserve_{name}", text, registry=self._registry).set_function(read)

    def _gpu_gauges(self) -> None:
        import torch

        if torch.cuda.is_available():
            self._gauge("gpu_memory_allocated_bytes", "In tensors", torch.cuda.memory_allocated)
            self._gauge("gpu_memory_reserved_bytes", "By the allocator", torch.cuda.memory_reserved)
            self._gauge("gpu_memory_peak_bytes", "Peak", torch.cuda.max_memory_allocated)


class RequestObserver:
    """Turns the events of one request into metrics, and counts its end exactly once."""

    def __init__(self, metrics: Metrics, arrived_s: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrived_s = arrived_s
        self._started_s = arrived_s
        self._filtered_s = arrived_s
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._is_counted = False

    def see(self, event: Event) -> None:
        m = self._metrics
        if isinstance(event, Filtered):
            self._started_s, self._filtered_s = event.started_s, event.filtered_s
            m._queue.observe(event.started_s - self._arrived_s)
            m._prompt.inc(event.report.prompt_tokens)
            m._prompt_lengths.observe(event.report.prompt_tokens)
            m._kept.inc(event.report.kept_tokens)
            m._cached.inc(event.report.cached_tokens)
            if event.report.filter_ms:
                m._filter.observe(event.filtered_s - event.started_s)
            m.count_filter(event.report)
        elif isinstance(event, TextDelta) and event.token_ids:
            m._generated.inc(len(event.token_ids))
            if self._first_s is None:
                self._first_s = event.drawn_s
                m._ttft.observe(event.drawn_s - self._arrived_s)
                m._prefill.observe(event.drawn_s - self._filtered_s)
            else:
                m._itl.observe(event.drawn_s - self._last_s)
            self._last_s = event.drawn_s
        elif isinstance(event, Finished) and event.late == "not_begun":
            self._is_counted = True  # as a refusal, which the engine is not at fault for
        elif isinstance(event, Finished):
            if event.segments_read is not None:
                self._see_read(event.segments_read)
            if self._first_s is not None:
                m._decode.observe(self._last_s - self._first_s)
                m._e2e.observe(self._last_s - self._arrived_s)
                m._inference.observe(self._last_s - self._started_s)
                m._answer_lengths.observe(event.completion_tokens)
                if event.completion_tokens > 1:
                    mean_s = (self._last_s - self._first_s) / (event.completion_tokens - 1)
                    m._per_token.observe(mean_s)
            if event.proposed_tokens:
                rejected = event.proposed_tokens - event.accepted_tokens
                m._proposed.labels("accepted").inc(event.accepted_tokens)
                m._proposed.labels("rejected").inc(rejected)
            if event.peak_kv_bytes:
                m._kv.labels("peak").observe(event.peak_kv_bytes)
                m._kv.labels("decode").observe(event.decode_kv_bytes)
            self._count(event.reason)

    def _see_read(self, read: SegmentsRead) -> None:
        """Documents were read to be ranked, and not for an answer."""
        m = self._metrics
        m._prompt.inc(self._prompt_tokens)
        m._prompt_lengths.observe(self._prompt_tokens)
        m._cached.inc(read.cached_tokens)
        m.count_segments(len(read.summaries), read.num_cached)

    def close(self) -> None:
        """The reader has stopped: without a terminal event until now, the request was aborted."""
        self._count("abort")

    def _count(self, reason: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self._metrics._success.labels(reason).inc()


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # whoever reads is not on the event loop
        return 0


def _peak_rss_bytes() -> float:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
