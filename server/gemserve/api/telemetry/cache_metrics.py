"""Prometheus metrics of the document cache, which the engine's worker counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gemserve.engine.cache.state import CacheState


class CacheCollector(Collector):
    """Reads the counts when they are asked for."""

    def __init__(self, read: Callable[[], CacheState]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        state = self._read()
        counts, disk = state.counts, state.disk
        for name, text, value in (
            ("queries", "Passes over prompts that looked for a document", counts.queries),
            ("query_tokens", "Tokens of these passes", counts.query_tokens),
            ("evictions", "Documents that gave way to others", counts.evictions),
            (
                "evicted_idle_seconds",
                "How long these documents had not been used, in all",
                counts.evicted_idle_s,
            ),
            ("disk_writes", "Documents written to disk", disk.writes),
        ):
            yield CounterMetricFamily(f"gemserve_document_cache_{name}", text, value=value)
        hits = CounterMetricFamily(
            "gemserve_document_cache_hits", "Passes that found one", labels=["tier"]
        )
        hits.add_metric(["memory"], counts.hits)
        hits.add_metric(["disk"], disk.hits)
        tokens = CounterMetricFamily(
            "gemserve_document_cache_hit_tokens", "Tokens found", labels=["tier"]
        )
        tokens.add_metric(["memory"], counts.hit_tokens)
        tokens.add_metric(["disk"], disk.hit_tokens)
        held = GaugeMetricFamily(
            "gemserve_document_cache_bytes", "Bytes of documents", labels=["tier"]
        )
        held.add_metric(["memory"], state.memory_bytes)
        held.add_metric(["disk"], state.disk_bytes)
        yield from (hits, tokens, held)
        yield GaugeMetricFamily(
            "gemserve_document_cache_pinned_bytes",
            "Bytes in memory that are pinned",
            value=state.pinned_bytes,
        )
        oldest_s = state.oldest_s
        yield GaugeMetricFamily(
            "gemserve_document_cache_oldest_seconds",
            "How long the document that was used longest ago has not been used",
            value=0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s),
        )
