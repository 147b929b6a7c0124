"""Ray Serve's router of the replicas: it asks `replica_choice` which replica a request goes to.

Ray makes one router in each process that holds a handle, from this class, and tells it of replicas
and of their statistics. The class is Ray's alpha API (`ray.serve.request_router`).
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gemserve_fleet.replicas import (  # modules: see there
    replica_choice,
    replica_reports,
    router_link,
)

log = logging.getLogger("gemserve_fleet.replicas")
STATISTICS_PERIOD_S = 1.0


class TokenRouter(RequestRouter):
    """Orders replicas by a rule. Requests are sent with their `RoutingHints` as first argument."""

    def initialize_state(self, **_: Any) -> None:
        self._reports = replica_reports.ReplicaReports()
        self._sent: dict[str, tuple[str, int]] = {}  # by request: where to, and its number
        router_link.ROUTER_LINK.names = self.names

    def names(self) -> list[str]:
        """The replicas that run. Any thread may call this."""
        return [replica.replica_id.unique_id for replica in list(self.curr_replicas.values())]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        # If there is no replica for the request, Ray asks again. Without this it would do so at
        # once and for ever, and its event loop would do nothing else.
        pending_request.routing_context.should_backoff = True
        self._take_reports()
        hints = pending_request.args[0]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        admitted = {*router_link.ROUTER_LINK.admitted, hints.only}
        known = admitted.intersection(by_name)
        states = [state for state in self._reports.states() if state.name in known]
        rule = router_link.ROUTER_LINK.rule
        ordered = replica_choice.order_replicas(hints, states, rule, self._note_failure)
        if ordered:
            self._note_sent(pending_request, ordered[0])
        return [[by_name[each]] for each in ordered]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._note_sent(pending_request, replica_id.unique_id)  # maybe not to the best one

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        where = self._sent.pop(internal_request_id, None)
        if where is not None:
            self._reports.ended(*where)

    def _take_reports(self) -> None:
        replicas = {each.replica_id.unique_id: each for each in list(self.curr_replicas.values())}
        self._reports.set_replicas(replicas)
        for name, replica in replicas.items():
            self._reports.take(name, replica.routing_stats)
        queues = router_link.ROUTER_LINK.queues
        while queues:
            self._reports.take_queue(queues.popleft())

    def _note_sent(self, pending_request: PendingRequest, replica: str) -> None:
        request, hints = pending_request.metadata.internal_request_id, pending_request.args[0]
        before = self._sent.get(request)
        if hints.only is not None or before == (replica, hints.number):
            return
        if before is not None:
            self._reports.ended(*before)
        states = self._reports.states()
        for state in states:
            if state.name == replica:
                route = replica_choice.route_of(hints, state, states)
                keys = (chunk.key for chunk in hints.chunks)
                self._sent[request] = replica, self._reports.sent(route, hints.number, keys)

    def _note_failure(self) -> None:
        log.exception("the rule that chooses a replica has failed; the least loaded one is taken")
        router_link.ROUTER_LINK.on_failure()
