"""Replicas in the test's own process, over fake cores, behind the real ingress."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from gemserve.api.app import create_app
from gemserve.api.serving import Serving
from gemserve.replicas.cached_chunks import split_keys
from gemserve.replicas.ingress import Ingress, ReplicaFailed, ReplicaLost, create_ingress
from gemserve.replicas.ingress_metrics import IngressMetrics
from gemserve.replicas.messages import FromReplica, RelayedRequest
from gemserve.replicas.relayed_app import RelayedApp
from gemserve.replicas.replica_choice import RoutingHints, by_cost, order_replicas
from gemserve.replicas.routing import ReplicaState
from tests.fakes import FakeCore, serving_over


@dataclass(eq=False)
class InProcessReplica:
    """`is_lost`: set it, and what is under way ends as if the process had died."""

    name: str
    core: FakeCore
    serving: Serving
    relayed: RelayedApp
    load: int = 0
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: list[str] = field(default_factory=list)  # of the requests that it has had


class InProcessReplicas:
    """All that passes is pickled, as between processes."""

    def __init__(self, replicas: Sequence[InProcessReplica]) -> None:
        self.all = {replica.name: replica for replica in replicas}
        self.failures = 0

    def names(self) -> list[str]:
        return [name for name, replica in self.all.items() if not replica.is_lost.is_set()]

    def states(self) -> list[ReplicaState]:
        running = [self.all[name] for name in self.names()]
        return [
            ReplicaState(
                name=each.name,
                queued_tokens=each.load,
                cached=frozenset(split_keys(each.relayed.cached_keys())),
            )
            for each in running
        ]

    async def answer(
        self, hints: RoutingHints, request: RelayedRequest
    ) -> AsyncGenerator[list[FromReplica], None]:
        ordered = order_replicas(hints, self.states(), by_cost, self._note_failure)
        replica = self.all[ordered[0]]
        replica.numbers.append(request.number)
        answering = replica.relayed.answer(_pickled(request), hints.chunks, hints.prompt_tokens)
        async with aclosing(answering) as batches:
            while True:
                batch = asyncio.ensure_future(anext(batches))
                lost = asyncio.ensure_future(replica.is_lost.wait())
                try:
                    await asyncio.wait({batch, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    lost.cancel()
                    if not batch.done():
                        batch.cancel()
                        with suppress(asyncio.CancelledError):
                            await batch
                if replica.is_lost.is_set():
                    raise ReplicaLost(f"{replica.name} has died")
                try:
                    messages = batch.result()
                except StopAsyncIteration:
                    return
                except Exception as error:
                    raise ReplicaFailed(str(error)) from error
                yield _pickled(messages)

    async def call(self, replica: str, method: str, *arguments: Any) -> Any:
        if self.all[replica].is_lost.is_set():
            raise ReplicaLost(f"{replica} has died")
        result = getattr(self.all[replica].relayed, method)(*_pickled(arguments))
        return _pickled(await result if method == "answer_whole" else result)

    def _note_failure(self) -> None:
        self.failures += 1


def _pickled(something: Any) -> Any:
    return pickle.loads(pickle.dumps(something))


@dataclass(frozen=True, slots=True)
class Fleet:
    """A client of an ingress, and the replicas behind it."""

    client: httpx.AsyncClient
    replicas: InProcessReplicas
    ingress: Ingress

    def __getitem__(self, name: str) -> InProcessReplica:
        return self.replicas.all[name]


@asynccontextmanager
async def fleet_of(tokenizer: Any, *cores: FakeCore, **settings: Any) -> AsyncIterator[Fleet]:
    """Replicas `r0`, `r1` … with these cores. `settings`: of each, and of the ingress."""
    made = []
    for number, core in enumerate(cores):
        serving = serving_over(core, tokenizer, **settings)
        app = create_app(serving, is_replica=True)
        relayed = RelayedApp(app, app.state.documents, f"r{number}")
        made.append(InProcessReplica(f"r{number}", core, serving, relayed))
    replicas = InProcessReplicas(made)
    metrics = IngressMetrics(lambda: len(replicas.names()), lambda: 2)
    ingress = create_ingress(replicas, made[0].serving.config, metrics)
    transport = httpx.ASGITransport(ingress, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=20
        ) as client:
            yield Fleet(client, replicas, ingress.state.ingress)
    finally:
        for replica in made:
            replica.serving.engine.stop()
