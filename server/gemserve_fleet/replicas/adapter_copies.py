"""The adapters of all replicas, as the ingress knows them.

Every replica that gets requests has the same adapters in the same versions. A change is made in two
steps: all of them load an adapter, and if none has refused, all of them name it. A replica that
joins, or was out of reach during a change, is given what it lacks before it gets requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from gemserve.contract.adapters import AdapterInfo
from gemserve.errors import ConfigError, ReplicaUnavailable, RequestError
from gemserve_fleet.replicas.messages import AdapterSet, RelayedRequest, WholeReply
from gemserve_fleet.replicas.replica_calls import ReplicaFailed, ReplicaLost, Replicas

log = logging.getLogger("gemserve_fleet.replicas")
PATH = "/v1/adapters"
LOAD_TIMEOUT_S = 300.0  # in which a replica must have loaded adapters
_FIRST_TIMEOUT_S = 10.0  # in which one replica must be ready for a request
_PAUSE_S = 2.0  # after a replica could not be given the adapters
_WATCH_S = 0.5


class AdapterCopies:
    """Changes adapters on all replicas, and admits replicas to requests. For one event loop.

    `named`: names and folders of the adapters that every server of this kind starts with.
    """

    def __init__(self, replicas: Replicas, named: Sequence[tuple[str, str]]) -> None:
        self._replicas = replicas
        self._named = tuple(named)
        self._wanted: AdapterSet | None = None  # None: not known yet
        self._ready: set[str] = set()  # the replicas that have what is wanted
        self._giving: dict[str, asyncio.Task[None]] = {}
        self._learning, self._changing = asyncio.Lock(), asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_ready(self) -> int:
        """The replicas that get requests."""
        return len(self._ready.intersection(self._replicas.names()))

    def ready_now(self) -> list[str]:
        """The replicas that get requests. The others begin to be given what they lack."""
        names = self._replicas.names()
        self._admit(self._ready.intersection(names))
        for name in names:
            if name not in self._ready and name not in self._giving:
                self._giving[name] = asyncio.create_task(self._give(name))
        return [name for name in names if name in self._ready]

    async def ready(self, timeout_s: float = _FIRST_TIMEOUT_S) -> list[str]:
        """The replicas that get requests; if there is none, the first one that does."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    names = self.ready_now()
                    if names or not self._giving:
                        return names
                    await asyncio.wait(
                        list(self._giving.values()), return_when=asyncio.FIRST_COMPLETED
                    )
        return []

    async def load(self, request: RelayedRequest) -> WholeReply:
        """Answer `POST /v1/adapters`: all replicas load the adapter, or none does.

        Raises `ReplicaUnavailable`, `ReplicaFailed`, and `RequestError` if replicas have read
        different files.
        """
        async with self._changing:
            wanted, names = await self._begin_change()
            try:
                replies = await self._ask(names, request)
                reply = _answer_for_all(replies.values())
            except BaseException:
                await self._call_all(names, "drop_staged_adapter")
                raise
            if reply.status == 200:
                info = _info_in(reply)
                others = [each for each in wanted.adapters if each.name != info.name]
                await self._agree((*others, info), replies)
            else:
                await self._call_all(names, "drop_staged_adapter")
            return reply

    async def unload(self, request: RelayedRequest) -> WholeReply:
        """Answer `DELETE /v1/adapters/{name}`. Raises `ReplicaUnavailable`, `ReplicaFailed`."""
        name = request.scope["path"].removeprefix(f"{PATH}/")
        async with self._changing:
            wanted, names = await self._begin_change()
            replies: dict[str, WholeReply] = {}
            for replica in names:
                replies = await self._ask([replica], request)
                if replies:
                    break
            reply = _answer_for_all(replies.values())
            if reply.status == 200:
                left = tuple(each for each in wanted.adapters if each.name != name)
                await self._agree(left, names)
            return reply

    async def learn(self) -> AdapterSet:
        """The adapters that all replicas should have, from those that run.

        An ingress that has replaced another one takes over what that one had given its replicas.
        Raises `ConfigError` if an adapter that the server starts with cannot be loaded,
        `ReplicaLost`, and `ReplicaFailed`.
        """
        async with self._learning:
            if self._wanted is None:
                states: dict[str, AdapterSet] = {}
                for name in self._replicas.names():
                    with suppress(ReplicaLost):
                        states[name] = await self._replicas.call(name, "adapters")
                if not states:
                    raise ReplicaLost("no replica runs")
                best = max(states, key=lambda name: states[name].revision)
                wanted = states[best]
                if wanted.revision == 0:
                    wanted = await self._load_named(best)
                self._wanted = wanted
            return self._wanted

    async def _load_named(self, replica: str) -> AdapterSet:
        for name, path in self._named:
            complaint = await self._replicas.call(
                replica, "load_adapter", name, path, timeout_s=LOAD_TIMEOUT_S
            )
            if complaint is not None:
                raise ConfigError(complaint)
        found: AdapterSet = await self._replicas.call(replica, "adapters")
        return AdapterSet(1, found.adapters)

    async def _give(self, replica: str) -> None:
        """Give a replica what it lacks, and admit it."""
        try:
            wanted = await self.learn()
            await self._replicas.call(replica, "adopt_adapters", wanted, timeout_s=LOAD_TIMEOUT_S)
            if self._wanted is wanted:  # else it is given again
                self._admit({*self._ready, replica})
        except (ReplicaLost, ReplicaFailed, ReplicaUnavailable, ConfigError) as error:
            if replica in self._replicas.names():
                log.warning("replica %s has not got the adapters: %s", replica, error)
                await asyncio.sleep(_PAUSE_S)
        finally:
            del self._giving[replica]

    async def _watch(self) -> None:
        """Admit new replicas also while all requests wait for one."""
        while True:
            await asyncio.sleep(_WATCH_S)
            self.ready_now()

    async def _begin_change(self) -> tuple[AdapterSet, list[str]]:
        names = await self.ready()
        if not names or self._wanted is None:
            raise ReplicaUnavailable("No replica is ready.", code="no_replica")
        return self._wanted, names

    async def _ask(self, names: Sequence[str], request: RelayedRequest) -> dict[str, WholeReply]:
        """The replies of those that answer. The others get no requests until they are given all.

        Raises `ReplicaFailed`.
        """
        replies = await self._call_all(names, "answer_whole", request)
        lost = {name for name in names if isinstance(replies[name], ReplicaLost)}
        self._admit(self._ready - lost)
        for reply in replies.values():
            if isinstance(reply, BaseException) and not isinstance(reply, ReplicaLost):
                raise reply
        return {name: reply for name, reply in replies.items() if isinstance(reply, WholeReply)}

    async def _agree(self, adapters: tuple[AdapterInfo, ...], names: Collection[str]) -> None:
        """Have `names` take these adapters. Those that do not answer are given them later."""
        assert self._wanted is not None
        self._wanted = AdapterSet(self._wanted.revision + 1, adapters)
        self._admit(self._ready.intersection(names))  # others have joined meanwhile
        taken = await self._call_all(names, "adopt_adapters", self._wanted)
        lost = {name for name, result in taken.items() if isinstance(result, BaseException)}
        self._admit(self._ready - lost)
        self.ready_now()

    async def _call_all(
        self, names: Iterable[str], method: str, *arguments: object
    ) -> dict[str, object]:
        """What each replica returns, or raises."""
        calls = {
            name: self._replicas.call(name, method, *arguments, timeout_s=LOAD_TIMEOUT_S)
            for name in names
        }
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        return dict(zip(calls, results, strict=True))

    def _admit(self, names: set[str]) -> None:
        self._ready = names
        self._replicas.admit(frozenset(names))


def _answer_for_all(replies: Collection[WholeReply]) -> WholeReply:
    """A refusal, if there is one. Raises `ReplicaUnavailable`, `RequestError`."""
    if not replies:
        text = "The replicas that were to answer are lost."
        raise ReplicaUnavailable(text, code="replica_lost")
    refusals = [reply for reply in replies if reply.status != 200]
    if refusals:
        return refusals[0]
    bodies = [json.loads(reply.body) for reply in replies]
    if len({body.get("version") for body in bodies}) > 1:
        raise RequestError(
            f"path={bodies[0]['path']}: replicas have read different files there; load it again "
            "when the folder has its last content",
            param="path",
            code="invalid_adapter",
        )
    return next(iter(replies))


def _info_in(reply: WholeReply) -> AdapterInfo:
    body = json.loads(reply.body)
    return AdapterInfo(
        name=body["name"],
        path=body["path"],
        kind=body["type"],
        version=body["version"],
        num_bytes=body["bytes"],
        num_positions=body["positions"],
        is_loaded=body["loaded"],
    )
