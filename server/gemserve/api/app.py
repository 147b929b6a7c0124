"""The HTTP application: routes parse, submit, format. Everything shared lives elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from anyio import to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

import gemserve
from gemserve.adapters.store import AdapterStore
from gemserve.api.access.body_limit import BodyLimit, RequestId, request_id_of
from gemserve.api.access.gate import Gate
from gemserve.api.access.keys import open_keys
from gemserve.api.access.quota import Quota
from gemserve.api.error_replies import error_body, error_response
from gemserve.api.openapi import document
from gemserve.api.replies.choices_reply import reply, reply_selection
from gemserve.api.replies.completion_format import ChatFormat, CompletionFormat, Format
from gemserve.api.replies.logprobs import Vocabulary
from gemserve.api.replies.responses_reply import reply_response
from gemserve.api.replies.tool_call_format import CallFormat
from gemserve.api.requests.base_bodies import CompletionBody, Filterable, Generation, SelectionBody
from gemserve.api.requests.chat_body import ChatBody
from gemserve.api.requests.engine_requests import Asked
from gemserve.api.requests.json_body import parse
from gemserve.api.requests.model_names import Models, model_routes
from gemserve.api.requests.request_builder import PromptBuilder
from gemserve.api.requests.responses_body import ResponsesBody
from gemserve.api.requests.tool_choice import call_rules
from gemserve.api.routes.adapters import adapter_routes
from gemserve.api.routes.operation import Json
from gemserve.api.routes.tokenizing import tokenizing_routes
from gemserve.api.telemetry.server_metrics import Metrics
from gemserve.config import ServerConfig
from gemserve.engine.engine import Engine, Stream
from gemserve.engine.prompt import decode
from gemserve.errors import (
    AdapterBusy,
    AdapterUnavailable,
    GemserveError,
    QueueFull,
    RequestError,
)
from gemserve.types import LoadedAdapter
from gemserve_kernels import Backend

FilteredT = TypeVar("FilteredT", bound=Filterable)
GenerationT = TypeVar("GenerationT", bound=Generation)
Build = Callable[[FilteredT, str, LoadedAdapter | None], Asked]
EXPOSED_HEADERS = (  # that scripts of other origins may read
    "Retry-After",
    "X-Request-Id",
    "X-Gemserve-Prompt-Tokens",
    "X-Gemserve-Kept-Tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the application serves. It stops the engine when it shuts down."""

    engine: Engine
    prompts: PromptBuilder
    adapters: AdapterStore
    model_name: str
    backend: Backend
    config: ServerConfig


