"""Metrics of an ingress, and those of its replicas, each with the label `replica`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gemserve_fleet.replicas.messages import WholeReply


class IngressMetrics:
    """Counts what the ingress does, and joins the metrics of replicas.

    `num_wanted`: the replicas that should take requests.
    """

    def __init__(self, num_wanted: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._refusals = Counter(
            "gemserve_admission_rejections",
            "Requests refused before they ran",
            ["reason", "replica"],
            registry=self._registry,
        )
        self.replies = self._counter("replies", "Replies to any path", ["status"])
        self.errors = self._counter("internal_errors", "Failures of the ingress itself")
        self.retries = self._counter(
            "retries", "Requests sent to another replica, because the first one was lost"
        )
        self.lost = self._counter(
            "lost_requests", "Requests that ended with an error, because a replica was lost"
        )
        self.router_failures = self._counter(
            "router_failures", "Requests that went to the least loaded replica, as a rule failed"
        )
        wanted = Gauge("gemserve_replicas_wanted", "Replicas wanted", registry=self._registry)
        wanted.set_function(num_wanted)
        self._ready = Gauge("gemserve_replicas_ready", "Replicas ready", registry=self._registry)

    def count_replicas(self, num_ready: Callable[[], int]) -> None:
        """`num_ready`: the replicas that take requests now."""
        self._ready.set_function(num_ready)

    def text(self, replies: Sequence[WholeReply]) -> bytes:
        """The ingress's metrics, and those of `replies`, which are of `/metrics` of replicas."""
        families = {family.name: family for family in self._registry.collect()}
        for reply in replies:
            for family in text_string_to_metric_families(reply.body.decode()):
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": reply.replica}
                    joined.samples.append(sample._replace(labels=labels))
        registry = CollectorRegistry()
        registry.register(_Families(list(families.values())))
        return generate_latest(registry)

    def count_refusal(self, code: str) -> None:
        self._refusals.labels(code, "ingress").inc()

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"gemserve_ingress_{name}", text, labels, registry=self._registry)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
