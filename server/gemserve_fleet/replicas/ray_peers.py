"""Reaches the other replicas from within one, through Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from ray import serve

from gemserve_fleet.replicas.ray_replicas import as_own_request, ray_failures
from gemserve_fleet.replicas.replica_calls import ReplicaLost
from gemserve_fleet.replicas.replica_choice import RoutingHints
from gemserve_fleet.replicas.router_link import ROUTER_LINK
from gemserve_fleet.replicas.segment_shares import FromPeer, SegmentShare


class RayPeers:
    """See `Peers`. Each replica has a router of its own, which knows all replicas."""

    def __init__(self, own_name: str) -> None:
        self.own_name = own_name
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        # this starts the router, which then learns the replicas' names
        self._shares = handle.options(method_name="read_share", stream=True)

    def names(self) -> Sequence[str]:
        return ROUTER_LINK.names()

    async def read(self, peer: str, share: SegmentShare) -> AsyncGenerator[FromPeer, None]:
        if peer not in self.names():
            raise ReplicaLost(f"replica {peer} does not run any more")
        with ray_failures():
            parts = as_own_request(self._shares.remote, RoutingHints(only=peer), share)
            has_ended = False
            try:
                with suppress(StopAsyncIteration):
                    while True:
                        yield await anext(parts)
                has_ended = True
            finally:
                if not has_ended:
                    parts.cancel()
