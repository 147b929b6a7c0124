"""`/v1/adapters`: everybody may list them; administrators load and unload them."""

from __future__ import annotations

from collections.abc import Callable

from anyio import to_thread
from fastapi import Request

from gemserve.api.access.keys import check_admin
from gemserve.api.error_replies import Error
from gemserve.api.replies.reply_types import Adapter, AdapterDeleted, Adapters
from gemserve.api.requests.adapter_body import AdapterBody
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import read_body
from gemserve.config import ServerConfig
from gemserve.contract.adapters import AdapterInfo
from gemserve.errors import AdapterError, AdapterNotFound, RequestError

LoadAdapter = Callable[[str, str], AdapterInfo]  # a folder under a name; see `AdapterStore.load`
LIST_ADAPTERS = Operation(summary="List the adapters", reply=Adapters)
LOAD_ADAPTER = Operation(
    summary="Load an adapter, in place of one with its name",
    body=AdapterBody,
    example={"name": "support", "path": "support"},
    reply=Adapter,
    unavailable=Error,
    is_admin=True,
)
UNLOAD_ADAPTER = Operation(summary="Unload an adapter", reply=AdapterDeleted, is_admin=True)


def adapter_routes(
    models: ModelNames, config: ServerConfig, load_adapter: LoadAdapter | None = None
) -> Routes:
    """`load_adapter`: instead of the store's `load`, for one of several replicas."""
    load_named = load_adapter or models.adapters.load
    routes = Routes()
    adapters = models.adapters

    def load(raw: bytes) -> Adapter:
        body = parse_body(raw, AdapterBody)
        try:
            return _describe(load_named(body.name, body.path), models.model)
        except AdapterError as error:
            raise RequestError(str(error), param="path", code="invalid_adapter") from error

    @routes.add("GET", "/v1/adapters", LIST_ADAPTERS)
    async def get_adapters() -> Adapters:
        data = [_describe(adapter, models.model) for adapter in adapters.list()]
        return {"object": "list", "data": data}

    @routes.add("POST", "/v1/adapters", LOAD_ADAPTER)
    async def post_adapter(http: Request) -> Adapter:
        check_admin(http, config)
        raw = await read_body(http)
        return await to_thread.run_sync(load, raw, limiter=models.loading)

    @routes.add("DELETE", "/v1/adapters/{name:path}", UNLOAD_ADAPTER)
    async def delete_adapter(http: Request, name: str) -> AdapterDeleted:
        check_admin(http, config)
        try:
            adapters.unload(name)
        except AdapterNotFound as error:
            error.param = "name"
            raise
        return {"id": name, "object": "adapter", "deleted": True}

    return routes


def _describe(adapter: AdapterInfo, model: str) -> Adapter:
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
        "parent": model,
    }
