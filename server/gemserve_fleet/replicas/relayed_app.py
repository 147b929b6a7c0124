"""The replica's side of the relay: its application answers requests that another process sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from anyio import to_thread
from starlette.types import ASGIApp, Message

from gemserve.api.documents.document_store import Document, DocumentStore
from gemserve.contract.reading_notes import ReadingNotes
from gemserve.errors import DocumentNotFound
from gemserve_fleet.replicas.cached_chunks import CachedChunks
from gemserve_fleet.replicas.messages import (
    Accepted,
    AdapterSet,
    ChoicesAdded,
    DocumentCopy,
    DocumentsMissing,
    DocumentsStored,
    FromReplica,
    RelayedRequest,
    TokensUsed,
    WholeReply,
)
from gemserve_fleet.replicas.staged_adapters import StagedAdapters
from gemserve_fleet.replicas.text_chunks import TextChunk

_COPIES_TIMEOUT_S = 60.0  # in which the ingress must send copies of documents
# Bytes of a reply that the ingress has not passed on, after which the application waits.
_MOST_ON_THE_WAY = 1 << 20
_SILENCE_S = 60.0  # without a word of it: Ray lets nobody call a replica that is to stop
_LEAVE_TIMEOUT_S = 10.0  # in which the application ends when its client has left


class RelayedApp:
    """Answers relayed requests with `app`, as if they had come over HTTP.

    All methods are called on one event loop.
    """

    def __init__(
        self, app: ASGIApp, documents: DocumentStore, adapters: StagedAdapters, replica: str
    ) -> None:
        self._app = app
        self._documents = documents
        self._adapters = adapters
        self._replica = replica
        self._running: dict[str, _Answering] = {}
        self._cached = CachedChunks()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def arriving_tokens(self) -> int:
        """About how many tokens the requests have that have come, and are not queued yet."""
        return sum(a.prompt_tokens for a in self._running.values() if not a.notes.is_queued)

    def cached_keys(self) -> bytes:
        """See `CachedChunks.keys`."""
        return self._cached.keys()

    async def answer(
        self,
        request: RelayedRequest,
        chunks: Sequence[TextChunk] = (),
        prompt_tokens: int = 0,
    ) -> AsyncGenerator[list[FromReplica], None]:
        """The messages, in batches of what has come by then.

        `chunks`: of the request's text. `prompt_tokens`: an estimate.

        It ends when the application has ended, and the work that goes on after its reply, too. If
        the generator is closed, the application sees that its client has left. Raises what the
        application raises.
        """
        answering = _Answering(request, self._replica, prompt_tokens)
        self._running[request.number] = answering
        self._cached.watch(answering.notes, chunks)
        try:
            yield [Accepted(self._replica)]
            self.forget(request.tenant, request.gone)
            missing = self._missing(request)
            if missing:
                yield [DocumentsMissing(missing)]
                async with asyncio.timeout(_COPIES_TIMEOUT_S):
                    await answering.has_copies.wait()
            task: asyncio.Task[None] = asyncio.create_task(self._run(answering))
            answering.watch(task, self._documents)
            try:
                async for batch in answering.batches():
                    yield batch
            finally:
                answering.leave()
                if not task.done():
                    await asyncio.wait({task}, timeout=_LEAVE_TIMEOUT_S)
                    task.cancel()
            task.result()
        finally:
            self._cached.end(answering.notes)
            del self._running[request.number]

    async def answer_whole(self, request: RelayedRequest) -> WholeReply:
        """The reply to a request that does not stream, and for which nobody has to pay."""
        status, headers, parts, num_bytes = 500, (), list[bytes](), 0
        async for batch in self.answer(request):
            for message in batch:
                if not isinstance(message, dict):
                    continue
                if message["type"] == "http.response.start":
                    status, headers = message["status"], tuple(message["headers"])
                else:
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    self.taken(request.number, num_bytes)
        return WholeReply(self._replica, status, headers, b"".join(parts))

    async def _run(self, answering: _Answering) -> None:
        await self._app(answering.scope, answering.receive, answering.send)

    def leave(self, number: str) -> None:
        """The client of a request has left. Nothing happens if the request has ended."""
        answering = self._running.get(number)
        if answering is not None:
            answering.leave()

    def taken(self, number: str, num_bytes: int) -> None:
        """So much of the body of a request's reply has been passed on, since its beginning."""
        answering = self._running.get(number)
        if answering is not None:
            answering.take(num_bytes)

    def adopt(self, tenant: bytes, copies: Sequence[DocumentCopy], number: str) -> None:
        """Store documents that another replica has read, for a request that waits for them."""
        for copy in copies:
            if self._documents.find(tenant, copy.id) is None:
                self._documents.add(tenant, _document_of(copy), copy.left_s)
        answering = self._running.get(number)
        if answering is not None:
            answering.has_copies.set()

    def forget(self, tenant: bytes, ids: Sequence[str]) -> None:
        """Drop documents, and what the engine has cached of them. Unknown ids are ignored."""
        for document_id in ids:
            with suppress(DocumentNotFound):
                self._documents.delete(tenant, document_id)

    def adapters(self) -> AdapterSet:
        """See `StagedAdapters.current`, and the methods there for these."""
        return self._adapters.current()

    async def load_adapter(self, name: str, path: str) -> str | None:
        return await to_thread.run_sync(self._adapters.load, name, path)

    async def adopt_adapters(self, wanted: AdapterSet) -> None:
        await to_thread.run_sync(self._adapters.adopt, wanted)

    def drop_staged_adapter(self) -> None:
        self._adapters.drop()

    def _missing(self, request: RelayedRequest) -> tuple[str, ...]:
        return tuple(
            document_id
            for document_id in request.documents
            if self._documents.find(request.tenant, document_id) is None
        )


