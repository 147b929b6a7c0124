"""Metrics of an ingress, and those of its replicas, each with the label `replica`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from gemserve.replicas.messages import WholeReply


class IngressMetrics:
    """`num_ready`: the replicas that take requests now; `num_wanted`: that should."""

    def __init__(self, num_ready: Callable[[], int], num_wanted: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
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
        for state, number in (("ready", num_ready), ("wanted", num_wanted)):
            name, text = f"gemserve_replicas_{state}", f"Replicas {state}"
            Gauge(name, text, registry=self._registry).set_function(number)

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
