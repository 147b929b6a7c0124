"""Take a request to the engine: read its body, parse it, build engine requests, submit them."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gemserve.api.access.backlog import Backlog, in_header
from gemserve.api.access.keys import tenant_of
from gemserve.api.access.quota import TokenCharges
from gemserve.api.access.request_id import request_id_of
from gemserve.api.documents.document_store import DocumentStore
from gemserve.api.documents.finder import Finder
from gemserve.api.replies.event_reader import AtEnd, EventReader, Observer, Observers
from gemserve.api.replies.failures import ABORTED, EndedEarly
from gemserve.api.requests.base_bodies import FilterBody, FilteringBody, ModelBody
from gemserve.api.requests.client_timeout import Timeout, timeout_of
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.first_difference import EarlierPrompts
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.memory_fields import memory_fields_named
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.schema_trials import SchemaTrials
from gemserve.api.requests.turns import LONG_BYTES, TextTurns, TextWait
from gemserve.api.telemetry.server_metrics import Metrics
from gemserve.api.telemetry.traces import Traces
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Event, Finished
from gemserve.contract.requests import Request as EngineRequest
from gemserve.engine.stream import Stream
from gemserve.engine.worker import Engine
from gemserve.errors import (
    AdapterBusy,
    AdapterUnavailable,
    PdfsBusy,
    QueueFull,
    QuotaExceeded,
    RequestError,
    SchemasBusy,
    WaitTooLong,
)
from gemserve.holdings import Holdings
from gemserve.prompting.encoding import num_bytes

_COPIES = 2  # of an echoed text while its reply is written
BodyT = TypeVar("BodyT", bound=ModelBody)
Build = Callable[[BodyT, str, LoadedAdapter | None], EngineRequests]


@dataclass(frozen=True, slots=True)
class Submission(Generic[BodyT]):
    """A request that the engine works on. `reader` reads its events."""

    body: BodyT
    requests: EngineRequests
    reader: EventReader


@dataclass(frozen=True, slots=True)
class _Built(Generic[BodyT]):
    """What became of a body. `waited_s`: for how many seconds its text has waited for its turn."""

    body: BodyT
    requests: EngineRequests
    timeout: Timeout
    waited_s: float


class SegmentSharing(Protocol):
    """Submits to the engine, and has other replicas read parts of long documents."""

    def submit_all(
        self, requests: Sequence[EngineRequest], n: int
    ) -> tuple[list[Stream], Observer | None]:
        """Do as `Engine.submit_all`. Each `n` requests are of one prompt.

        The observer, if there is one, must be closed when the streams are no longer read.
        """
        ...


class ExcerptFinder(Protocol):
    """Finds text elsewhere that a question is then asked behind, as `filter.library` wants."""

    async def put_in_front(
        self,
        http: Request,
        wanted: FilterBody,
        alone: EngineRequest,
        again: Callable[[int], Awaitable[EngineRequests]],
        read: Callable[[EngineRequest], Awaitable[Finished]],
        wait: TextWait,
    ) -> EngineRequests:
        """The requests with what was found. `alone`: one without, with the limit of its wait.

        `again` builds them anew, after `wanted` was told of a text of so many bytes. `read` has the
        engine read a request, for as long as the client waits. It raises `EndedEarly`. `wait`: that
        of the request's texts, which waiting for other searches counts for.
        """
        ...


class Preparing:
    """Counts the requests that are being parsed and tokenized. They will need a place in the queue.

    It is used on the event loop only, so it needs no lock.
    """

    def __init__(self) -> None:
        self._requests = Holdings()

    @contextmanager
    def one_more(self, engine: Engine, tenant: bytes) -> Iterator[None]:
        """Raises `QueueFull` if there would be no place for this one beside the others."""
        own = self._requests.of(tenant)
        of_others = self._requests.used - own
        engine.check_room(tenant=tenant, on_their_way=own, of_others=of_others)
        with self._requests.one_more(tenant):
            yield

    @contextmanager
    def one_less(self, tenant: bytes) -> Iterator[None]:
        """Meanwhile one of these has a place in the queue."""
        self._requests.give_back(tenant)
        try:
            yield
        finally:
            self._requests.take(tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    engine: Engine
    models: ModelNames
    metrics: Metrics
    documents: DocumentStore
    trials: SchemaTrials
    keep_alive_s: float
    timeout_s: float
    max_wait_s: float | None = None
    traces: Traces | None = None
    sharing: SegmentSharing | None = None
    excerpts: ExcerptFinder | None = None
    backlog: Backlog = field(default_factory=Backlog)
    earlier: EarlierPrompts = field(default_factory=EarlierPrompts)
    preparing: Preparing = field(default_factory=Preparing)
    turns: TextTurns = field(default_factory=TextTurns)

    async def submit(
        self, http: Request, body_type: type[BodyT], build: Build[BodyT]
    ) -> Submission[BodyT]:
        """Parse the body of `http` and submit what `build` makes of it. Counts refusals.

        Raises what makes a request fail before anything is sent.
        """
        arrived_s = time.monotonic()
        tenant = tenant_of(http)
        finder = Finder(self.documents, tenant)
        with self.counting_refusals():
            self.check_room(tenant)  # a full queue answers before anything is parsed or tokenized
            self.check_wait(tenant)
            raw = await read_body(http)
            built = await self._build(http, raw, body_type, build, finder)
            self.check_room(tenant)  # others may have come meanwhile
            finder.check_still_there()  # from here on, forgetting a document reaches the request
            self._take_room(http, built.requests, tenant)
            sendable = self._sendable(http, built, finder)
            with memory_fields_named(built.body):
                streams, shared = self._submit_all(sendable, built.requests.n)
        reader = EventReader(
            http,
            streams,
            self._observers_of(http, built, streams, shared, arrived_s),
            keep_alive_s=self.keep_alive_s,
            timeout=built.timeout,
            count_late=self._count_late,
            count_unbuilt=partial(self.metrics.internal_errors.count, "stream"),
            begin_within_s=streams[0].request.begin_within_s,
        )
        return Submission(built.body, built.requests, reader)

    async def _build(
        self,
        http: Request,
        raw: bytes,
        body_type: type[BodyT],
        build: Build[BodyT],
        finder: Finder,
    ) -> _Built[BodyT]:
        """Parse a body, and build engine requests of it when its turn comes."""
        request_id, tenant = request_id_of(http), tenant_of(http)
        waited_s = http.scope["state"].get("waited_s", 0.0)  # in an ingress
        came_s = time.monotonic() - waited_s
        # whether it is streamed is not known yet
        timeout = timeout_of(http, self.timeout_s, came_s, is_streamed=True)
        with (
            self.preparing.one_more(self.engine, tenant),
            self.backlog.expecting(tenant, len(raw)),
        ):
            parse = partial(self._parse_and_build, raw, body_type, build, request_id, finder)
            wait = TextWait(*self.most_wait(timeout), waited_s)
            run = partial(self.turns.run, http, tenant, wait=wait)
            body, requests = await self.trials.run(partial(run, len(raw), parse), tenant)
            if requests is None:
                reference = self.models.find_reference(body)
                adapter = None if reference is None else await self.models.load(reference)
                rest = partial(build, body, request_id, adapter)
                size = len(raw) + finder.num_chars
                requests = await self.trials.run(partial(run, size, rest), tenant)
            is_streamed = bool(getattr(body, "is_streamed", getattr(body, "stream", False)))
            timeout = timeout_of(http, self.timeout_s, came_s, is_streamed=is_streamed)
            built = _Built(body, requests, timeout, wait.waited_s)
            wanted = body.filter if isinstance(body, FilteringBody) else None
            if wanted is None or not wanted.libraries:
                return built
            anew = partial(build, body, request_id, requests.requests[0].adapter)
            found = await self._with_excerpts(http, built, wanted, partial(run, work=anew), wait)
            return replace(built, requests=found, waited_s=wait.waited_s)

    async def _with_excerpts(
        self,
        http: Request,
        built: _Built[BodyT],
        wanted: FilterBody,
        again: Callable[[int], Awaitable[EngineRequests]],
        wait: TextWait,
    ) -> EngineRequests:
        """The requests with what was found in libraries. `again`, `wait`: see `ExcerptFinder`."""
        if self.excerpts is None:
            raise RequestError(
                "filter.library: this server has no libraries; start it with --library-dir",
                param="filter.library",
                code="no_libraries",
            )
        alone = replace(
            built.requests.requests[0],
            tenant=tenant_of(http),
            cache_salt=_cache_salt(built.body),
            begin_within_s=self._begin_within_s(built.timeout, built.waited_s),
        )
        read = partial(self._read, http, built.timeout)
        return await self.excerpts.put_in_front(http, wanted, alone, again, read, wait)

    def _take_room(self, http: Request, requests: EngineRequests, tenant: bytes) -> None:
        """Take what is counted of the requests, beside their body, until they have ended."""
        state = http.scope["state"]
        state["body"].release()
        # choices share a prompt
        self.backlog.check_room(tenant, requests.num_tokens // requests.n)
        state["logprobs"].take(requests.num_scores)
        state["reply"].take(_echo_bytes(requests), "echo")
        if state.get("caller") is not None:
            state["place"].add_choices(len(requests.requests) - 1)

    def _sendable(self, http: Request, built: _Built[BodyT], finder: Finder) -> list[EngineRequest]:
        """The requests with what the engine must know beside their prompts."""
        tenant, state = tenant_of(http), http.scope["state"]
        requests, body = built.requests, built.body
        parts = requests.requests[0].parts
        difference = None if parts is None else self.earlier.difference(tenant, parts)
        state["first_difference"] = difference  # for the log
        # of several prompts, none is of use without the others
        has_one_prompt = len(requests.requests) == requests.n
        within_s = self._begin_within_s(built.timeout, built.waited_s)
        return [
            replace(
                request,
                tenant=tenant,
                cache_salt=_cache_salt(body),
                first_difference=difference,
                documents=finder.ids + _file_ids(body),
                # of several prompts, none can be told from the text as a whole
                notes=state.get("notes") if has_one_prompt else None,
                # its first choice begins first, and ends the others if it cannot
                begin_within_s=within_s if has_one_prompt and index == 0 else math.inf,
            )
            for index, request in enumerate(requests.requests)
        ]

    def _observers_of(
        self,
        http: Request,
        built: _Built[BodyT],
        streams: Sequence[Stream],
        shared: Observer | None,
        arrived_s: float,
    ) -> list[Observers]:
        """What sees the events of each request that was sent. `shared`: see `SegmentSharing`."""
        state, n = http.scope["state"], built.requests.n
        observers = [
            self.observers(stream, arrived_s, is_further_choice=index % n > 0)
            for index, stream in enumerate(streams)
        ]
        if shared is not None:
            observers[0].append(shared)
        if state.get("notes") is not None:
            state["notes"].is_queued = True
        if state.get("caller") is not None:
            place = state["place"]
            num_tokens = built.requests.num_tokens
            place.charge(num_tokens)
            for some in observers:  # the first one that is told that nothing was read ends all
                some.append(TokenCharges(place, num_tokens))
        if self.traces is not None:
            sent = [stream.request for stream in streams]
            traced = self.traces.begin(
                http.scope,
                sent,
                n,
                model=built.body.model or self.models.model,  # rerankings may leave it out
                arrived_s=arrived_s,
            )
            for some, observer in zip(observers, traced, strict=True):
                some.append(observer)
        return [Observers(*some) for some in observers]

    def _submit_all(
        self, requests: Sequence[EngineRequest], n: int
    ) -> tuple[list[Stream], Observer | None]:
        if self.sharing is None:
            return self.engine.submit_all(requests), None
        return self.sharing.submit_all(requests, n)

    async def _read(self, http: Request, timeout: Timeout, request: EngineRequest) -> Finished:
        """The end of a request that another one waits for. Raises `EndedEarly`."""
        reader = EventReader(
            http,
            [self.engine.submit(request)],
            [Observers()],
            keep_alive_s=self.keep_alive_s,
            timeout=timeout,
            count_late=self._count_late,
            count_unbuilt=partial(self.metrics.internal_errors.count, "request"),
        )
        events: list[Event] = [ABORTED]
        with self.preparing.one_less(tenant_of(http)):
            await reader.read_to_end(events.append)
        last = events[-1]
        assert isinstance(last, Finished), "each stream ends with it"
        if last.late is not None or last.reason == "abort":
            raise EndedEarly(last)
        return last

    def _begin_within_s(self, timeout: Timeout, waited_s: float) -> float:
        """Within how many seconds the engine must begin. `waited_s`: so long its text has waited.

        The work on its own text took as long as it had to.
        """
        left_s = timeout.ends_s - time.monotonic()
        return left_s if self.max_wait_s is None else min(left_s, self.max_wait_s - waited_s)

    def check_room(self, tenant: bytes) -> None:
        """Raise `QueueFull` or `EngineDead` if a request of `tenant` would not be taken."""
        self.engine.check_room(tenant=tenant)
        self.backlog.check_room(tenant)

    def check_wait(self, tenant: bytes) -> None:
        """Raise `WaitTooLong` if a request of `tenant` would wait for longer than it may.

        What was let in is not asked again: others have come by then, who were told that it is here.
        """
        if self.max_wait_s is not None:
            wait_s = self.backlog.wait_s(tenant)
            if wait_s > self.max_wait_s:
                raise WaitTooLong(wait_s=wait_s, limit_s=self.max_wait_s)

    def most_wait(self, timeout: Timeout) -> tuple[float, str]:
        """For how many seconds a text may wait, and what says so."""
        if self.max_wait_s is not None and self.max_wait_s < timeout.seconds:
            return self.max_wait_s, "--max-wait"
        return timeout.seconds, timeout.name

    def _count_late(self) -> int:
        """Count a request that nothing was read of, and say when to try again."""
        self.metrics.rejections.labels(WaitTooLong.code).inc()
        return self.backlog.retry_after_s()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count what makes a request fail before it runs, and say when to try again."""
        try:
            yield
        except WaitTooLong as error:  # other keys' requests do not all come before it
            self.metrics.rejections.labels(error.code).inc()
            error.retry_after_s = in_header(error.wait_s)
            raise
        except (QueueFull, AdapterBusy) as error:
            self.metrics.rejections.labels(error.code).inc()
            error.retry_after_s = self.backlog.retry_after_s()
            raise
        except (AdapterUnavailable, PdfsBusy, QuotaExceeded, SchemasBusy) as error:
            self.metrics.rejections.labels(error.code).inc()
            raise
        except RequestError as error:
            self.metrics.rejections.labels(_reason(error)).inc()
            raise

    def observers(
        self, stream: Stream, arrived_s: float, *, is_further_choice: bool = False
    ) -> list[Observer]:
        """What sees the events of a request in any case. `is_further_choice`: see `Backlog`."""
        job = self.backlog.enter(stream.request, is_further_choice=is_further_choice)
        stream.on_event = job.see  # a client that reads slowly is no work
        return [self.metrics.observer(stream.request, arrived_s), AtEnd(job.close)]

    def _parse_and_build(
        self,
        raw: bytes,
        body_type: type[BodyT],
        build: Build[BodyT],
        request_id: str,
        finder: Finder,
    ) -> tuple[BodyT, EngineRequests | None]:
        """All of the slow work; runs off the event loop.

        It returns no requests if an adapter must be loaded first, or if documents make the texts
        long, which must be built when their turn comes.
        """
        body = parse_body(raw, body_type, finder)
        if finder.num_chars > LONG_BYTES:
            return body, None
        reference = self.models.find_reference(body)
        if reference is None:
            return body, build(body, request_id, None)
        adapter = self.models.find_in_memory(reference)
        if adapter is None:
            return body, None
        return body, build(body, request_id, adapter)


