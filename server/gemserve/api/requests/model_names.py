"""The names that `model` and `adapter` of a request may have: the model, and an adapter on it.

`"model": "base:adapter"` means the same as `"model": "base", "adapter": "adapter"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.api.requests.base_bodies import ModelBody
from gemserve.contract.adapters import AdapterInfo, LoadedAdapter
from gemserve.errors import (
    AdapterError,
    AdapterNotFound,
    AdapterUnavailable,
    ModelNotFound,
    RequestError,
    shown,
)


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """The name of an adapter, and the field of the request that has it."""

    name: str
    field: str


class ModelNames:
    """Finds the model and the adapter that a request names.

    `also`: another name of the model. It is understood and not shown.
    """

    def __init__(self, model: str, adapters: AdapterStore, also: str | None = None) -> None:
        self.model, self.adapters = model, adapters
        self._names = {model} if also is None else {model, also}
        # requests that wait for an adapter to load must not take the threads of all others
        self.loading = CapacityLimiter(1)

    def describe_adapter(self, model: str | None) -> AdapterInfo | None:
        """The adapter that a model's name ends with, if it does.

        Raises `ModelNotFound` or `AdapterNotFound` for a name that stands for nothing.
        """
        name = self._split(model)
        if name is None:
            return None
        with _errors_about("model"):
            return self.adapters.describe(name)

    def find_reference(self, body: ModelBody) -> AdapterReference | None:
        """The adapter that a request names, if any. Raises `ModelNotFound`, `RequestError`."""
        name = self._split(body.model)
        if body.adapter is None:
            return None if name is None else AdapterReference(name, "model")
        if name not in (None, body.adapter):
            raise RequestError(
                f"adapter={shown(body.adapter)}: model={shown(body.model)} names another one",
                param="adapter",
            )
        return AdapterReference(body.adapter, "adapter")

    def find_in_memory(self, reference: AdapterReference) -> LoadedAdapter | None:
        """The adapter, if it is in memory. Raises `AdapterNotFound`."""
        with _errors_about(reference.field):
            return self.adapters.find(reference.name)

    async def load(self, reference: AdapterReference) -> LoadedAdapter:
        """The adapter, loaded if it is not in memory.

        Raises `AdapterNotFound`, `AdapterUnavailable`, `AdapterBusy`.
        """
        with _errors_about(reference.field):
            return await to_thread.run_sync(self.adapters.get, reference.name, limiter=self.loading)

    def _split(self, model: str | None) -> str | None:
        """The adapter's name at the end of a model's, if any. Raises `ModelNotFound`."""
        if model is None or model in self._names:
            return None
        base, _, name = model.rpartition(":")
        if base not in self._names:
            raise ModelNotFound(model=model, served=self.model)
        return name


@contextmanager
def _errors_about(field: str) -> Iterator[None]:
    """Turn errors about an adapter into errors about the field that names it."""
    try:
        yield
    except AdapterNotFound as error:
        error.param = field
        raise
    except AdapterError as error:
        raise AdapterUnavailable(error, param=field) from error
