"""What `model` and `adapter` of a request may name: the base, and an adapter on it.

`base:adapter` as the model is the same as the two apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter

from gemserve.adapters.store import AdapterStore, Registered
from gemserve.api.requests.base_bodies import Filterable
from gemserve.errors import (
    AdapterError,
    AdapterNotFound,
    AdapterUnavailable,
    ModelNotFound,
    RequestError,
    shown,
)
from gemserve.types import LoadedAdapter

Json = dict[str, Any]


class Models:
    """The base's name, and the adapters that are there now."""

    def __init__(self, base: str, adapters: AdapterStore, context_tokens: int) -> None:
        self.base, self.adapters = base, adapters
        self._context_tokens = context_tokens
        self._created = int(time.time())
        # of its own: requests that wait for a folder must not take the threads of all others
        self.loading = CapacityLimiter(1)

    def check(self, model: str | None) -> None:
        """Raise `ModelNotFound` or `AdapterNotFound` for a name that stands for nothing."""
        name = self._adapter_in(model)
        if name is not None:
            with _blaming("model"):
                self.adapters.describe(name)

    def is_plain(self, body: Filterable) -> bool:
        """Does the request go without an adapter? Raises `ModelNotFound`, `RequestError`."""
        return self._adapter_of(body) is None

    def find_adapter(self, body: Filterable) -> LoadedAdapter | None:
        """The request's adapter, if it has one that is in memory. Raises `AdapterNotFound`."""
        name = self._adapter_of(body)
        if name is None:
            return None
        with _blaming(_param(body)):
            return self.adapters.find(name)

    async def load_adapter(self, body: Filterable) -> LoadedAdapter:
        """The request's adapter, which it must have; loaded if it is not in memory.

        Raises `AdapterNotFound`, `AdapterUnavailable`, `AdapterBusy`.
        """
        name = self._adapter_of(body)
        assert name is not None
        with _blaming(_param(body)):
            return await to_thread.run_sync(self.adapters.get, name, limiter=self.loading)

    def cards(self) -> list[Json]:
        return [self._card(), *map(self._card, self.adapters.list())]

    def card(self, model: str) -> Json:
        """Raises `ModelNotFound` or `AdapterNotFound`."""
        name = self._adapter_in(model)
        if name is None:
            return self._card()
        with _blaming("model"):
            return self._card(self.adapters.describe(name))

    def _adapter_of(self, body: Filterable) -> str | None:
        named = self._adapter_in(body.model)
        if body.adapter is None:
            return named
        if named not in (None, body.adapter):
            raise RequestError(
                f"adapter={shown(body.adapter)}: model={shown(body.model)} names another one",
                param="adapter",
            )
        return body.adapter

    def _adapter_in(self, model: str | None) -> str | None:
        """The adapter that a model's name ends with, if any. Raises `ModelNotFound`."""
        if model is None or model == self.base:
            return None
        base, _, name = model.rpartition(":")
        if base != self.base:
            raise ModelNotFound(model=model, served=self.base)
        return name

    def _card(self, adapter: Registered | None = None) -> Json:
        taken = 0 if adapter is None else adapter.num_positions
        return {
            "id": self.base if adapter is None else f"{self.base}:{adapter.name}",
            "object": "model",
            "created": self._created,
            "owned_by": "gemserve",
            "max_model_len": self._context_tokens - taken,
            "parent": None if adapter is None else self.base,
        }


def model_routes(models: Models) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def get_models() -> Json:
        return {"object": "list", "data": models.cards()}

    @routes.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Json:
        return models.card(name)

    return routes


def _param(body: Filterable) -> str:
    """Which field names the adapter."""
    return "model" if body.adapter is None else "adapter"


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """What is wrong with an adapter that a request names, as an error of that field."""
    try:
        yield
    except AdapterNotFound as error:
        error.param = param
        raise
    except AdapterError as error:
        raise AdapterUnavailable(error, param=param) from error
