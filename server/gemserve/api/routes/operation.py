"""An endpoint together with its description in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter

from gemserve.api.error_replies import Error
from gemserve.api.requests.base_bodies import Body
from gemserve.api.requests.field_schemas import Json

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What an endpoint takes and replies.

    `body`: the model that parses the body. `form`: the JSON Schema of a form that may come instead,
    or of the form that must come.
    `query`: the schemas of the parameters in the URL, by name. `example`: of a body, without its
    model. `reply`: the type of the reply; None for plain text. `event`: the type of the data of a
    stream's events. `line`: the type of a stream's lines, where it has lines and not events.
    `error`: the type of its errors. `unavailable`: the type of the reply with status 503.
    `is_admin`: where there are keys, it needs an administrator's.
    """

    summary: str
    body: type[Body] | None = None
    form: Json | None = None
    query: Json = field(default_factory=dict)
    example: Json = field(default_factory=dict)
    reply: Any = None
    event: Any = None
    line: Any = None
    error: Any = Error
    unavailable: Any = None
    links: Json | None = None
    is_admin: bool = False

    @property
    def takes_body(self) -> bool:
        return self.body is not None or self.form is not None


class Routes(APIRouter):
    """A router that knows the operation of each of its routes, as "METHOD /path"."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[str, Operation] = {}

    def add(self, method: str, path: str, operation: Operation) -> Callable[[EndpointT], EndpointT]:
        """Decorate the function that answers this method and path."""
        self.operations[f"{method} {path.replace(':path', '')}"] = operation
        # the reply is sent as it is: mypy has checked its type
        return self.api_route(path, methods=[method], response_model=None)
