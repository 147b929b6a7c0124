"""The application in front of replicas: it checks who asks, and relays requests. No model, no Ray.

It has the outer middleware of a server (`gemserve.api.outer_middleware`) and reads bodies under the
same limits. Every reply is a replica's, passed on as it comes, except for what concerns all of
them: `/health`, `/ping`, `/ready`, `/load` and `/metrics`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gemserve.api.access.body_limit import BodyLimit
from gemserve.api.access.head_requests import HeadRequests
from gemserve.api.access.held_bytes import HeldBytes
from gemserve.api.error_replies import error_body, error_response
from gemserve.api.outer_middleware import Counts, add_outer_middleware
from gemserve.api.replies.server_sent_events import DONE, EVENTS, data_event
from gemserve.config import ServerConfig
from gemserve.errors import EngineDead, GemserveError, QuotaExceeded, ReplicaUnavailable
from gemserve.holdings import Holdings
from gemserve.wings import wings
from gemserve_fleet.replicas.adapter_copies import PATH as ADAPTERS_PATH
from gemserve_fleet.replicas.adapter_copies import AdapterCopies
from gemserve_fleet.replicas.document_copies import PATH as DOCUMENTS_PATH
from gemserve_fleet.replicas.document_copies import DocumentCopies, ids_in
from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
from gemserve_fleet.replicas.messages import (
    Accepted,
    ChoicesAdded,
    DocumentsMissing,
    DocumentsStored,
    FromReplica,
    RelayedRequest,
    RequestBody,
    TokensUsed,
    WholeReply,
)
from gemserve_fleet.replicas.replica_calls import ReplicaFailed, ReplicaLost, Replicas
from gemserve_fleet.replicas.replica_choice import RoutingHints
from gemserve_fleet.replicas.text_chunks import LEAST_CHUNK, TextChunk, chunk_salt, text_chunks

STREAM_TYPES = (EVENTS.encode(), b"application/x-ndjson")


def last_words(path: str, message: str, code: str, request_id: str, last_body: bytes) -> bytes:
    """One error, and `[DONE]` where the protocol has it. `last_body`: what was sent before."""
    for wing in wings():
        said = wing.last_words(
            path, message=message, code=code, request_id=request_id, last_body=last_body
        )
        if said is not None:
            return said
    return (data_event(error_body(message, kind="overloaded_error", code=code)) + DONE).encode()


log = logging.getLogger("gemserve_fleet.replicas")
PROBE_TIMEOUT_S = 2.0  # in which a replica must answer what all are asked
_LEAVE_TIMEOUT_S = 10.0  # in which a replica must end a request whose client has left
_TOLD_BYTES = 1 << 19  # well below what a replica may be ahead
_TELL_PERIOD_S = 20.0  # for replies that a client reads slowly; well below a replica's patience
_EXPIRY_PERIOD_S = 60.0
_PROBES = frozenset({"/health", "/ping", "/ready"})
_BYTES_PER_TOKEN = 4  # about, in English
# A body of so many bytes is searched and cut in another thread: 4 MB take 15 ms.
_LONG_BODY = 1 << 18
_TEXT = re.compile(rb'(?<!\\)"(?:messages|prompt|input|system)"\s*:')
_MODEL = re.compile(rb'(?<!\\)"model"\s*:\s*"([^"]*)"')
_ANSWER_TOKENS = 128  # of an answer, until the replica knows more
# what of a scope can be pickled, and matters to the application
_SCOPE_KEYS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")


def create_ingress(replicas: Replicas, config: ServerConfig, metrics: IngressMetrics) -> Starlette:
    """The application. Its state has the `Ingress`. Raises `ConfigError` for wrong key files."""
    adapters = AdapterCopies(replicas, config.adapters)
    metrics.count_replicas(lambda: adapters.num_ready)
    ingress = Ingress(replicas, adapters, metrics, Holdings(config.body_memory_bytes))
    app = Starlette()
    app.state.ingress = ingress
    app.router.default = ingress
    app.add_middleware(HeadRequests)
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        memory_bytes=config.body_memory_bytes,
        timeout_s=config.body_timeout_s,
    )
    counts = Counts(
        refusal=metrics.count_refusal,
        reply=lambda status: metrics.replies.labels(status).inc(),
        error=metrics.errors.inc,
    )
    add_outer_middleware(app, config, counts)
    return app


class Ingress:
    """Relays requests. It is used on one event loop; `drain` and `stop` may be called anywhere.

    `kept_bodies`: the memory for bodies that replicas have, and that may have to be sent again.
    """

    def __init__(
        self,
        replicas: Replicas,
        adapters: AdapterCopies,
        metrics: IngressMetrics,
        kept_bodies: Holdings,
    ) -> None:
        self._replicas = replicas
        self.adapters = adapters
        self._metrics = metrics
        self._kept_bodies = kept_bodies
        self._documents = DocumentCopies()
        self._expiring: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._told = set[asyncio.Task[None]]()
        self._secret = secrets.token_bytes(32)
        self._numbers = count(1)
        self._running: set[_Relaying] = set()
        self._is_draining = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and stop after `timeout_s`."""
        if not self._is_draining:
            self._is_draining = True
            timer = threading.Timer(timeout_s, self.stop)
            timer.daemon = True
            timer.start()

    def stop(self, timeout_s: float = 0.0) -> None:
        """End all running requests, each with its last event."""
        self._is_draining = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_running)

    @property
    def has_ended(self) -> bool:
        """Whether all requests have had their last event, and new ones are refused."""
        return self._is_draining and all(each.is_over for each in self._running)

    def _stop_running(self) -> None:
        for relaying in self._running:
            relaying.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self._loop = asyncio.get_running_loop()
        path, method = scope["path"], scope["method"]
        try:
            if path in _PROBES:
                await (await self._probe(scope))(scope, receive, send)
            elif path == "/metrics" and method == "GET":
                await (await self._tell_metrics(scope))(scope, receive, send)
            elif path == "/load" and method == "GET":
                await (await self._tell_load(scope))(scope, receive, send)
            elif _changes_adapters(method, path):
                await self._change_adapters(scope, receive, send)
            else:
                await self._relay(scope, receive, send)
        except (ReplicaUnavailable, EngineDead, QuotaExceeded) as error:
            self._metrics.count_refusal(getattr(error, "code", "engine_dead"))
            await error_response(error)(scope, receive, send)
        except GemserveError as error:
            await error_response(error)(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_draining:
            raise EngineDead("shutting down")
        body = await _read_body(receive)
        if body is None:
            return
        named = await self._named_documents(scope, body.content)
        request = self._request_of(scope, body, named)
        kept = HeldBytes(self._kept_bodies, request.tenant)
        relaying = _Relaying(scope, receive, send, request, kept)
        self._running.add(relaying)
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(_TELL_PERIOD_S, self._tell_of_slow)
        try:
            await self._try_replicas(relaying, request)
            if request.scope["method"] == "DELETE" and relaying.status == 200:
                await self._forget(request)
            await relaying.finish()
        finally:
            self._running.discard(relaying)
            kept.release()

    async def _change_adapters(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_draining:
            raise EngineDead("shutting down")
        body = await _read_body(receive)
        if body is None:
            return
        request = replace(self._request_of(scope), body=body)
        is_new = scope["method"] == "POST"
        change = self.adapters.load(request) if is_new else self.adapters.unload(request)
        await _response_of(await change)(scope, receive, send)

    async def _try_replicas(self, relaying: _Relaying, request: RelayedRequest) -> None:
        """Answer, on a second replica if the first one is lost before the reply has begun."""
        avoid = frozenset[str]()
        came_s = time.monotonic()
        chunks = await self._chunks(request)
        for is_last_try in (False, True):
            if not await self.adapters.ready():
                raise ReplicaUnavailable("No replica is ready.", code="no_replica")
            hints = self._hints(request, chunks, avoid)
            request = replace(request, waited_s=time.monotonic() - came_s)
            try:
                await self._answer(relaying, hints, request)
                return
            except ReplicaLost as lost:
                log.warning("request %s: %s", relaying.request_id, lost)
                if relaying.is_over:
                    return
                if relaying.has_begun:
                    self._metrics.lost.inc()
                    await relaying.break_off("The replica that was answering is lost.")
                    return
                if is_last_try or relaying.replica is None or not relaying.is_repeatable:
                    self._metrics.lost.inc()
                    raise ReplicaUnavailable(
                        "The replica that was to answer is lost.", code="replica_lost"
                    ) from lost
                avoid = frozenset({relaying.replica})
                self._metrics.retries.inc()
                relaying.give_back()
            except Exception:  # the replica's application has failed, or there is a bug here
                if not relaying.has_begun or relaying.is_over:
                    raise
                log.exception("request %s", relaying.request_id)
                self._metrics.errors.inc()
                await relaying.break_off("internal error", code="internal_error")
                return

    async def _answer(
        self, relaying: _Relaying, hints: RoutingHints, request: RelayedRequest
    ) -> None:
        """Pass on what one replica says. Raises `ReplicaLost`, and refusals of the key's quota."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                watching = asyncio.create_task(self._watch_client(relaying, request, limit))
                try:
                    async with aclosing(self._replicas.answer(hints, request)) as batches:
                        async for batch in batches:
                            for message in batch:
                                await self._take(relaying, request, message)
                finally:
                    watching.cancel()

    async def _watch_client(
        self, relaying: _Relaying, request: RelayedRequest, limit: asyncio.Timeout
    ) -> None:
        """Tell the replica when the client has left, and give it some time to end.

        What it says last is still read: which tokens its key has to pay for. A document is read to
        its end, for which its key's place is held, and all replicas must know it then; likewise
        what is deleted.
        """
        await relaying.client_left()
        goes_on = _stores_document(request) or request.scope["method"] == "DELETE"
        if not goes_on:
            self._end_soon(limit)
        if relaying.replica is not None:
            with suppress(ReplicaLost, ReplicaFailed, ReplicaUnavailable):
                await self._replicas.call(relaying.replica, "leave", request.number)
        if goes_on:
            await relaying.stopped.wait()
            self._end_soon(limit)

    @staticmethod
    def _end_soon(limit: asyncio.Timeout) -> None:
        limit.reschedule(asyncio.get_running_loop().time() + _LEAVE_TIMEOUT_S)

    async def _take(
        self, relaying: _Relaying, request: RelayedRequest, message: FromReplica
    ) -> None:
        match message:
            case Accepted():
                relaying.replica = message.replica
                relaying.keep_body()
            case ChoicesAdded():
                relaying.add_choices(message.count)
            case TokensUsed():
                relaying.charge(message.count, message.age_s)
            case DocumentsStored():
                self._documents.add(request.tenant, message.copies)
                if self._expiring is None:
                    self._expire_later()
            case DocumentsMissing():
                copies = self._documents.find(request.tenant, message.ids)
                assert relaying.replica is not None
                await self._replicas.call(
                    relaying.replica, "adopt", request.tenant, copies, request.number
                )
            case _:
                relaying.is_passing = True
                await relaying.pass_on(dict(message))
                relaying.is_passing = False
                relaying.num_taken += len(message.get("body", b""))
                if relaying.num_taken - relaying.num_told >= _TOLD_BYTES:
                    await self._tell_taken(relaying)

    async def _tell_taken(self, relaying: _Relaying) -> None:
        """Tell the replica how much has been passed on. It waits if that is too little."""
        relaying.num_told = relaying.num_taken
        if relaying.replica is None or relaying.is_over:
            return
        # whether it is lost, the messages that are awaited tell
        with suppress(ReplicaLost, ReplicaFailed, ReplicaUnavailable):
            await self._replicas.call(
                relaying.replica, "taken", relaying.number, relaying.num_taken
            )

    def _tell_of_slow(self) -> None:
        """Tell replicas of clients that read slowly: one that hears nothing waits no longer."""
        for relaying in self._running:
            if relaying.is_passing:
                task = asyncio.ensure_future(self._tell_taken(relaying))
                self._told.add(task)
                task.add_done_callback(self._told.discard)
        self._telling = None
        if self._running:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(_TELL_PERIOD_S, self._tell_of_slow)

    def _expire_later(self) -> None:
        """Look again and again, as long as there are documents: no request may come any more."""
        loop = asyncio.get_running_loop()
        self._expiring = loop.call_later(_EXPIRY_PERIOD_S, self._drop_expired)

    def _drop_expired(self) -> None:
        self._documents.drop_expired()
        self._expiring = None
        if len(self._documents):
            self._expire_later()

    async def _forget(self, request: RelayedRequest) -> None:
        """Have all replicas forget a document that one of them has deleted."""
        document_id = request.scope["path"].removeprefix(f"{DOCUMENTS_PATH}/")
        self._documents.remove(request.tenant, document_id)
        calls = [
            self._replicas.call(name, "forget", request.tenant, (document_id,))
            for name in self._replicas.names()
        ]
        # one that does not answer drops it with the tenant's next request, or when it expires
        await asyncio.gather(*calls, return_exceptions=True)

    async def _named_documents(self, scope: Scope, body: bytes) -> list[str]:
        """The ids of the caller's documents in a body."""
        known = self._documents.ids(_tenant_of(scope))
        if not known:
            return []
        if len(body) < _LONG_BODY:
            return ids_in(body, known)
        return await asyncio.to_thread(ids_in, body, known)

    def _request_of(
        self, scope: Scope, body: RequestBody | None = None, named: Sequence[str] = ()
    ) -> RelayedRequest:
        state = scope["state"]
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        relayed = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
        relayed["headers"] = [*headers, (b"x-request-id", state["request_id"].encode())]
        relayed["client"], relayed["server"] = None, None
        relayed["asgi"], relayed["root_path"] = {"version": "3.0"}, ""
        tenant = _tenant_of(scope)
        return RelayedRequest(
            number=uuid.uuid4().hex,
            scope=relayed,
            body=body or RequestBody(),
            caller=state.get("caller"),
            documents=self._documents.needed(tenant, scope["path"], named),
            gone=self._documents.gone(tenant),
        )

    async def _chunks(self, request: RelayedRequest) -> tuple[TextChunk, ...]:
        """The chunks of a long body's text."""
        path, body = request.scope["path"], request.body.content
        is_read = request.scope["method"] == "POST" and not path.startswith(DOCUMENTS_PATH)
        if not is_read or len(body) <= LEAST_CHUNK:
            return ()
        if len(body) < _LONG_BODY:
            return _body_chunks(body, self._secret, request.tenant)
        return await asyncio.to_thread(_body_chunks, body, self._secret, request.tenant)

    def _hints(
        self, request: RelayedRequest, chunks: tuple[TextChunk, ...], avoid: frozenset[str]
    ) -> RoutingHints:
        """The home of the largest document that the request names, or that its path is about."""
        path = request.scope["path"]
        ids = request.documents
        if path.startswith(f"{DOCUMENTS_PATH}/"):
            ids = (path.removeprefix(f"{DOCUMENTS_PATH}/"),)
        named = [] if path == DOCUMENTS_PATH else self._documents.find(request.tenant, ids)
        largest = max(named, key=lambda copy: copy.num_tokens, default=None)
        is_about = path.startswith(DOCUMENTS_PATH)
        return RoutingHints(
            number=next(self._numbers),
            prompt_tokens=len(request.body.content) // _BYTES_PER_TOKEN,
            answer_tokens=_ANSWER_TOKENS,
            chunks=chunks,
            avoid=avoid,
            home=None if largest is None else largest.home,
            home_tokens=0 if largest is None or is_about else largest.num_tokens,
            is_about_home=largest is not None and is_about,
        )

    async def _ask_all(self, scope: Scope) -> AsyncGenerator[WholeReply, None]:
        """The replies of all replicas, as they come; none of those that do not answer in time."""
        request = self._request_of(scope)
        asking = [asyncio.create_task(self._ask(name, request)) for name in self._replicas.names()]
        try:
            for next_reply in asyncio.as_completed(asking):
                reply = await next_reply
                if reply is not None:
                    yield reply
        finally:
            for task in asking:
                task.cancel()

    async def _ask(self, replica: str, request: RelayedRequest) -> WholeReply | None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reply: WholeReply = await self._replicas.call(replica, "answer_whole", request)
                return reply
        except (ReplicaLost, ReplicaFailed, ReplicaUnavailable, TimeoutError) as error:
            log.debug("replica %s: %s", replica, error)
            return None

    async def _probe(self, scope: Scope) -> Response:
        """A replica's reply that is good, or else one that is not."""
        if scope["path"] == "/ready":
            if self._is_draining:
                return JSONResponse({"status": "shutting down"}, status_code=503)
            if not await self.adapters.ready(PROBE_TIMEOUT_S):
                return JSONResponse({"status": "loading"}, status_code=503)
        bad: WholeReply | None = None
        async with aclosing(self._ask_all(scope)) as replies:
            async for reply in replies:
                if reply.status == 200:
                    return _response_of(reply)
                bad = reply
        if bad is not None:
            return _response_of(bad)
        return JSONResponse({"status": "loading"}, status_code=503)

    async def _tell_metrics(self, scope: Scope) -> Response:
        self.adapters.ready_now()
        replies = [reply async for reply in self._ask_all(scope) if reply.status == 200]
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(replies), media_type=media_type)

    async def _tell_load(self, scope: Scope) -> Response:
        replies = [reply async for reply in self._ask_all(scope) if reply.status == 200]
        return JSONResponse({"server_load": sum(_load_in(reply) for reply in replies)})


class _Relaying:
    """One request of a client, while replicas answer it.

    The reply's beginning is held back until there is a part of its body. So nothing has been sent
    when a replica is lost before it has made any of the answer.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request: RelayedRequest, kept: HeldBytes
    ) -> None:
        """`kept`: what the body takes while it is kept: see `keep_body`."""
        self.replica: str | None = None
        self.request_id = str(scope["state"]["request_id"])
        self.status: int | None = None
        self.is_repeatable = _is_repeatable(request)
        self.has_begun = False
        self.is_over = False  # the client has all, or has left
        self.number = request.number
        self.is_passing = False
        self.num_taken = self.num_told = 0  # bytes of the body, and those that the replica knows of
        self.stopped = asyncio.Event()  # the server stops
        self._scope = scope
        self._path = scope["path"]
        self._receive = receive
        self._send = send
        self._start: Message | None = None
        self._last: Message | None = None
        self._request_body = request.body
        self._kept = kept
        self._body = b""
        self._choices = 0  # that this attempt has added
        self._charges: list[tuple[int, float]] = []  # its tokens, and when they were used

    @property
    def _place(self) -> Any:
        """The place in the key's quota. Only requests with a key have one."""
        return self._scope["state"]["place"]

    def keep_body(self) -> None:
        """A replica has the body. It is kept for another one, if the memory for that has room.

        The memory for bodies that are being read is for others: an answer may take minutes.
        """
        self._scope["state"]["body"].release()
        if not self.is_repeatable or not self._kept.grow(len(self._request_body.content)):
            self.is_repeatable = False
            self._request_body.drop()

    def add_choices(self, count: int) -> None:
        self._place.add_choices(count)
        self._choices += count

    def charge(self, tokens: int, age_s: float) -> None:
        self._place.charge(tokens, age_s)
        self._charges.append((tokens, time.monotonic() - age_s))

    def give_back(self) -> None:
        """Give back what a lost attempt has taken of the quota. The next one takes it again."""
        self.replica = None  # nobody has the request until another replica accepts it
        if self._choices:
            self._place.add_choices(-self._choices)
        for tokens, used_s in self._charges:
            self._place.charge(-tokens, time.monotonic() - used_s)
        self._choices = 0
        self._charges.clear()

    async def client_left(self) -> None:
        """Return when the client has left before its reply was whole, or the server stops."""
        receiving = asyncio.create_task(self._wait_for_disconnect())
        stopping = asyncio.create_task(self.stopped.wait())
        try:
            await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            receiving.cancel()
            stopping.cancel()
        if not stopping.done() and self._last is not None:
            await self.stopped.wait()  # what goes on after the reply is the replica's business
        self.is_over = True

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def stop(self) -> None:
        """The server stops: end the reply with an error, and the replica's work."""
        self._ending = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        with suppress(Exception):  # the client may have left, and the reply may be no stream
            if self._last is None and self.has_begun:
                await self.break_off("The server is shutting down.", code="cancelled")
            elif self._last is None and not self.is_over:
                self.is_over = True
                error = EngineDead("shutting down")
                await error_response(error)(self._scope, self._receive, self._send)
        self.stopped.set()

    async def pass_on(self, message: Message) -> None:
        """Send a message of the application, except for the last one: see `finish`."""
        if message["type"] == "http.response.start":
            headers = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
            self._start = {**message, "headers": headers}
            # also when the client has left: other replicas are told of what was deleted
            self.status = message["status"]
            return
        if self.is_over:
            return
        if not message.get("more_body", False):
            self._last = message
            if not self._waits():
                await self.finish()
            return
        await self._begin()
        self._body = message.get("body", b"")
        await self._send(message)

    def _waits(self) -> bool:
        return self._scope["method"] == "DELETE"  # other replicas are told first

    async def finish(self) -> None:
        """Send the last message. Idempotent."""
        if self._last is not None and not self.is_over:
            await self._begin()
            self.is_over = True
            await self._send(self._last)

    async def _begin(self) -> None:
        if not self.has_begun and self._start is not None:
            self.has_begun = True
            self._request_body.drop()  # no replica gets it any more
            self._kept.release()
            await self._send(self._start)

    async def break_off(self, message: str, code: str = "replica_lost") -> None:
        """End a reply that has begun with one error. Raises if its form does not allow that."""
        assert self._start is not None
        types = [value for name, value in self._start["headers"] if name == b"content-type"]
        if not types or not types[0].startswith(STREAM_TYPES):
            self.is_over = True
            raise ReplicaLost(message)  # the connection ends before the announced length
        words = last_words(self._path, message, code, self.request_id, self._body)
        self._last = {"type": "http.response.body", "body": words, "more_body": False}
        await self.finish()


def _tenant_of(scope: Scope) -> bytes:
    caller = scope["state"].get("caller")
    return b"" if caller is None else caller.key


async def _read_body(receive: Receive) -> RequestBody | None:
    """The whole body; None if the client has left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return RequestBody(b"".join(parts))


def _changes_adapters(method: str, path: str) -> bool:
    is_load = method == "POST" and path == ADAPTERS_PATH
    return is_load or (method == "DELETE" and path.startswith(f"{ADAPTERS_PATH}/"))


def _body_chunks(body: bytes, secret: bytes, tenant: bytes) -> tuple[TextChunk, ...]:
    """The chunks of a body's JSON, from the field on whose text is read.

    The JSON is not parsed: the same text is written with the same escapes each time, and where it
    is cut depends on its bytes alone. What a model, or an adapter, has read is of no use to others,
    so its name is in the salt.
    """
    model, text = _MODEL.search(body), _TEXT.search(body)
    name = "" if model is None else model[1].decode("utf-8", "replace")
    salt = chunk_salt(secret, tenant.hex(), name)
    start = 0 if text is None else text.start()
    return text_chunks(body[start:].decode("utf-8", "replace"), salt)


def _is_repeatable(request: RelayedRequest) -> bool:
    """May the request be sent again after a replica had it? Storing a document may not."""
    return request.scope["method"] in ("GET", "POST") and not _stores_document(request)


def _stores_document(request: RelayedRequest) -> bool:
    return request.scope["method"] == "POST" and request.scope["path"] == DOCUMENTS_PATH


def _response_of(reply: WholeReply) -> Response:
    response = Response(reply.body, status_code=reply.status)
    response.raw_headers = [pair for pair in reply.headers if pair[0] != b"x-request-id"]
    return response


def _load_in(reply: WholeReply) -> int:
    return int(json.loads(reply.body)["server_load"])
