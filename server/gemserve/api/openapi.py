"""Write `/openapi.json` from the routes' operations and the server's configuration.

FastAPI cannot: endpoints read and parse bodies themselves, and some replies are written as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

import gemserve
from gemserve.api.access.gate import OPEN_PATHS
from gemserve.api.documents.document_store import ID_PATTERN
from gemserve.api.replies.reply_types import Selection
from gemserve.api.replies.token_counts import (
    FILTER_HEADER,
    KEPT_TOKENS_HEADER,
    MAX_TOKENS_HEADER,
    PROMPT_TOKENS_HEADER,
)
from gemserve.api.requests.base_bodies import FilteringBody, GenerationBody
from gemserve.api.requests.chat_fields_without_effect import Moderation
from gemserve.api.requests.field_schemas import Json
from gemserve.api.requests.form_body import FORM
from gemserve.api.routes.operation import Operation
from gemserve.config import ServerConfig
from gemserve.contract.adapters import ADAPTER_NAME
from gemserve.contract.filter_options import LIBRARY_NAME

_JSON, _PLAIN = "application/json", "text/plain"
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"
_KEY, _KEY_HEADER = "api_key", "api_key_header"


def write_document(
    operations: Mapping[str, Operation], config: ServerConfig, model_name: str
) -> Json:
    """The OpenAPI document of a server with this configuration, which serves this model.

    `operations` are those of all routes, by "METHOD /path".
    """
    schemas, definitions = _schemas(_types_in(operations.values()))
    components: Json = {"schemas": deepcopy(definitions)}
    if config.api_key_file is not None:
        components["securitySchemes"] = {
            _KEY: {"type": "http", "scheme": "bearer"},
            _KEY_HEADER: {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    model = _model_schema(config, model_name)
    for name, schema in components["schemas"].items():
        if name != Moderation.__name__:  # another service's model
            _describe_model(schema, model)
    writer = _Writer(config, model_name, schemas)
    paths: Json = {}
    for name, operation in operations.items():
        method, path = name.split()
        paths.setdefault(path, {})[method.lower()] = writer.operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gemserve", "version": gemserve.__version__},
        "paths": paths,
        "components": components,
    }


def _types_in(operations: Iterable[Operation]) -> tuple[Any, ...]:
    """Every type of a body or reply, once."""
    types: dict[Any, None] = {}
    for operation in operations:
        streams = (operation.event, operation.line)
        replies = (operation.reply, *streams, operation.error, operation.unavailable)
        for kind in (operation.body, *replies):
            if kind is not None:
                types[kind] = None
    return tuple(types)


@cache
def _schemas(types: tuple[Any, ...]) -> tuple[dict[Any, Json], Json]:
    """The JSON Schema of every type, and of what these refer to, by name."""
    schemas, definitions = TypeAdapter.json_schemas(
        [(t, "validation", TypeAdapter(t)) for t in types],
        schema_generator=_Schemas,
        ref_template="#/components/schemas/{model}",
    )
    return {t: schema for (t, _), schema in schemas.items()}, definitions["$defs"]


class _Schemas(GenerateJsonSchema):
    """JSON Schemas in which objects have no further fields, and fields have no titles."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return {**super().typed_dict_schema(schema), "additionalProperties": False}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return {**super().dataclass_schema(schema), "additionalProperties": False}


