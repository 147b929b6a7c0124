"""The page of metrics: names, types and labels from the registries of a server and an ingress."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from gemserve.api.telemetry.server_metrics import Metrics
from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
from website.reference.example_server import example_server
from website.reference.markdown import NOTE, code, prose, table

INTRODUCTION = """\
# Metrics

What `/metrics` has, from the registries of this release. [Operating a
server](../operations.md#metrics) says what the metrics mean for whoever watches a server, and which
alerts exist. A histogram has the samples `…_bucket`, `…_sum` and `…_count`; of each histogram and
counter there is also `…_created`, the time since which it counts.
"""
GPU = "On a CUDA device there are also {names}: tensors, the allocator's share, and its peak."
TITLES = ("metric", "type", "labels", "what it is")


def write_page() -> str:
    serving, _ = example_server()
    server = Metrics(serving.engine, serving.adapters, serving.model_name, serving.backend)
    ingress = IngressMetrics(lambda: 2)
    ingress.count_replicas(lambda: 2)
    gpu = ("gpu_memory_allocated_bytes", "gpu_memory_reserved_bytes", "gpu_memory_peak_bytes")
    own = dict(families(server._registry))
    more = {name: row for name, row in families(ingress._registry) if name not in own}
    return "\n".join(
        [
            NOTE,
            "",
            INTRODUCTION,
            "## Of a server",
            "",
            *table(TITLES, own.values()),
            "",
            GPU.format(names=", ".join(code(f"gemserve_{name}") for name in gpu)),
            "",
            "## Of an ingress with replicas",
            "",
            "An ingress also has all metrics of its replicas, with the label `replica`.",
            "",
            *table(TITLES, more.values()),
            "",
        ]
    )


def families(registry: CollectorRegistry) -> Iterator[tuple[str, tuple[str, str, str, str]]]:
    """Name and row of each metric. Labels without a sample yet are known to its collector only."""
    labels_of = {
        name: getattr(collector, "_labelnames", ())
        for collector, names in registry._collector_to_names.items()
        for name in names
    }
    for family in registry.collect():
        used = {label for sample in family.samples for label in sample.labels} - {"le"}
        labels = [*labels_of.get(family.name, ())] or sorted(used)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown = ", ".join(code(label) for label in labels)
        yield name, (code(name), family.type, shown, prose(family.documentation))
