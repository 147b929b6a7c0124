"""Ray Serve's router of the replicas: it asks `replica_choice` which replica a request goes to.

Ray makes one router in each process that holds a handle, from this class, and tells it of replicas
and of their statistics. The class is Ray's alpha API (`ray.serve.request_router`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
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
        # by request: when it was sent, where to, and its tokens; the oldest first
        self._sent: dict[str, tuple[float, str, int]] = {}
        router_link.ROUTER_LINK.states = self.states

    def states(self) -> list[ReplicaState]:
        """The replicas that run. Any thread may call this."""
        sent = list(self._sent.values())
        return [_state_of(replica, sent) for replica in list(self.curr_replicas.values())]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        # If there is no replica for the request, Ray asks again. Without this it would do so at
        # once and for ever, and its event loop would do nothing else.
        pending_request.routing_context.should_backoff = True
        hints: RoutingHints = pending_request.args[0]
        self._forget_old()
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        sent = list(self._sent.values())
        states = [_state_of(replica, sent) for replica in candidate_replicas]
        rule = router_link.ROUTER_LINK.rule
        ordered = order_replicas(hints, states, rule, self._note_failure)
        if ordered:
            self._note_sent(pending_request, ordered[0])
        return [[by_id[each]] for each in ordered]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._note_sent(pending_request, replica_id.unique_id)  # maybe not to the best one

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent.pop(internal_request_id, None)

    def _note_sent(self, pending_request: PendingRequest, replica: str) -> None:
        number, hints = pending_request.metadata.internal_request_id, pending_request.args[0]
        self._sent.pop(number, None)
        self._sent[number] = time.monotonic(), replica, hints.num_tokens

    def _forget_old(self) -> None:
        since_s = time.monotonic() - _STATISTICS_AGE_S
        for number, (sent_s, *_) in list(self._sent.items()):
            if sent_s >= since_s:
                break
            del self._sent[number]

    def _note_failure(self) -> None:
        log.exception("the rule that chooses a replica has failed; the least loaded one is taken")
        router_link.ROUTER_LINK.on_failure()


def _state_of(replica: RunningReplica, sent: Iterable[tuple[float, str, int]]) -> ReplicaState:
    name, statistics = replica.replica_id.unique_id, replica.routing_stats
    return ReplicaState(
        id=name,
        queued_tokens=int(statistics.get(QUEUED_TOKENS, 0)),
        sent_tokens=sum(tokens for _, where, tokens in sent if where == name),
        statistics=statistics,
    )
