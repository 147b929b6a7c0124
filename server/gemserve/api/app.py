"""The HTTP application: middleware, error replies, and the routes of every endpoint."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from itertools import chain

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import gemserve
from gemserve.api.access.backlog import Backlog
from gemserve.api.access.body_limit import BodyLimit
from gemserve.api.access.head_requests import HeadRequests
from gemserve.api.access.reply_memory import HeldLogprobs, HeldReply, ReplyMemory
from gemserve.api.documents.document_store import DocumentStore
from gemserve.api.documents.file_queue import FileQueue
from gemserve.api.error_replies import error_body, error_response
from gemserve.api.openapi import write_document
from gemserve.api.outer_middleware import Counts, add_outer_middleware, add_request_id
from gemserve.api.replies.failures import EndedEarly, failure_response
from gemserve.api.requests.field_schemas import Json
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.schema_trials import SchemaTrials
from gemserve.api.requests.turns import TextTurns
from gemserve.api.routes.adapters import LoadAdapter, adapter_routes
from gemserve.api.routes.completions import completion_routes
from gemserve.api.routes.document_text import document_text_routes
from gemserve.api.routes.documents import document_routes
from gemserve.api.routes.filter import filter_routes
from gemserve.api.routes.health import health_routes
from gemserve.api.routes.inspector import inspector_routes
from gemserve.api.routes.models import model_routes
from gemserve.api.routes.not_served import not_served
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.server_state import server_state_routes
from gemserve.api.routes.submission import SegmentSharing, Submitter
from gemserve.api.routes.tokenizing import tokenizing_routes
from gemserve.api.serving import Serving
from gemserve.api.telemetry.server_metrics import Metrics
from gemserve.api.telemetry.traces import Traces
from gemserve.config import ServerConfig
from gemserve.errors import GemserveError
from gemserve.files.limited_process import ReadingLimits
from gemserve.wings import AppParts, OpenedWing, wings


def create_app(
    serving: Serving,
    traces: Traces | None = None,
    *,
    is_replica: bool = False,
    new_sharing: Callable[[Backlog, Metrics], SegmentSharing] | None = None,
    load_adapter: LoadAdapter | None = None,
) -> FastAPI:
    """The application over one engine. Tests use it in process, through an ASGI transport.

    It stops the engine and the export of `traces`, and closes the wings, when it shuts down. Raises
    `ConfigError` if its key files are wrong. `is_replica`: requests have passed the outer
    middleware of an ingress, which has put the caller into their state. `new_sharing`: makes what
    has other replicas read parts of long documents, if there are any. `load_adapter`: what
    `POST /v1/adapters` does there instead of loading. The state of the application has what a
    replica shows its ingress: `backlog` and `documents`.
    """
    config = serving.config
    backlog = Backlog(max_tokens=config.max_queued_tokens)
    documents = DocumentStore(config, serving.engine.forget_documents)
    metrics = Metrics(serving.engine, serving.adapters, serving.model_name, serving.backend)
    opened = [wing.open(serving) for wing in wings()]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # while nobody waits: the first document of a process takes 0.16 s
        metrics.loop_watch.start()
        async with AsyncExitStack() as ending:  # the last is first, and each runs if others fail
            if traces is not None:
                ending.push_async_callback(partial(to_thread.run_sync, traces.shut_down))
            for wing in opened:
                ending.push_async_callback(partial(to_thread.run_sync, wing.close))
            ending.push_async_callback(partial(to_thread.run_sync, serving.engine.stop))
            if serving.watchdog is not None:
                ending.callback(serving.watchdog.stop)
            ending.callback(metrics.loop_watch.stop)
            yield

    app = FastAPI(
        title="gemserve",
        version=gemserve.__version__,
        lifespan=lifespan,
        redirect_slashes=False,  # a path that is not in the document is a 404
    )
    sharing = None if new_sharing is None else new_sharing(backlog, metrics)
    operations: dict[str, Operation] = {}
    for routes in _all_routes(
        serving, metrics, traces, backlog, documents, opened, sharing, load_adapter
    ):
        app.include_router(routes)
        operations |= routes.operations
    app.include_router(inspector_routes())

    @cache
    def document() -> Json:
        return write_document(operations, config, serving.model_name)

    app.openapi = document  # type: ignore[method-assign]
    app.state.backlog, app.state.documents = backlog, documents
    _add_middleware(app, config, metrics, is_replica=is_replica)
    _add_error_replies(app, operations)
    return app


def _all_routes(
    serving: Serving,
    metrics: Metrics,
    traces: Traces | None,
    backlog: Backlog,
    documents: DocumentStore,
    opened: Sequence[OpenedWing],
    sharing: SegmentSharing | None,
    load_adapter: LoadAdapter | None,
) -> list[Routes]:
    """The routes of all endpoints, in the order in which the document has them."""
    engine, builder, config = serving.engine, serving.builder, serving.config
    models = ModelNames(serving.model_name, serving.adapters, serving.also_named)
    submitter = Submitter(
        engine=engine,
        models=models,
        metrics=metrics,
        documents=documents,
        trials=SchemaTrials(builder.grammars),
        keep_alive_s=config.keep_alive_s,
        max_wait_s=config.max_wait_s,
        timeout_s=config.request_timeout_s,
        backlog=backlog,
        turns=TextTurns(backlog.is_alone),
        traces=traces,
        sharing=sharing,
        excerpts=next((wing.excerpts for wing in opened if wing.excerpts is not None), None),
    )
    parts = AppParts(serving=serving, submitter=submitter, models=models)
    files = FileQueue(
        ReadingLimits(text_bytes=config.max_document_bytes, unpacked_bytes=config.max_body_bytes)
    )
    return [
        completion_routes(submitter, builder),
        filter_routes(submitter, builder),
        document_routes(submitter, builder, documents, files),
        document_text_routes(submitter, files),
        tokenizing_routes(builder, models, documents, submitter.turns),
        model_routes(models, builder.context_tokens),
        adapter_routes(models, config, load_adapter),
        health_routes(engine, serving.backend, metrics, serving.watchdog),
        server_state_routes(
            engine,
            builder,
            serving.backend,
            model_name=serving.model_name,
            engine_config=serving.engine_config,
            config=config,
        ),
        *chain.from_iterable(wing.routes(parts) for wing in opened),
    ]


def _add_middleware(
    app: FastAPI, config: ServerConfig, metrics: Metrics, *, is_replica: bool
) -> None:
    """The last one added sees a request first and its reply last."""
    app.add_middleware(HeadRequests)
    app.add_middleware(ReplyMemory, kind=HeldReply, memory_bytes=config.reply_memory_bytes)
    app.add_middleware(ReplyMemory, kind=HeldLogprobs, memory_bytes=config.logprobs_memory_bytes)
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        memory_bytes=config.body_memory_bytes,
        timeout_s=config.body_timeout_s,
    )
    counts = Counts(
        refusal=lambda code: metrics.rejections.labels(code).inc(),
        reply=lambda status: metrics.http_responses.labels(status).inc(),
        error=partial(metrics.internal_errors.count, "request"),
    )
    if is_replica:
        add_request_id(app, counts)
    else:
        add_outer_middleware(app, config, counts)


def _add_error_replies(app: FastAPI, operations: Iterable[str]) -> None:
    @app.exception_handler(GemserveError)
    async def reply_to_gemserve_error(_: Request, error: GemserveError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(EndedEarly)
    async def reply_to_early_end(_: Request, error: EndedEarly) -> JSONResponse:
        return failure_response(error.finished)

    @app.exception_handler(HTTPException)
    async def reply_to_http_error(http: Request, error: HTTPException) -> Response:
        message, headers, path = str(error.detail), error.headers, http.scope["path"]
        if http.method == "OPTIONS" and path == "*":  # asks for what the whole server allows
            return Response(status_code=204, headers=_allowed(op.split()[0] for op in operations))
        if error.status_code == 404:
            message = not_served(path)
        body = error_body(message, kind="invalid_request_error")
        if error.status_code == 405:
            headers = _allow_header(operations, path) or headers
        return JSONResponse(body, status_code=error.status_code, headers=headers)


def _allow_header(operations: Iterable[str], path: str) -> dict[str, str] | None:
    """All methods of a path. The framework names those of its first route only.

    `operations`: all routes, as "METHOD /path".
    """
    methods: dict[str, set[str]] = {}
    for operation in operations:
        method, _, template = operation.partition(" ")
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(template)), path):
            methods.setdefault(template, set()).add(method)
    if not methods:
        return None
    return _allowed(methods[max(methods, key=len)])  # a parameter may be a path, and match ends


def _allowed(methods: Iterable[str]) -> dict[str, str]:
    found = set(methods)
    return {"Allow": ", ".join(sorted({*found, "HEAD"} if "GET" in found else found))}
