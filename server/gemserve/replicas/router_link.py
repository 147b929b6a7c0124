"""What an ingress and Ray's router share. Both are in the same process, in different threads.

Ray makes the router and gives nobody a reference. It also pickles the router's whole module by
value, with every object that it names. Only modules are left where they are, so the router must
name this module and not what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gemserve.replicas.replica_choice import OrderReplicas, ReplicaState, least_loaded


class RouterLink:
    """`rule` and `on_failure` are the ingress's to set, `states` is the router's."""

    def __init__(self) -> None:
        self.rule: OrderReplicas = least_loaded
        self.on_failure: Callable[[], None] = lambda: None
        self.states: Callable[[], Sequence[ReplicaState]] = list


ROUTER_LINK = RouterLink()
