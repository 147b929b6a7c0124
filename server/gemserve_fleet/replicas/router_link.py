"""What an ingress and Ray's router share. Both are in the same process, in different threads.

Ray makes the router and gives nobody a reference. It also pickles the router's whole module by
value, with every object that it names. Only modules are left where they are, so the router must
name this module and not what is in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set

from gemserve_fleet.replicas.replica_choice import OrderReplicas, by_cost
from gemserve_fleet.replicas.replica_reports import QueueReport

_MOST_QUEUES = 1024  # that wait for the router, which takes them with the next request


class RouterLink:
    """`names` is the router's to set, all others are the ingress's.

    `admitted`: the replicas that get requests. The ingress appends to `queues`, and
    the router takes from it.
    """

    def __init__(self) -> None:
        self.rule: OrderReplicas = by_cost
        self.on_failure: Callable[[], None] = lambda: None
        self.admitted: Set[str] = frozenset()
        self.names: Callable[[], Sequence[str]] = list
        self.queues: deque[QueueReport] = deque(maxlen=_MOST_QUEUES)


ROUTER_LINK = RouterLink()
