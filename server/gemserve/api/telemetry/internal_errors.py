"""Counts errors that the server has caught and logged so that it can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

# request: an unexpected exception, for which the client gets status 500 or a broken stream.
# stream: a streamed reply that could not be built to its end.
# document_warm_up: a stored document's filter pass that could not be followed.
ErrorPlace = Literal["request", "stream", "document_warm_up"]


class InternalErrors(Collector):
    """The API's own counts, and those of the engine, whose places are of another fixed set.

    `read_engine` returns the engine's counts since its start by place.
    """

    def __init__(self, read_engine: Callable[[], Mapping[str, int]]) -> None:
        self._read_engine = read_engine
        self._counts = dict.fromkeys(get_args(ErrorPlace), 0)
        self._lock = threading.Lock()

    def count(self, place: ErrorPlace) -> None:
        """Count one error. Any thread may call this."""
        with self._lock:
            self._counts[place] += 1

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "gemserve_internal_errors", "Errors caught and logged, by where", labels=["where"]
        )
        for where, number in {**self._read_engine(), **self._counts}.items():
            family.add_metric([where], number)
        yield family
