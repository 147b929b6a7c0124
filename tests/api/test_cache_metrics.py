"""Metrics of the document cache."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest

from gemserve.api.telemetry.cache_metrics import CacheCollector
from gemserve.engine.cache.state import CacheCounts, CacheState, DiskCounts


def test_all_counts_are_exported() -> None:
    state = CacheState(
        counts=CacheCounts(
            queries=9, hits=4, query_tokens=900, hit_tokens=400, evictions=2, evicted_idle_s=7.5
        ),
        disk=DiskCounts(hits=3, hit_tokens=300, writes=5),
        memory_bytes=1000,
        pinned_bytes=100,
        disk_bytes=5000,
        oldest_s=time.monotonic() - 60,
    )
    registry = CollectorRegistry()
    registry.register(CacheCollector(lambda: state))
    lines = generate_latest(registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    prefix = "gemserve_document_cache_"
    assert 60 <= float(values.pop(prefix + "oldest_seconds")) < 120
    assert {name.removeprefix(prefix): float(value) for name, value in values.items()} == {
        "queries_total": 9,
        "query_tokens_total": 900,
        "evictions_total": 2,
        "evicted_idle_seconds_total": 7.5,
        "disk_writes_total": 5,
        'hits_total{tier="memory"}': 4,
        'hits_total{tier="disk"}': 3,
        'hit_tokens_total{tier="memory"}': 400,
        'hit_tokens_total{tier="disk"}': 300,
        'bytes{tier="memory"}': 1000,
        'bytes{tier="disk"}': 5000,
        "pinned_bytes": 100,
    }
