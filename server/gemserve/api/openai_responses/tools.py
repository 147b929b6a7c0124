"""`tools`, `tool_choice` and `text.format` of /v1/responses, which a chat writes differently."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import Body, JsonSchema, ResponseFormat
from gemserve.api.requests.chat_body import Function, NamedFunction, NamedTool, Tool
from gemserve.api.requests.served_types import HistoryItem, by_type, refuse_others

_HOSTED = "is not served: this server runs no tools, it only asks for calls of functions"
_CUSTOM = "is not served: describe it as a function, whose arguments are JSON"
_REASONS = {"custom": _CUSTOM}


def _check_numbers(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Replies repeat the schema, and JSON has no infinity."""
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ValueError("has a number that is no double") from error
    return schema


class FunctionTool(HistoryItem):
    """A function, as a `Tool` of a chat."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)] | None = (
        None
    )
    strict: bool | None = None
    _check_parameters = field_validator("parameters")(_check_numbers)

    @property
    def chat(self) -> Tool:
        function = Function.model_construct(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool.model_construct(type="function", function=function)


ServedTool = Annotated[FunctionTool, refuse_others(("function",), _REASONS, otherwise=_HOSTED)]


class ChosenFunction(Body):
    type: Literal["function"]
    name: str

    @property
    def chat(self) -> NamedTool:
        function = NamedFunction.model_construct(name=self.name)
        return NamedTool.model_construct(type="function", function=function)


class AllowedTools(Body):
    """Of all tools, those that this answer may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[ChosenFunction, refuse_others(("function",), _REASONS, otherwise=_HOSTED)]],
        Field(min_length=1, fail_fast=True),
    ]


NamedChoice = Annotated[
    Annotated[ChosenFunction, Tag("function")] | Annotated[AllowedTools, Tag("allowed_tools")],
    by_type("function"),
    refuse_others(("function", "allowed_tools"), _REASONS, otherwise=_HOSTED),
]

ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[NamedChoice, Tag("other")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "other"),
]


class TextFormat(Body):
    type: Literal["text", "json_object"]

    @property
    def chat(self) -> ResponseFormat:
        return ResponseFormat.model_construct(type=self.type)


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    _check_schema = field_validator("schema_")(_check_numbers)

    @property
    def chat(self) -> ResponseFormat:
        return ResponseFormat.model_construct(type=self.type, json_schema=self)


Format = Annotated[
    TextFormat | SchemaFormat,
    Field(discriminator="type"),
    refuse_others(("text", "json_object", "json_schema"), {}),
]


class TextOptions(Body):
    """`verbosity` has no effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