def create_app(serving: Serving) -> FastAPI:
    """The application over one engine; usable in process through an ASGI transport.

    Raises `ConfigError` if its key files are wrong.
    """
    engine, prompts, config = serving.engine, serving.prompts, serving.config
    metrics = Metrics(engine, serving.adapters, serving.model_name, serving.backend)
    models = Models(serving.model_name, serving.adapters, prompts.context_tokens)
    vocabulary = Vocabulary(prompts.tokenizer)
    described = document(config, serving.model_name)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(engine.stop)

    app = FastAPI(
        title="gemserve",
        version=gemserve.__version__,
        lifespan=lifespan,
        redirect_slashes=False,  # what is not in the document is a 404
    )
    app.openapi = lambda: described  # type: ignore[method-assign]
    _add_middleware(app, config, metrics)

    @app.exception_handler(GemserveError)
    async def _own_error(_: Request, error: GemserveError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def _http_error(http: Request, error: HTTPException) -> JSONResponse:
        body = error_body(str(error.detail), kind="invalid_request_error")
        headers = error.headers
        if error.status_code == 405:
            headers = _allowed(described, http.scope["path"]) or headers
        return JSONResponse(body, status_code=error.status_code, headers=headers)

    async def submit(
        http: Request, body_type: type[FilteredT], build: Build[FilteredT]
    ) -> tuple[FilteredT, Asked, list[Stream]]:
        request_id = request_id_of(http)
        try:
            engine.check_room()  # a full queue answers before anything is parsed or tokenized
            raw = await http.body()
            body, asked = await to_thread.run_sync(
                _parse_and_build, raw, body_type, build, request_id, models
            )
            if asked is None:
                adapter = await models.load_adapter(body)
                asked = await to_thread.run_sync(build, body, request_id, adapter)
            return body, asked, engine.submit_all(asked.requests)
        except ClientDisconnect as error:
            raise HTTPException(499, "the client left") from error  # nobody reads it
        except (QueueFull, AdapterBusy, AdapterUnavailable) as error:
            metrics.rejections.labels(error.code).inc()
            raise
        except RequestError as error:
            metrics.rejections.labels(_reason(error)).inc()
            raise

    async def answer(
        http: Request,
        body_type: type[GenerationT],
        build: Build[GenerationT],
        new_format: Callable[[GenerationT], Format],
    ) -> Response:
        arrived_s = time.monotonic()
        body, asked, streams = await submit(http, body_type, build)
        return await reply(
            http,
            body,
            asked,
            streams,
            new_format(body),
            [metrics.observer(arrived_s) for _ in streams],
            keep_alive_s=config.keep_alive_s,
            model=body.model,
        )

    def chat_format(body: ChatBody) -> Format:
        rules = call_rules(body)
        return ChatFormat(vocabulary) if rules is None else CallFormat(vocabulary, rules)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await answer(
            http, CompletionBody, prompts.completion, lambda _: CompletionFormat(vocabulary)
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await answer(http, ChatBody, prompts.chat, chat_format)

    @app.post("/v1/responses")
    async def responses(http: Request) -> Response:
        arrived_s = time.monotonic()
        body, _, (stream,) = await submit(http, ResponsesBody, prompts.response)
        return await reply_response(
            http,
            body,
            stream,
            metrics.observer(arrived_s),
            keep_alive_s=config.keep_alive_s,
            model=body.model,
        )

    @app.post("/v1/filter")
    async def select(http: Request) -> Response:
        arrived_s = time.monotonic()
        body, _, (stream,) = await submit(http, SelectionBody, prompts.selection)
        return await reply_selection(
            http,
            stream,
            metrics.observer(arrived_s),
            partial(decode, prompts.tokenizer, skip_special_tokens=True),
            is_selection_shown=body.filter is not None and body.filter.return_selection,
        )

    app.include_router(tokenizing_routes(prompts, models))
    app.include_router(model_routes(models))
    app.include_router(adapter_routes(models, config))

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.death is not None:
            return JSONResponse({"status": "dead", "cause": engine.death}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> JSONResponse:
        if engine.is_draining:
            return JSONResponse({"status": "shutting down"}, status_code=503)
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {
            "version": gemserve.__version__,
            "attention_backend": serving.backend.name,
            "kernels": serving.backend.kernels,
        }

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _allowed(described: Json, path: str) -> dict[str, str] | None:
    """What a path can be asked, by all its routes: the framework tells of the first alone."""
    for template, operations in described["paths"].items():
        if re.fullmatch(re.escape(template).replace(r"\{name\}", ".+"), path):
            return {"Allow": ", ".join(sorted(operations)).upper()}
    return None


def _add_middleware(app: FastAPI, config: ServerConfig, metrics: Metrics) -> None:
    """From the inside out: the last one added sees a request first and a reply last."""
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    keys = open_keys(config)
    if keys is not None:
        quota = Quota(
            requests_per_minute=config.requests_per_minute,
            concurrency_per_key=config.concurrency_per_key,
        )
        count = metrics.rejections
        app.add_middleware(
            Gate, keys=keys, quota=quota, refused=lambda code: count.labels(code).inc()
        )
    if config.cors_origins:  # outside the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestId)


def _parse_and_build(
    raw: bytes,
    body_type: type[FilteredT],
    build: Build[FilteredT],
    request_id: str,
    models: Models,
) -> tuple[FilteredT, Asked | None]:
    """Everything slow about a request's arrival; runs off the event loop.

    What is asked is None where an adapter must be loaded first.
    """
    body = parse(raw, body_type)
    adapter = models.find_adapter(body)
    if adapter is None and not models.is_plain(body):
        return body, None
    return body, build(body, request_id, adapter)


def _reason(error: RequestError) -> str:
    known = {
        "context_length_exceeded": "prompt_too_long",
        "model_not_found": "unknown_model",
        "adapter_not_found": "unknown_adapter",
    }
    return known.get(error.code, "invalid_request")
