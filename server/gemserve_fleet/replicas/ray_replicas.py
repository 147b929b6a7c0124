"""Reaches replicas through Ray Serve, and turns its failures into those that the ingress knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from gemserve.errors import ReplicaUnavailable
from gemserve_fleet.replicas.messages import FromReplica, RelayedRequest
from gemserve_fleet.replicas.replica_calls import CALL_TIMEOUT_S, ReplicaFailed, ReplicaLost
from gemserve_fleet.replicas.replica_choice import RoutingHints
from gemserve_fleet.replicas.replica_reports import QueueReport
from gemserve_fleet.replicas.router_link import ROUTER_LINK

# In which a replica takes a request. Ray itself would wait for ever where no replica can.
_ACCEPT_TIMEOUT_S = 60.0


class RayReplicas:
    """The replicas behind a handle of Ray Serve. See `Replicas`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._answers = handle.options(method_name="answer", stream=True)
        self._calls = handle.options(method_name="call")

    def names(self) -> Sequence[str]:
        return ROUTER_LINK.names()

    def admit(self, names: Set[str]) -> None:
        ROUTER_LINK.admitted = names

    async def answer(
        self, hints: RoutingHints, request: RelayedRequest
    ) -> AsyncGenerator[list[FromReplica], None]:
        with ray_failures():
            batches = as_own_request(self._answers.remote, hints, request)
            has_ended = False
            try:
                async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                    batch = await anext(batches)
                while True:
                    if isinstance(batch, QueueReport):
                        ROUTER_LINK.queues.append(batch)
                    else:
                        yield batch
                    batch = await anext(batches)
            except StopAsyncIteration:
                has_ended = True
            except TimeoutError:
                text = f"No replica has taken the request within {_ACCEPT_TIMEOUT_S:g} s."
                raise ReplicaUnavailable(text, code="no_replica") from None
            finally:
                if not has_ended:
                    batches.cancel()

    async def call(
        self, replica: str, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        if replica not in self.names():
            raise ReplicaLost(f"replica {replica} does not run any more")
        with ray_failures():
            reply = as_own_request(
                self._calls.remote, RoutingHints(only=replica), method, *arguments
            )
            try:
                async with asyncio.timeout(timeout_s):
                    return await reply
            except TimeoutError:
                text = f"replica {replica} has not answered within {timeout_s:g} s"
                raise ReplicaLost(text) from None
            finally:
                reply.cancel()


def as_own_request(send: Callable[..., Any], *arguments: Any) -> Any:
    """Call `send` outside of the request that Ray believes us to answer.

    In an ingress that Ray Serve runs, all calls of one HTTP request would have its id. Ray's router
    finds waiting calls by their id, so of two at once only one would ever be sent.
    """
    return Context().run(send, *arguments)


@contextmanager
def ray_failures() -> Iterator[None]:
    """Raise what the ingress knows instead of Ray's exceptions."""
    try:
        yield
    except BackPressureError as error:
        raise ReplicaUnavailable("All replicas are busy.", code="queue_full") from error
    except RayTaskError as error:  # a subclass of RayError, raised by the application
        raise ReplicaFailed(str(error)) from error
    except (RayActorError, TaskCancelledError, RayError) as error:
        raise ReplicaLost(_first_line(error)) from error
    except RayServeException as error:
        raise ReplicaUnavailable(_first_line(error), code="no_replica") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
