"""What a router knows of its replicas: their reports, and what it has sent there since. No Ray.

A report is older than the router's last choice. So the router adds the work of each request
that it sends to a replica's queue, and takes it back when a report counts that request. It believes
of a cache only what the replica has said, and that it will have what it is reading now: until a
request ends, others with the same text may follow it.

Everything here belongs to one event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gemserve_fleet.replicas.cached_chunks import split_keys
from gemserve_fleet.replicas.routing import (
    UNKNOWN_READING,
    ModelReading,
    ReplicaState,
    Route,
    TokenCosts,
)

# A request that so many periodic reports have not counted was lost on its way.
_MOST_REPORTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """What waits at a replica: sent with each whole answer, so that the next choice knows of it.

    `number`: of the replica's reports of any kind. `last_received`: see `ReplicaReports.reported`.
    """

    replica: str
    number: int
    queued_tokens: float
    last_received: int


@dataclass(slots=True)
class _Sent:
    """A request that the replica has not counted yet. `reports`: those that did not."""

    work_tokens: float
    reports: int = 0


@dataclass(frozen=True, slots=True)
class _HeldOrComing:
    """The keys of chunks that a replica has, or is about to read."""

    held: Container[bytes]
    coming: Mapping[bytes, int]

    def __contains__(self, key: object) -> bool:
        return key in self.held or key in self.coming


@dataclass(slots=True)
class _Replica:
    queued_tokens: float = 0.0  # as it was last reported
    is_healthy: bool = True
    is_draining: bool = False
    cached: set[bytes] = field(default_factory=set)
    last_event: int | None = None  # None: events are missing, and a list is needed
    sent: dict[int, _Sent] = field(default_factory=dict)
    under_way: dict[int, frozenset[bytes]] = field(default_factory=dict)  # keys, by the request
    coming: Counter[bytes] = field(default_factory=Counter)  # requests under way, by the key
    model: ModelReading = UNKNOWN_READING
    last_report: int | None = None
    last_queue: int = 0  # the number of the report that `queued_tokens` is from
    keys: bytes = b""


class ReplicaReports:
    """Keeps one state for each replica that the fleet has now."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._num_sent = 0

    def set_replicas(self, names: Iterable[str]) -> None:
        """Take new replicas as idle and empty until they report. Forget those that are gone."""
        self._replicas = {name: self._replicas.get(name, _Replica()) for name in names}

    def states(self) -> list[ReplicaState]:
        """All replicas, with what was sent to them since they reported."""
        return [
            ReplicaState(
                name=name,
                queued_tokens=one.queued_tokens
                + sum(sent.work_tokens for sent in one.sent.values()),
                cached=_HeldOrComing(one.cached, one.coming if one.model.has_cache else {}),
                is_healthy=one.is_healthy,
                is_draining=one.is_draining,
                model=one.model,
            )
            for name, one in self._replicas.items()
        ]

    def sent(self, route: Route, number: int | None = None, keys: Iterable[bytes] = ()) -> int:
        """Note that a request goes there. Return its number, which goes with it.

        `number`: if the request has one already, from whoever numbers them in their order. `keys`:
        of the chunks of its text.
        """
        self._num_sent = self._num_sent + 1 if number is None else number
        one = self._replicas.get(route.name)
        if one is not None:
            one.sent[self._num_sent] = _Sent(route.work_tokens)
            one.under_way[self._num_sent] = frozenset(keys)
            one.coming.update(one.under_way[self._num_sent])
        return self._num_sent

    def ended(self, name: str, number: int) -> None:
        """Take back a request that has ended, or did not reach the replica. Idempotent."""
        one = self._replicas.get(name)
        if one is None:
            return
        one.sent.pop(number, None)
        for key in one.under_way.pop(number, ()):
            one.coming[key] -= 1
            if not one.coming[key]:
                del one.coming[key]

    def reported(
        self,
        name: str,
        *,
        queued_tokens: float,
        last_received: int | None,
        is_healthy: bool = True,
        is_draining: bool = False,
        is_periodic: bool = True,
    ) -> None:
        """Take a replica's report in place of the earlier one.

        `last_received`: the largest of this router's numbers that the replica had received when it
        counted; None if it does not count them: then all that was sent counts as received.
        `is_periodic`: it was due. Others may come so fast that they say nothing of what is lost.
        """
        one = self._replicas.get(name)
        if one is None:
            return
        one.queued_tokens = queued_tokens
        one.is_healthy, one.is_draining = is_healthy, is_draining
        for number, sent in list(one.sent.items()):
            sent.reports += is_periodic
            is_counted = last_received is None or number <= last_received
            if is_counted or sent.reports >= _MOST_REPORTS:
                del one.sent[number]

    def take(self, name: str, statistics: Mapping[str, Any]) -> None:
        """Take what `report_of` has made, once for each report. Nothing at all counts as none."""
        one = self._replicas.get(name)
        if one is None or not statistics or statistics["report"] == one.last_report:
            return
        model = statistics["model"]
        one.last_report = statistics["report"]
        one.model = ModelReading(**{**model, "costs": TokenCosts(**model["costs"])})
        self.take_queue(
            QueueReport(
                replica=name,
                number=statistics["report"],
                queued_tokens=statistics["queued_tokens"],
                last_received=statistics["last_received"],
            ),
            is_periodic=True,
        )
        if statistics["cached"] != one.keys:
            one.keys = statistics["cached"]
            self.cache_listed(name, one.last_report or 0, split_keys(one.keys))

    def take_queue(self, report: QueueReport, *, is_periodic: bool = False) -> None:
        """Take a report of a queue, unless a later one has come before it."""
        one = self._replicas.get(report.replica)
        if one is None or report.number <= one.last_queue:
            return
        one.last_queue = report.number
        self.reported(
            report.replica,
            queued_tokens=report.queued_tokens,
            last_received=report.last_received,
            is_periodic=is_periodic,
        )

    def cache_listed(self, name: str, event: int, keys: Iterable[bytes]) -> None:
        """Take `keys` as all chunks that the replica has. Changes go on behind number `event`."""
        one = self._replicas.get(name)
        if one is not None:
            one.cached, one.last_event = set(keys), event

    def cache_changed(
        self, name: str, event: int, *, stored: Iterable[bytes] = (), dropped: Iterable[bytes] = ()
    ) -> bool:
        """Take one change of the replica's cache. Changes are numbered one by one.

        False: numbers are missing, as after a restart. Nothing counts as cached there until
        `cache_listed`.
        """
        one = self._replicas.get(name)
        if one is None:
            return False
        if one.last_event is None or event != one.last_event + 1:
            one.cached, one.last_event = set(), None
            return False
        one.last_event = event
        one.cached.update(stored)
        one.cached.difference_update(dropped)
        return True


def report_of(
    number: int, *, queued_tokens: float, last_received: int, cached: bytes, model: ModelReading
) -> dict[str, Any]:
    """What a replica reports. `number`: of the report. `cached`: all keys, joined.

    It has the whole list, because Ray passes on the latest report, and may leave out others.
    """
    return {
        "report": number,
        "queued_tokens": queued_tokens,
        "last_received": last_received,
        "cached": cached,
        "model": asdict(model),  # plain data: Ray's controller passes it on
    }
