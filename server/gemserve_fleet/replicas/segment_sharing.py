"""The owner's side of a shared document: peers read groups of its segments while it reads others.

The request is in this replica's engine as any other. Some groups of its segments are *lent*: the
engine does not read them, but awaits them. What a peer does not read, for whatever reason, is given
back, and the engine reads it then. So a client sees no error because of a peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from prometheus_client import Counter

from gemserve.api.access.backlog import Backlog
from gemserve.contract.events import Event, LentGroups, SegmentsRead
from gemserve.contract.requests import Request
from gemserve.engine.stream import Stream
from gemserve.engine.worker import Engine
from gemserve.errors import ReplicaUnavailable
from gemserve_fleet.replicas.replica_calls import ReplicaLost
from gemserve_fleet.replicas.segment_shares import (
    FromPeer,
    RefusalReason,
    Refused,
    SegmentShare,
    assign_groups,
    fits,
    share_of,
)

log = logging.getLogger("gemserve_fleet.replicas")
LEAST_GROUPS = 4  # of a document that is shared
# A peer has so many times as long as this engine would need for the peer's share, and some more.
_PATIENCE = 2.0
_LEAST_TIMEOUT_S = 10.0
_UNKNOWN_TIMEOUT_S = 60.0  # while this engine has not read anything
# Documents that are shared at once. Each holds memory while it awaits its peers, who must have some
# left to read for others: else two replicas could wait for each other until their patience ends.
_MOST_AT_ONCE = 2
# "late": it has not answered in time. "lost": it has died, or cannot be reached.
Outcome = Literal["read", "late", "lost"] | RefusalReason
OUTCOMES: tuple[Outcome, ...] = ("read", "late", "lost", *get_args(RefusalReason))


class Peers(Protocol):
    """How a replica reaches the others."""

    @property
    def own_name(self) -> str:
        """This replica's."""
        ...

    def names(self) -> Sequence[str]:
        """The replicas that are ready, this one included if it is."""
        ...

    def read(self, peer: str, share: SegmentShare) -> AsyncGenerator[FromPeer, None]:
        """See `ShareReader.read`. Raises `ReplicaLost` and `ReplicaUnavailable`."""
        ...


@dataclass(frozen=True, slots=True)
class SharedReading:
    """Observes the first stream of an HTTP request. When the reading stops, so do the peers."""

    tasks: tuple[asyncio.Task[None], ...]

    def see(self, event: Event) -> None:
        pass

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


