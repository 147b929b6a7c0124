"""`tools`, `tool_choice` and `text.format` of /v1/responses, which a chat writes differently."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import (
    FEW,
    Body,
    JsonSchema,
    ResponseFormat,
    SomeTextOr,
)
from gemserve.api.requests.chat_body import MAX_TOOLS, ChoiceWord, Function
from gemserve.api.requests.served_types import (
    HistoryItem,
    by_type,
    of_type,
    refuse_others,
    type_of,
)

_HOSTED = "is not served: this server runs no tools, it only asks for calls of functions"
_REFUSED = {"mcp": "is not served: this server connects to no other servers"}
_NAME = r"^[A-Za-z0-9_-]{1,64}$"
_INPUT = "The whole input of the tool, as plain text."
DEFAULT_NAMESPACE = "functions"  # OpenAI's name of the namespace that has no name
SEARCH_NAME = "tool_search"
HostedKind = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "computer_use",
    "computer_use_preview",
    "programmatic_tool_calling",
    "local_shell",
    "shell",
    "apply_patch",
]
HOSTED_KINDS: tuple[str, ...] = get_args(HostedKind)


def _check_numbers(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Replies repeat the schema, and JSON has no infinity."""
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ValueError("has a number that is no double") from error
    return schema


class CallableTool(HistoryItem):
    """A tool that the client runs. These fields have no effect: every tool is in the prompt."""

    defer_loading: bool | None = None
    allowed_callers: Annotated[list[str], FEW] | None = None


class FunctionTool(CallableTool):
    """A function, as a `Tool` of a chat. `output_schema` has no effect."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)] | None = (
        None
    )
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    _check_parameters = field_validator("parameters")(_check_numbers)

    def function(self, name: str) -> Function:
        return Function.model_construct(
            name=name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )


class AnyText(HistoryItem):
    type: Literal["text"]


class TextGrammar(HistoryItem):
    """What a custom tool's input looks like. Forced input is held to a `regex`."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=65_536)]


InputFormat = Annotated[
    Annotated[AnyText, of_type("text")] | Annotated[TextGrammar, of_type("grammar")],
    by_type(),
    refuse_others(("text", "grammar"), {}),
]


class CustomTool(CallableTool):
    """A tool whose input is a text. The model calls it as a function with one text `input`."""

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    format: InputFormat | None = None

    @property
    def has_unheld_grammar(self) -> bool:
        return isinstance(self.format, TextGrammar) and self.format.syntax == "lark"

    def function(self, name: str) -> Function:
        text: dict[str, Any] = {"type": "string", "description": _INPUT}
        said = self.description or ""
        grammar = self.format if isinstance(self.format, TextGrammar) else None
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        elif grammar is not None:
            said += f"\n\nThe input follows this Lark grammar:\n{grammar.definition}"
        parameters = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
        return Function.model_construct(
            name=name, description=said.strip() or None, parameters=parameters, strict=True
        )


class SearchTool(HistoryItem):
    """A search for further tools, which the client runs, as a function."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)] | None = (
        None
    )
    _check_parameters = field_validator("parameters")(_check_numbers)

    def function(self, name: str) -> Function:
        return Function.model_construct(
            name=name, description=self.description, parameters=self.parameters
        )


NestedTool = Annotated[
    Annotated[FunctionTool, Tag("a function")] | Annotated[CustomTool, Tag("a custom tool")],
    Discriminator(lambda value: _TAGS.get(type_of(value))),
    refuse_others(("function", "custom"), {}),
]


class NamespaceTool(HistoryItem):
    """Tools with a common name in front of their own."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    tools: Annotated[list[NestedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class HostedTool(BaseModel):
    """A tool that OpenAI's servers run, or know without a description. It is left out."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: HostedKind


# tags that are no field of a tool: errors leave them out of the path
_TAGS = {
    "function": "a function",
    "custom": "a custom tool",
    "namespace": "a namespace",
    "tool_search": "a search",
    **dict.fromkeys(HOSTED_KINDS, "a hosted tool"),
}
ServedTool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom tool")]
    | Annotated[NamespaceTool, Tag("a namespace")]
    | Annotated[SearchTool, Tag("a search")]
    | Annotated[HostedTool, Tag("a hosted tool")],
    Discriminator(lambda value: _TAGS.get(type_of(value))),
    refuse_others(_TAGS, _REFUSED),
]
Tools = Annotated[list[ServedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenTool(Body):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Body):
    """Of all tools, those that this answer may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[ChosenTool, Tag("a function")]
                | Annotated[ChosenTool, Tag("a custom tool")]
                | Annotated[HostedTool, Tag("a hosted tool")],
                Discriminator(lambda value: _TAGS.get(type_of(value))),
                refuse_others(("function", "custom", *HOSTED_KINDS), _REFUSED),
            ]
        ],
        Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True),
    ]


NamedChoice = Annotated[
    Annotated[ChosenTool, of_type("function")]
    | Annotated[ChosenTool, of_type("custom")]
    | Annotated[AllowedTools, of_type("allowed_tools")],
    by_type("function"),
    refuse_others(("function", "custom", "allowed_tools"), {}, otherwise=_HOSTED),
]

ToolChoice = SomeTextOr[ChoiceWord, NamedChoice]


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
    Annotated[TextFormat, of_type("text")]
    | Annotated[TextFormat, of_type("json_object")]
    | Annotated[SchemaFormat, of_type("json_schema")],
    by_type(),
    refuse_others(("text", "json_object", "json_schema"), {}),
]


class TextOptions(Body):
    """`verbosity` has no effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