async def read_body(http: Request) -> bytes:
    """The whole body, which nothing else keeps: `Request.body` would, until the reply has ended."""
    try:
        return b"".join([piece async for piece in http.stream()])
    except ClientDisconnect as error:
        raise HTTPException(499, "the client left") from error  # nobody reads it


def _echo_bytes(requests: EngineRequests) -> int:
    """Bytes that the echoes of all choices take, as text and as what is sent."""
    return _COPIES * requests.n * sum(map(num_bytes, requests.echoes))


def _cache_salt(body: ModelBody) -> str:
    return (isinstance(body, FilteringBody) and body.cache_salt) or ""


def _file_ids(body: ModelBody) -> tuple[str, ...]:
    """The files of libraries that the prompt has excerpts of."""
    wanted = body.filter if isinstance(body, FilteringBody) else None
    found = None if wanted is None else wanted.answerable
    return () if found is None else found.file_ids


def _reason(error: RequestError) -> str:
    """The label with which metrics count this refusal."""
    reasons = {
        "context_length_exceeded": "prompt_too_long",
        "model_not_found": "unknown_model",
        "adapter_not_found": "unknown_adapter",
        "document_not_found": "unknown_document",
        "library_not_found": "unknown_library",
    }
    return reasons.get(error.code, "invalid_request")