class _Writer:
    """Writes operations. `schemas` are those of their bodies and replies, by type."""

    def __init__(self, config: ServerConfig, model_name: str, schemas: dict[Any, Json]) -> None:
        self._config = config
        self._model_name = model_name
        self._schemas = schemas

    def operation(self, method: str, path: str, operation: Operation) -> Json:
        is_open = path in OPEN_PATHS or self._config.api_key_file is None
        written: Json = {
            "summary": operation.summary,
            "operationId": _id_of(method, path),
            "parameters": [
                _REQUEST_ID,
                *self._path_parameters(path),
                *({"name": n, "in": "query", "schema": s} for n, s in operation.query.items()),
            ],
        }
        if not is_open:
            written["security"] = [{_KEY: []}, {_KEY_HEADER: []}]
        if operation.body is not None:
            named = {"model": self._model_name} if _names_model(operation) else {}
            example = {**named, **operation.example}
            content = {_JSON: {"schema": self._schemas[operation.body], "example": example}}
            if operation.form is not None:
                content[FORM] = {"schema": operation.form}
            written["requestBody"] = {"required": True, "content": content}
        elif operation.form is not None:
            content = {FORM: {"schema": operation.form}}
            written["requestBody"] = {"required": True, "content": content}
        statuses = dict(self._replies(path, operation, is_open))
        written["responses"] = {str(status): statuses[status] for status in sorted(statuses)}
        return written

    def _path_parameters(self, path: str) -> Iterator[Json]:
        if "{document_id}" in path:
            yield {
                **{"name": "document_id", "in": "path", "required": True},
                "schema": {**_TEXT, "pattern": ID_PATTERN},
            }
        if "{library}" in path:
            place = {"name": "library", "in": "path", "required": True}
            yield {**place, "schema": {**_TEXT, "pattern": f"^{LIBRARY_NAME}$"}}
        if "{path}" in path:
            place = {"name": "path", "in": "path", "required": True}
            yield {**place, "schema": {**_TEXT, "minLength": 1}}
        if "{name}" in path:
            schema, example = _ADAPTER, "support"
            if path.startswith("/v1/models/"):
                example = self._model_name
                schema = _model_schema(self._config, example)
            place = {"name": "name", "in": "path", "required": True}
            yield {**place, "schema": schema, "example": example}

    def _replies(
        self, path: str, operation: Operation, is_open: bool
    ) -> Iterator[tuple[int, Json]]:
        yield 200, self._success(operation)
        if operation.takes_body:
            yield (
                400,
                self._error(operation, "The body is wrong; `param` names the field, if it is one."),
            )
            yield 413, self._error(operation, "The body is too large.")
            yield 415, self._error(operation, "The body is in an encoding that is not read here.")
        is_of_libraries = path.startswith("/v1/libraries")  # which a server may have none of
        if _names_model(operation) or "{" in path or is_of_libraries:
            said = "There is no such model, adapter, document or library."
            yield 404, self._error(operation, said)
        has_libraries = self._config.library_dir is not None
        if has_libraries and (is_of_libraries or _has_filter(operation)):
            said = "Another process changes the library, or another model has read it."
            yield 409, self._error(operation, said, {"Retry-After": _optional(_SECONDS)})
        if not is_open:
            yield (
                401,
                self._error(
                    operation, "The key is missing or wrong.", {"WWW-Authenticate": _BEARER}
                ),
            )
            if operation.takes_body and self._has_quota:
                yield (
                    429,
                    self._error(operation, "The key has had its share.", {"Retry-After": _SECONDS}),
                )
        if operation.is_admin:
            yield 403, self._error(operation, "The key is not an administrator's.")
        yield 500, self._error(operation, "The server failed.")
        if operation.unavailable is not None:
            headers = {} if not operation.takes_body else {"Retry-After": _optional(_SECONDS)}
            content = {_JSON: {"schema": self._schemas[operation.unavailable]}}
            yield 503, _reply("Not now: overloaded, stopping or dead.", content, headers)
        if operation.takes_body and operation.unavailable is not None:
            yield 504, self._error(operation, "It took longer than the server or its client waits.")

    @property
    def _has_quota(self) -> bool:
        limits = (
            self._config.requests_per_minute,
            self._config.tokens_per_minute,
            self._config.concurrency_per_key,
        )
        return any(limit is not None for limit in limits)

    def _success(self, operation: Operation) -> Json:
        if operation.reply is None:
            return _reply("Plain text", {_PLAIN: {"schema": {"type": "string"}}}, {})
        content = {_JSON: {"schema": self._schemas[operation.reply]}}
        headers: Json = {}
        if operation.reply is Selection:
            headers = {**_COUNTS, FILTER_HEADER: _REPORT}
        if operation.event is not None:
            content[_EVENTS] = {"schema": self._event(operation)}
        if operation.line is not None:
            content[_LINES] = {"schema": self._schemas[operation.line]}
        if operation.event is not None or operation.line is not None:
            headers = {name: _optional(header) for name, header in _COUNTS.items()}
            headers[FILTER_HEADER] = _REPORT
            headers[MAX_TOKENS_HEADER] = _LIMIT
        reply = _reply("Done", content, headers)
        return reply if operation.links is None else {**reply, "links": operation.links}

    def _event(self, operation: Operation) -> Json:
        """The schema of an event of the stream that answers a body with `stream` true."""
        data: Json = {
            "type": "string",
            "contentMediaType": _JSON,
            "contentSchema": self._schemas[operation.event],
        }
        if operation.body is not None and issubclass(operation.body, GenerationBody):
            data = {"anyOf": [{"const": "[DONE]"}, data]}
        return {
            "description": "One event of the stream.",
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": data},
            "required": ["data"],
        }

    def _error(self, operation: Operation, said: str, headers: Json | None = None) -> Json:
        return _reply(said, {_JSON: {"schema": self._schemas[operation.error]}}, headers or {})


