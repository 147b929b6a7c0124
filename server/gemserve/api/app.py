"""The HTTP application: middleware, error replies, and the routes of every endpoint."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import gemserve
from gemserve.api.access.backlog import Backlog
from gemserve.api.access.body_limit import BodyLimit
from gemserve.api.access.gate import Gate
from gemserve.api.access.host_check import HostCheck, allowed_hosts
from gemserve.api.access.keys import open_keys
from gemserve.api.access.logprob_limit import LogprobLimit
from gemserve.api.access.quota import Quota
from gemserve.api.access.request_id import RequestId
from gemserve.api.anthropic.errors import AnthropicErrors
from gemserve.api.anthropic.routes import anthropic_routes
from gemserve.api.documents.pdf_queue import PdfQueue
from gemserve.api.documents.pdf_text import PdfLimits
from gemserve.api.documents.store import DocumentStore
from gemserve.api.error_replies import error_body, error_response
from gemserve.api.openai_responses.routes import openai_responses_routes
from gemserve.api.openapi import write_document
from gemserve.api.replies.token_counts import (
    FILTER_HEADER,
    KEPT_TOKENS_HEADER,
    MAX_TOKENS_HEADER,
    PROMPT_TOKENS_HEADER,
)
from gemserve.api.requests.field_schemas import Json
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.requests.schema_trials import SchemaTrials
from gemserve.api.routes.adapters import adapter_routes
from gemserve.api.routes.completions import completion_routes
from gemserve.api.routes.document_text import document_text_routes
from gemserve.api.routes.documents import document_routes
from gemserve.api.routes.filter import filter_routes
from gemserve.api.routes.health import health_routes
from gemserve.api.routes.inspector import inspector_routes
from gemserve.api.routes.models import model_routes
from gemserve.api.routes.not_served import not_served
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter
from gemserve.api.routes.tokenizing import tokenizing_routes
from gemserve.api.serving import Serving
from gemserve.api.telemetry.server_metrics import Metrics
from gemserve.api.telemetry.traces import Traces
from gemserve.config import ServerConfig
from gemserve.errors import GemserveError

# the reply's headers that a page of another origin may read
EXPOSED_HEADERS = (
    "Retry-After",
    "X-Request-Id",
    PROMPT_TOKENS_HEADER,
    KEPT_TOKENS_HEADER,
    MAX_TOKENS_HEADER,
    FILTER_HEADER,
)


def create_app(serving: Serving, traces: Traces | None = None) -> FastAPI:
    """The application over one engine. Tests use it in process, through an ASGI transport.

    It stops the engine and the export of `traces` when it shuts down. Raises `ConfigError` if its
    key files are wrong.
    """
    config = serving.config
    metrics = Metrics(serving.engine, serving.adapters, serving.model_name, serving.backend)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if serving.watchdog is not None:
            serving.watchdog.stop()
        await to_thread.run_sync(serving.engine.stop)
        if traces is not None:
            await to_thread.run_sync(traces.shut_down)

    app = FastAPI(
        title="gemserve",
        version=gemserve.__version__,
        lifespan=lifespan,
        redirect_slashes=False,  # a path that is not in the document is a 404
    )
    operations: dict[str, Operation] = {}
    for routes in _all_routes(serving, metrics, traces):
        app.include_router(routes)
        operations |= routes.operations
    app.include_router(inspector_routes())

    @cache
    def document() -> Json:  # written when it is first wanted
        return write_document(operations, config, serving.model_name)

    app.openapi = document  # type: ignore[method-assign]
    _add_middleware(app, config, metrics)
    _add_error_replies(app, document)
    return app


def _all_routes(serving: Serving, metrics: Metrics, traces: Traces | None) -> list[Routes]:
    """The routes of all endpoints, in the order in which the document has them."""
    engine, builder, config = serving.engine, serving.builder, serving.config
    models = ModelNames(serving.model_name, serving.adapters)
    documents = DocumentStore(config, engine.forget_documents)
    submitter = Submitter(
        engine=engine,
        models=models,
        metrics=metrics,
        documents=documents,
        trials=SchemaTrials(builder.grammars),
        keep_alive_s=config.keep_alive_s,
        max_wait_s=config.max_wait_s,
        timeout_s=config.request_timeout_s,
        backlog=Backlog(max_tokens=config.max_queued_tokens),
        traces=traces,
    )
    pdfs = PdfQueue(PdfLimits(text_bytes=config.max_document_bytes))
    return [
        completion_routes(submitter, builder),
        openai_responses_routes(submitter, builder),
        anthropic_routes(submitter, builder),
        filter_routes(submitter, builder),
        document_routes(submitter, builder, documents, pdfs),
        document_text_routes(submitter, pdfs),
        tokenizing_routes(builder, models, documents, submitter.long_texts),
        model_routes(models, builder.context_tokens),
        adapter_routes(models, config),
        health_routes(engine, serving.backend, metrics, serving.watchdog),
    ]


def _add_middleware(app: FastAPI, config: ServerConfig, metrics: Metrics) -> None:
    """The last one added sees a request first and its reply last."""

    def count_refusal(code: str) -> None:
        metrics.rejections.labels(code).inc()

    app.add_middleware(LogprobLimit, memory_bytes=config.logprobs_memory_bytes)
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        memory_bytes=config.body_memory_bytes,
        timeout_s=config.body_timeout_s,
    )
    keys = open_keys(config)
    if keys is not None:
        quota = Quota(
            requests_per_minute=config.requests_per_minute,
            concurrency_per_key=config.concurrency_per_key,
            tokens_per_minute=config.tokens_per_minute,
        )
        app.add_middleware(Gate, keys=keys, quota=quota, on_refusal=count_refusal)
    if config.cors_origins:  # outside the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    hosts = allowed_hosts(config)
    if hosts is not None:
        app.add_middleware(HostCheck, names=hosts, on_refusal=count_refusal)
    app.add_middleware(
        RequestId,
        on_reply=lambda status: metrics.http_responses.labels(status).inc(),
        on_error=partial(metrics.internal_errors.count, "request"),
    )
    app.add_middleware(AnthropicErrors)


def _add_error_replies(app: FastAPI, document: Callable[[], Json]) -> None:
    @app.exception_handler(GemserveError)
    async def reply_to_gemserve_error(_: Request, error: GemserveError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def reply_to_http_error(http: Request, error: HTTPException) -> JSONResponse:
        message, headers = str(error.detail), error.headers
        if error.status_code == 404:
            message = not_served(http.scope["path"]) or message
        body = error_body(message, kind="invalid_request_error")
        if error.status_code == 405:
            headers = _allow_header(document(), http.scope["path"]) or headers
        return JSONResponse(body, status_code=error.status_code, headers=headers)


def _allow_header(document: Json, path: str) -> dict[str, str] | None:
    """All methods of a path. The framework names those of its first route only."""
    for template, operations in document["paths"].items():
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(template)), path):
            return {"Allow": ", ".join(sorted(operations)).upper()}
    return None