class RelayedPlace:
    """Stands for a `QuotaPlace` of the ingress: what a request takes of its key's quota."""

    def __init__(self, answering: _Answering) -> None:
        self._answering = answering

    def add_choices(self, count: int) -> None:
        """The ingress ends the request if they are too many."""
        if count:
            self._answering.tell(ChoicesAdded(count))

    def charge(self, tokens: int, age_s: float = 0.0) -> None:
        self._answering.tell(TokensUsed(tokens, age_s))

    def hand_over(self) -> _HandedOver:
        """The ingress keeps the place until the work that goes on has left it."""
        return _HandedOver(self._answering)


class _HandedOver:
    def __init__(self, answering: _Answering) -> None:
        self._answering = answering
        self._is_held = True
        answering.hold()

    def charge(self, tokens: int, age_s: float = 0.0) -> None:
        self._answering.tell(TokensUsed(tokens, age_s))

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._answering.let_go()


class _Answering:
    """One relayed request while the application answers it."""

    def __init__(self, request: RelayedRequest, replica: str, prompt_tokens: int) -> None:
        self.notes = ReadingNotes()
        self.prompt_tokens = prompt_tokens
        self.has_copies = asyncio.Event()
        self._request = request
        self._replica = replica
        self._is_received = False
        self._left = asyncio.Event()
        self._num_sent = self._num_taken = 0  # bytes of the body
        self._has_room = asyncio.Event()
        self._is_told = True
        self._messages: list[FromReplica] = []
        self._changed = asyncio.Event()
        self._num_holds = 0  # of the application, and of what goes on after its reply
        self._store: DocumentStore | None = None
        self._stored_before: frozenset[str] = frozenset()
        self.scope: dict[str, Any] = {**request.scope, "state": self._state()}

    def _state(self) -> dict[str, Any]:
        state = {"notes": self.notes, "waited_s": self._request.waited_s}
        if self._request.caller is None:
            return state
        place = RelayedPlace(self) if self._request.scope["method"] == "POST" else None
        return {**state, "caller": self._request.caller, "place": place}

    def watch(self, task: asyncio.Task[None], store: DocumentStore) -> None:
        """The batches end when `task` has ended. They tell which documents it has stored."""
        if self._request.scope["path"] == "/v1/documents" and self.scope["method"] == "POST":
            self._store = store
            self._stored_before = frozenset(each.id for each in store.list(self._request.tenant))
        self.hold()
        task.add_done_callback(lambda _: self.let_go())

    async def receive(self) -> Message:
        if not self._is_received:
            self._is_received = True
            return {"type": "http.request", "body": self._request.body.drop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Wait as long as the client is far behind, as a server of HTTP does."""
        while self._is_told and self._num_sent - self._num_taken > _MOST_ON_THE_WAY:
            if self._left.is_set():
                break
            self._has_room.clear()
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self._has_room.wait()
            except TimeoutError:
                self._is_told = False
        self._num_sent += len(message.get("body", b""))
        if self._store is not None and message["type"] == "http.response.start":
            self._tell_stored(self._store)
        self.tell(dict(message))

    def _tell_stored(self, store: DocumentStore) -> None:
        """Tell of documents that are new. Those of other requests may be among them."""
        copies = tuple(
            _copy_of(document, self._replica)
            for document in store.list(self._request.tenant)
            if document.id not in self._stored_before
        )
        if copies:
            self.tell(DocumentsStored(copies))

    def leave(self) -> None:
        self._left.set()
        self._has_room.set()

    def take(self, num_bytes: int) -> None:
        self._num_taken = max(self._num_taken, num_bytes)
        self._has_room.set()

    def tell(self, message: FromReplica) -> None:
        self._messages.append(message)
        self._changed.set()

    def hold(self) -> None:
        self._num_holds += 1

    def let_go(self) -> None:
        self._num_holds -= 1
        self._changed.set()

    async def batches(self) -> AsyncGenerator[list[FromReplica], None]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._messages:
                batch, self._messages = self._messages, []
                yield batch
            if not self._num_holds and not self._messages:
                return


def _copy_of(document: Document, home: str) -> DocumentCopy:
    return DocumentCopy(
        id=document.id,
        text=document.text,
        num_bytes=document.num_bytes,
        num_tokens=document.num_tokens,
        name=document.name,
        created_s=document.created_s,
        expires_s=document.expires_s,
        left_s=document.ends_s - time.monotonic(),
        is_pinned=document.is_pinned,
        home=home,
    )


def _document_of(copy: DocumentCopy) -> Document:
    """The document on a replica that has not read it. Questions about it can be asked at once."""
    document = Document(
        id=copy.id,
        text=copy.text,
        num_bytes=copy.num_bytes,
        num_tokens=copy.num_tokens,
        name=copy.name,
        created_s=copy.created_s,
        expires_s=copy.expires_s,
        is_pinned=copy.is_pinned,
    )
    document.settle("ready")
    return document