class SegmentSharing:
    """Submits requests to this replica's engine, and has peers read parts of long documents.

    It is used on one event loop. `segments`: counts segments that were lent, by `Outcome`.
    """

    def __init__(
        self,
        engine: Engine,
        backlog: Backlog,
        peers: Peers,
        segments: Counter,
        least_timeout_s: float = _LEAST_TIMEOUT_S,
    ) -> None:
        self._engine, self._backlog, self._peers = engine, backlog, peers
        self._segments = segments
        self._least_timeout_s = least_timeout_s
        self._running = set[asyncio.Task[None]]()
        for outcome in OUTCOMES:
            segments.labels(outcome)

    def submit_all(
        self, requests: Sequence[Request], n: int
    ) -> tuple[list[Stream], SharedReading | None]:
        """Do as `Engine.submit_all`. Each `n` requests are of one prompt.

        Close the observer, if there is one, when nobody reads the streams any more.
        """
        queued_tokens = self._backlog.tokens_left
        by_prompt = [requests[i : i + n] for i in range(0, len(requests), n)]
        by_peer = [self._assign(same[0]) for same in by_prompt]
        lending = [
            replace(request, lent_groups=tuple(sorted(n for some in peers.values() for n in some)))
            for same, peers in zip(by_prompt, by_peer, strict=True)
            for request in same
        ]
        streams = self._engine.submit_all(lending)
        tasks = tuple(
            asyncio.create_task(self._share(streams[i * n : (i + 1) * n], peers, queued_tokens))
            for i, peers in enumerate(by_peer)
            if peers
        )
        self._running.update(tasks)
        for task in tasks:
            task.add_done_callback(self._running.discard)
        return streams, SharedReading(tasks) if tasks else None

    def _assign(self, request: Request) -> dict[str, list[int]]:
        """The groups of its segments that each peer should read, if the document is long."""
        segments = None if request.plan is None else request.plan.segments
        # a stored document that is deleted must not stay in the caches of peers
        if segments is None or request.documents or len(segments.groups) < LEAST_GROUPS:
            return {}
        own, names = self._peers.own_name, self._peers.names()
        if own not in names or len(self._running) >= _MOST_AT_ONCE:
            return {}
        by_peer = dict[str, list[int]]()
        for number, name in enumerate(assign_groups(segments, names)):
            if name != own:
                by_peer.setdefault(name, []).append(number)
        return by_peer

    async def _share(
        self, streams: Sequence[Stream], by_peer: dict[str, list[int]], queued_tokens: int
    ) -> None:
        """Have the peers read what the engine lends, for all choices of one prompt."""
        lent = [await stream.lent for stream in streams if stream.lent is not None]
        numbers = {number for each in lent for number in each.numbers}
        async with asyncio.TaskGroup() as asking:
            for peer, groups in by_peer.items():
                wanted = [number for number in groups if number in numbers]
                if wanted:
                    timeout_s = self._timeout_s(lent, len(wanted))
                    asking.create_task(self._ask(streams, peer, wanted, queued_tokens, timeout_s))

    def _timeout_s(self, lent: Sequence[LentGroups], count: int) -> float:
        """How long a peer may take for so many groups."""
        of_group = [each.seconds / len(each.numbers) for each in lent if each.seconds]
        if not of_group:
            return self._least_timeout_s + _UNKNOWN_TIMEOUT_S
        return self._least_timeout_s + _PATIENCE * max(of_group) * count

    async def _ask(
        self,
        streams: Sequence[Stream],
        peer: str,
        numbers: Sequence[int],
        queued_tokens: int,
        timeout_s: float,
    ) -> None:
        """Hand over what a peer reads, and give back what it does not read."""
        left, request = list(numbers), streams[0].request
        about, extra = f"windows of {request.request_id}", {"request_id": request.request_id}
        outcome: Outcome = "failed"
        try:
            share = share_of(request, numbers, queued_tokens)
            groups = {group.number: group for group in share.groups}
            async with (
                asyncio.timeout(timeout_s),
                aclosing(self._peers.read(peer, share)) as parts,
            ):
                async for part in parts:
                    if isinstance(part, Refused):
                        outcome = part.reason
                        log.info("%s: replica %s refuses: %s", about, peer, part, extra=extra)
                        break
                    if part.number not in left or not fits(part.read, groups[part.number]):
                        raise ValueError(f"group {part.number} is not what was asked for")
                    left.remove(part.number)
                    self._settle(streams, part.number, part.read, "read")
        except TimeoutError:
            outcome = "late"
            log.warning("%s: replica %s takes over %.0f s", about, peer, timeout_s, extra=extra)
        except (ReplicaLost, ReplicaUnavailable) as error:
            outcome = "lost"
            log.warning("%s: replica %s was lost: %s", about, peer, error, extra=extra)
        except Exception:
            log.exception("%s: replica %s has failed", about, peer, extra=extra)
        for number in left:
            self._settle(streams, number, None, outcome)

    def _settle(
        self, streams: Sequence[Stream], number: int, read: SegmentsRead | None, outcome: Outcome
    ) -> None:
        """Tell the engine what came of a lent group."""
        plan = streams[0].request.plan
        assert plan is not None
        assert plan.segments is not None
        self._segments.labels(outcome).inc(len(plan.segments.groups[number]))
        for stream in streams:
            self._engine.take_group(stream, number, read)
