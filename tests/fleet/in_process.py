"""Replicas in the test's own process, over fake cores, behind the real ingress."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from gemserve.api.app import create_app
from gemserve.api.serving import Serving
from gemserve_fleet.replicas.cached_chunks import split_keys
from gemserve_fleet.replicas.ingress import Ingress, create_ingress
from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
from gemserve_fleet.replicas.messages import FromReplica, RelayedRequest
from gemserve_fleet.replicas.relayed_app import RelayedApp
from gemserve_fleet.replicas.replica_calls import CALL_TIMEOUT_S, ReplicaFailed, ReplicaLost
from gemserve_fleet.replicas.replica_choice import RoutingHints, by_cost, order_replicas
from gemserve_fleet.replicas.routing import ReplicaState
from gemserve_fleet.replicas.staged_adapters import StagedAdapters
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
        self.admitted: Set[str] = frozenset()
        self.failures = 0

    def admit(self, names: Set[str]) -> None:
        self.admitted = names

    def names(self) -> list[str]:
        return [name for name, replica in self.all.items() if not replica.is_lost.is_set()]

    def states(self) -> list[ReplicaState]:
        running = [self.all[name] for name in self.names() if name in self.admitted]
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

    async def call(
        self, replica: str, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        made = self.all[replica]
        if not made.is_lost.is_set():
            result = getattr(made.relayed, method)(*_pickled(arguments))
            if inspect.isawaitable(result):
                result = await result
            if not made.is_lost.is_set():
                return _pickled(result)
        raise ReplicaLost(f"{replica} has died")

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


def replica_of(name: str, core: FakeCore, tokenizer: Any, **settings: Any) -> InProcessReplica:
    """`settings`: of the server. `store`: instead of `adapters`, makes a store for each replica."""
    store = settings.pop("store", None)
    if store is not None:
        settings["adapters"] = store()
    serving = serving_over(core, tokenizer, **settings)
    adapters = StagedAdapters(serving.adapters)
    app = create_app(serving, is_replica=True, load_adapter=adapters.stage)
    relayed = RelayedApp(app, app.state.documents, adapters, name)
    return InProcessReplica(name, core, serving, relayed)


@asynccontextmanager
async def fleet_of(tokenizer: Any, *cores: FakeCore, **settings: Any) -> AsyncIterator[Fleet]:
    """Replicas `r0`, `r1` … with these cores. `settings`: of each, and of the ingress."""
    adapters = settings.pop("adapters_at_start", ())
    made = [
        replica_of(f"r{number}", core, tokenizer, **settings) for number, core in enumerate(cores)
    ]
    replicas = InProcessReplicas(made)
    config = replace(made[0].serving.config, adapters=adapters)
    ingress = create_ingress(replicas, config, IngressMetrics(lambda: len(made)))
    transport = httpx.ASGITransport(ingress, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=20
        ) as client:
            fleet = Fleet(client, replicas, ingress.state.ingress)
            while fleet.ingress.adapters.num_ready < len(made) and not adapters:
                await fleet.ingress.adapters.ready()
                await asyncio.sleep(0.01)
            yield fleet
    finally:
        for replica in replicas.all.values():
            replica.serving.engine.stop()