_TEXT: Json = {"type": "string"}
_ADAPTER: Json = {**_TEXT, "pattern": f"^{ADAPTER_NAME}$"}
_REQUEST_ID: Json = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Of 1 to 128 printable ASCII characters; the reply has another otherwise.",
    "schema": _TEXT,
}
_BEARER: Json = {"required": True, "schema": {"const": "Bearer"}}
_SECONDS: Json = {"required": True, "schema": {"type": "integer", "minimum": 1}}
_COUNT: Json = {"required": True, "schema": {"type": "integer", "minimum": 0}}
_COUNTS: Json = {PROMPT_TOKENS_HEADER: _COUNT, KEPT_TOKENS_HEADER: _COUNT}
_LIMIT: Json = {
    "required": False,
    "schema": {"type": "integer", "minimum": 1},
    "description": "The most tokens that the answer may have.",
}
_REPORT: Json = {"required": False, "schema": _TEXT, "description": "The filter object, as JSON."}
_REPLY_ID: Json = {"required": True, "schema": {**_TEXT, "pattern": "^[!-~]{1,128}$"}}


def _optional(header: Json) -> Json:
    return {**header, "required": False}


def _reply(description: str, content: Json, headers: Json) -> Json:
    return {
        "description": description,
        "headers": {"X-Request-Id": _REPLY_ID, **headers},
        "content": content,
    }


def _id_of(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").strip("/").split("/")
    return "_".join([method.lower(), *words])


def _names_model(operation: Operation) -> bool:
    return operation.body is not None and "model" in operation.body.model_fields


def _has_filter(operation: Operation) -> bool:
    return operation.body is not None and issubclass(operation.body, FilteringBody)


def _model_schema(config: ServerConfig, name: str) -> Json:
    """The schema of a model's name: the served one, alone or with the name of an adapter."""
    if config.adapter_dir is None:
        return {**_TEXT, "enum": [name]}
    literal = re.sub(r"([][\\.^$*+?(){}|])", r"\\\1", name)
    with_adapter = {"pattern": f"^{literal}:{ADAPTER_NAME}$"}
    return {**_TEXT, "anyOf": [{"enum": [name]}, with_adapter]}


def _describe_model(schema: Json, model: Json) -> None:
    for form in schema.get("anyOf", [schema]):
        field = form.get("properties", {}).get("model", {})
        for kind in field.get("anyOf", [field]):
            if kind.get("type") == "string":
                kind.update(model)
