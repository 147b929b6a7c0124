"""How the ingress reaches replicas, and what it is told when it cannot. No Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from typing import Any, Protocol

from gemserve_fleet.replicas.messages import FromReplica, RelayedRequest
from gemserve_fleet.replicas.replica_choice import RoutingHints

CALL_TIMEOUT_S = 10.0


class ReplicaLost(Exception):
    """A replica has died, or does not answer, while it had a request."""


class ReplicaFailed(Exception):
    """A replica's application has raised."""


class Replicas(Protocol):
    """All replicas. They are the same for every process that holds such an object."""

    def names(self) -> Sequence[str]:
        """The replicas that run."""
        ...

    def admit(self, names: Set[str]) -> None:
        """From now on only these get requests. All can be called."""
        ...

    def answer(
        self, hints: RoutingHints, request: RelayedRequest
    ) -> AsyncGenerator[list[FromReplica], None]:
        """See `RelayedApp.answer`.

        Raises `ReplicaLost`, `ReplicaFailed` and `ReplicaUnavailable`.
        """
        ...

    async def call(
        self, replica: str, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Call a method of one replica's `RelayedApp`. Raises `ReplicaLost`, `ReplicaFailed`."""
        ...
