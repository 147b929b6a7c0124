"""Ray Serve's router of the replicas: it asks `replica_choice` which replica a request goes to.

Ray makes one router in each process that holds a handle, from this class, and tells it of replicas
and of their statistics. The class is Ray's alpha API (`ray.serve.request_router`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from gemserve.replicas import router_link  # the module: see there
from gemserve.replicas.replica_choice import ReplicaState, RoutingHints, order_replicas

log = logging.getLogger("gemserve.replicas")
STATISTICS_PERIOD_S = 1.0
# Statistics are as old as this at most. What was sent before is in them already.
_STATISTICS_AGE_S = 2 * STATISTICS_PERIOD_S
QUEUED_TOKENS = "queued_tokens"


class TokenRouter(RequestRouter):
    """Orders replicas by a rule. Requests are sent with their `RoutingHints` as first argument."""

    def initialize_state(self, **_: Any) -> None:
        # by replica and request, when it was sent and its tokens
        self._sent: dict[str, dict[str, tuple[float, int]]] = {}
        router_link.ROUTER_LINK.states = self.states

    def states(self) -> list[ReplicaState]:
        """The replicas that run. Any thread may call this."""
        return [self._state_of(replica) for replica in list(self.curr_replicas.values())]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        hints = RoutingHints()
        if pending_request is not None and pending_request.args:
            hints = pending_request.args[0]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        states = [self._state_of(replica) for replica in candidate_replicas]
        ordered = order_replicas(hints, states, router_link.ROUTER_LINK.rule, self._note_failure)
        return [[by_id[each]] for each in ordered]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        hints, number = pending_request.args[0], pending_request.metadata.internal_request_id
        sent = self._sent.setdefault(replica_id.unique_id, {})
        sent[number] = time.monotonic(), hints.num_tokens

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        running = {each.unique_id for each in self.curr_replicas}
        self._sent = {each: sent for each, sent in self._sent.items() if each in running}
        self._sent.get(replica_id.unique_id, {}).pop(internal_request_id, None)

    def _state_of(self, replica: RunningReplica) -> ReplicaState:
        name, statistics = replica.replica_id.unique_id, replica.routing_stats
        since_s = time.monotonic() - _STATISTICS_AGE_S
        sent = list(self._sent.get(name, {}).values())
        return ReplicaState(
            id=name,
            queued_tokens=int(statistics.get(QUEUED_TOKENS, 0)),
            sent_tokens=sum(tokens for sent_s, tokens in sent if sent_s >= since_s),
            statistics=statistics,
        )

    def _note_failure(self) -> None:
        log.exception("the rule that chooses a replica has failed; the least loaded one is taken")
        router_link.ROUTER_LINK.on_failure()
