"""Take a request to the engine: read its body, parse it, build engine requests, submit them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from anyio import to_thread
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gemserve.api.access.backlog import Backlog
from gemserve.api.access.request_id import request_id_of
from gemserve.api.replies.event_reader import EventReader, Observer, Observers
from gemserve.api.requests.base_bodies import FilteringBody
from gemserve.api.requests.engine_requests import EngineRequests
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.model_names import AdapterReference, ModelNames
from gemserve.api.telemetry.server_metrics import Metrics
from gemserve.api.telemetry.traces import Traces
from gemserve.engine.worker import Engine
from gemserve.errors import AdapterBusy, AdapterUnavailable, QueueFull, RequestError
from gemserve.types import LoadedAdapter

BodyT = TypeVar("BodyT", bound=FilteringBody)
Build = Callable[[BodyT, str, LoadedAdapter | None], EngineRequests]


@dataclass(frozen=True, slots=True)
class Submission(Generic[BodyT]):
    """A request that the engine works on. `reader` reads its events."""

    body: BodyT
    requests: EngineRequests
    reader: EventReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    engine: Engine
    models: ModelNames
    metrics: Metrics
    keep_alive_s: float
    traces: Traces | None = None
    backlog: Backlog = field(default_factory=Backlog)

    async def submit(
        self, http: Request, body_type: type[BodyT], build: Build[BodyT]
    ) -> Submission[BodyT]:
        """Parse the body of `http` and submit what `build` makes of it. Counts refusals.

        Raises what makes a request fail before anything is sent.
        """
        arrived_s = time.monotonic()
        request_id = request_id_of(http)
        try:
            self.engine.check_room()  # a full queue answers before anything is parsed or tokenized
            raw = await read_body(http)
            body, requests = await to_thread.run_sync(
                self._parse_and_build, raw, body_type, build, request_id
            )
            if isinstance(requests, AdapterReference):
                adapter = await self.models.load(requests)
                requests = await to_thread.run_sync(build, body, request_id, adapter)
            caller = http.scope["state"].get("caller")
            tenant = b"" if caller is None else caller.key
            streams = self.engine.submit_all(
                [replace(request, tenant=tenant) for request in requests.requests]
            )
        except (QueueFull, AdapterBusy) as error:
            self.metrics.rejections.labels(error.code).inc()
            error.retry_after_s = self.backlog.retry_after_s()
            raise
        except AdapterUnavailable as error:
            self.metrics.rejections.labels(error.code).inc()
            raise
        except RequestError as error:
            self.metrics.rejections.labels(_reason(error)).inc()
            raise
        observers: list[list[Observer]] = [
            [self.metrics.observer(stream.request, arrived_s), self.backlog.enter(stream.request)]
            for stream in streams
        ]
        if self.traces is not None:
            traced = self.traces.begin(
                http.scope, requests.requests, requests.n, model=body.model, arrived_s=arrived_s
            )
            for some, observer in zip(observers, traced, strict=True):
                some.append(observer)
        joined = [Observers(*some) for some in observers]
        reader = EventReader(http, streams, joined, keep_alive_s=self.keep_alive_s)
        return Submission(body, requests, reader)

    def _parse_and_build(
        self, raw: bytes, body_type: type[BodyT], build: Build[BodyT], request_id: str
    ) -> tuple[BodyT, EngineRequests | AdapterReference]:
        """All of the slow work; runs off the event loop.

        If an adapter must be loaded first, it returns a reference to it in place of the requests.
        """
        body = parse_body(raw, body_type)
        reference = self.models.find_reference(body)
        if reference is None:
            return body, build(body, request_id, None)
        adapter = self.models.find_in_memory(reference)
        if adapter is None:
            return body, reference
        return body, build(body, request_id, adapter)


async def read_body(http: Request) -> bytes:
    try:
        return await http.body()
    except ClientDisconnect as error:
        raise HTTPException(499, "the client left") from error  # nobody reads it


def _reason(error: RequestError) -> str:
    """The label with which metrics count this refusal."""
    reasons = {
        "context_length_exceeded": "prompt_too_long",
        "model_not_found": "unknown_model",
        "adapter_not_found": "unknown_adapter",
    }
    return reasons.get(error.code, "invalid_request")
