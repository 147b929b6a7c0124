"""`/health`, `/ping`, `/ready`, `/version` and `/metrics`, for operators and their tools."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import JSONResponse

import gemserve
from gemserve.api.replies.reply_types import Alive, NotAlive, Version
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.telemetry.server_metrics import Metrics
from gemserve.engine.watchdog import Watchdog
from gemserve.engine.worker import Engine
from gemserve_kernels import Backend

HEALTH = Operation(summary="Does the engine live?", reply=Alive, unavailable=NotAlive)
PING = Operation(summary="Does the engine live? (SageMaker's probe)", unavailable=NotAlive)
READY = Operation(summary="Does the server take requests?", reply=Alive, unavailable=NotAlive)
VERSION = Operation(summary="The server's version", reply=Version)
METRICS = Operation(summary="Prometheus metrics")


def health_routes(
    engine: Engine, backend: Backend, metrics: Metrics, watchdog: Watchdog | None
) -> Routes:
    routes = Routes()

    @routes.add("GET", "/health", HEALTH)
    async def get_health() -> Alive | Response:
        if engine.death is not None:
            return _unavailable({"status": "dead", "cause": engine.death})
        if watchdog is not None and watchdog.is_stuck:
            return _unavailable({"status": "stuck", "cause": watchdog.complaint})
        return {"status": "ok"}

    @routes.add("POST", "/ping", PING)
    @routes.add("GET", "/ping", PING)
    async def ping() -> Response:
        health = await get_health()
        return health if isinstance(health, Response) else Response(media_type="text/plain")

    @routes.add("GET", "/ready", READY)
    async def get_ready() -> Alive | Response:
        if engine.is_draining:
            return _unavailable({"status": "shutting down"})
        return await get_health()

    @routes.add("GET", "/version", VERSION)
    async def get_version() -> Version:
        return {
            "version": gemserve.__version__,
            "attention_backend": backend.name,
            "kernels": backend.kernels,
        }

    @routes.add("GET", "/metrics", METRICS)
    async def get_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def _unavailable(state: NotAlive) -> JSONResponse:
    return JSONResponse(state, status_code=503)
