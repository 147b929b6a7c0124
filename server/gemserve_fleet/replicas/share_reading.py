"""A peer's side of a shared document: it reads groups of segments for the replica that answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.api.access.backlog import Backlog, BacklogJob
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Finished
from gemserve.contract.requests import Request
from gemserve.engine.stream import Stream
from gemserve.engine.worker import Engine
from gemserve.errors import AdapterNotFound, GemserveError
from gemserve_fleet.replicas.segment_shares import (
    FromPeer,
    GroupRead,
    RefusalReason,
    Refused,
    SegmentShare,
    request_for,
)


class ShareReader:
    """Reads shares with this replica's engine. It is used on one event loop.

    Nobody is charged here: the owner has charged the whole prompt.
    """

    def __init__(self, engine: Engine, adapters: AdapterStore, backlog: Backlog) -> None:
        self._engine, self._adapters, self._backlog = engine, adapters, backlog

    async def read(self, share: SegmentShare) -> AsyncGenerator[FromPeer, None]:
        """Each group when it is read, or a refusal of those that are left.

        Its work ends when the generator is closed.
        """
        readings: list[_Reading] = []
        try:
            adapter = self._accept(share)
            for group in share.groups:
                request = request_for(share, group, adapter)
                readings.append(_Reading(group.number, request, self._backlog.enter(request)))
            # one after the other: together they would all end late, and be lost together
            for reading in readings:
                yield await reading.read(self._engine)
        except _Refusal as refusal:
            yield refusal.refused
        finally:
            for reading in readings:
                reading.close()

    def _is_busier(self, share: SegmentShare) -> bool:
        """Would the owner have to wait for this replica?

        It would read the share itself in the time of two shares, its own and this one. A queue that
        is longer by half a share leaves room for noise.
        """
        return self._backlog.tokens_left > share.queued_tokens + share.num_tokens / 2

    def _accept(self, share: SegmentShare) -> LoadedAdapter | None:
        """The share's adapter, in the same version, if it has one. Raises `_Refusal`."""
        queued = self._backlog.tokens_left
        if self._is_busier(share):
            raise _Refusal("busy", f"{queued} tokens, the owner has {share.queued_tokens}")
        if share.adapter is None:
            return None
        name, version = share.adapter
        try:
            adapter = self._adapters.find(name)
        except AdapterNotFound as error:
            raise _Refusal("adapter", str(error)) from error
        if adapter is None or adapter.version != version:
            raise _Refusal("adapter", f"version {version} of {name} is not in memory")
        return adapter


class _Refusal(Exception):
    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.refused = Refused(reason, detail)


class _Reading:
    """One group. It counts as work from the beginning; the engine gets it when its turn comes."""

    def __init__(self, number: int, request: Request, job: BacklogJob) -> None:
        self._number, self._request, self._job = number, request, job
        self._stream: Stream | None = None

    async def read(self, engine: Engine) -> GroupRead:
        """What came of it. Raises `_Refusal` if it has failed, or the engine takes no more."""
        try:
            self._stream = engine.submit(self._request)
        except GemserveError as error:
            raise _Refusal("full", str(error)) from error
        async for event in self._stream:
            self._job.see(event)
            if isinstance(event, Finished) and event.segments_read is not None:
                return GroupRead(self._number, event.segments_read)
            if isinstance(event, Finished):
                raise _Refusal("failed", event.error or "the engine has ended it")
        raise AssertionError("a stream has a last event")

    def close(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        if self._stream is not None:
            self._stream.cancel()
        self._job.close()
