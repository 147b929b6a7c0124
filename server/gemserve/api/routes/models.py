"""`/v1/models`: the model that is served, and it with each adapter."""

from __future__ import annotations

import time

from gemserve.api.replies.reply_types import Model, Models
from gemserve.api.requests.model_names import ModelNames
from gemserve.api.routes.operation import Operation, Routes
from gemserve.contract.adapters import AdapterInfo

LIST_MODELS = Operation(
    summary="List the model that is served, and it with each adapter",
    reply=Models,
    links={
        "model": {
            "operationId": "get_v1_models_name",
            "parameters": {"name": "$response.body#/data/0/id"},
        }
    },
)
DESCRIBE_MODEL = Operation(summary="Describe the model", reply=Model)


def model_routes(models: ModelNames, context_tokens: int) -> Routes:
    routes = Routes()
    created_s = int(time.time())

    def describe(adapter: AdapterInfo | None) -> Model:
        taken = 0 if adapter is None else adapter.num_positions
        return {
            "id": models.model if adapter is None else f"{models.model}:{adapter.name}",
            "object": "model",
            "created": created_s,
            "owned_by": "gemserve",
            "max_model_len": context_tokens - taken,
            "parent": None if adapter is None else models.model,
        }

    @routes.add("GET", "/v1/models", LIST_MODELS)
    async def get_models() -> Models:
        adapters = map(describe, models.adapters.list())
        return {"object": "list", "data": [describe(None), *adapters]}

    @routes.add("GET", "/v1/models/{name:path}", DESCRIBE_MODEL)
    async def get_model(name: str) -> Model:
        return describe(models.describe_adapter(name))

    return routes
