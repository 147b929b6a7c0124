"""`/v1/adapters`: which there are; administrators load and unload them."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gemserve.adapters.store import Registered
from gemserve.api.access.keys import check_admin
from gemserve.api.requests.base_bodies import AdapterBody
from gemserve.api.requests.json_body import parse
from gemserve.api.requests.model_names import Models
from gemserve.config import ServerConfig
from gemserve.errors import AdapterError, AdapterNotFound, RequestError

Json = dict[str, Any]


def adapter_routes(models: Models, config: ServerConfig) -> APIRouter:
    routes = APIRouter()
    adapters = models.adapters

    def load(raw: bytes) -> Json:
        body = parse(raw, AdapterBody)
        try:
            return _entry(adapters.load(body.name, body.path), models.base)
        except AdapterError as error:
            raise RequestError(str(error), param="path", code="invalid_adapter") from error

    @routes.get("/v1/adapters")
    async def get_adapters() -> Json:
        entries = [_entry(adapter, models.base) for adapter in adapters.list()]
        return {"object": "list", "data": entries}

    @routes.post("/v1/adapters")
    async def post_adapter(http: Request) -> Json:
        check_admin(http, config)
        try:
            raw = await http.body()
        except ClientDisconnect as error:
            raise HTTPException(499, "the client left") from error  # nobody reads it
        return await to_thread.run_sync(load, raw, limiter=models.loading)

    @routes.delete("/v1/adapters/{name:path}")
    async def delete_adapter(http: Request, name: str) -> Json:
        check_admin(http, config)
        try:
            adapters.unload(name)
        except AdapterNotFound as error:
            error.param = "name"
            raise
        return {"id": name, "object": "adapter", "deleted": True}

    return routes


def _entry(adapter: Registered, base: str) -> Json:
    return {
        "id": adapter.name,
        "object": "adapter",
        "name": adapter.name,
        "path": adapter.path,
        "type": adapter.kind,
        "version": adapter.version,
        "bytes": adapter.num_bytes,
        "positions": adapter.num_positions,
        "loaded": adapter.is_loaded,
        "parent": base,
    }
