"""`tools`, `tool_choice` and `output_config` of /v1/messages, which a chat writes differently."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import FEW, Body, JsonSchema, ResponseFormat
from gemserve.api.requests.chat_body import Function, NamedFunction, NamedTool, Tool
from gemserve.api.requests.served_types import HistoryItem, refuse_others, type_of
from gemserve_dialects.anthropic.fields_without_effect import TaskBudget


class CustomTool(HistoryItem):
    """A tool that the client runs. What follows `strict` has no effect."""

    type: Literal["custom"] | None = "custom"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    input_examples: Annotated[list[dict[str, Any]], FEW] | None = None
    allowed_callers: Annotated[list[str], FEW] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None

    @property
    def chat(self) -> Tool:
        function = Function.model_construct(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool.model_construct(type="function", function=function)


ServedTool = Annotated[
    CustomTool,
    refuse_others(
        ("custom",),
        {},
        default="custom",
        otherwise="is not served: this server runs no tools; give a tool with an input_schema",
    ),
]


class FreeChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None

    @property
    def chat(self) -> Literal["auto", "required", "none"]:
        return "required" if self.type == "any" else self.type


class NamedChoice(Body):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None

    @property
    def chat(self) -> NamedTool:
        function = NamedFunction.model_construct(name=self.name)
        return NamedTool.model_construct(type="function", function=function)


ToolChoice = Annotated[
    Annotated[FreeChoice, Tag("a free choice")] | Annotated[NamedChoice, Tag("a named choice")],
    Discriminator(lambda it: "a named choice" if type_of(it) == "tool" else "a free choice"),
    refuse_others(("auto", "any", "tool", "none"), {}),
]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    @property
    def chat(self) -> ResponseFormat:
        schema = {"name": "output", "schema": self.schema_, "strict": True}
        return ResponseFormat.model_construct(
            type="json_schema", json_schema=JsonSchema.model_validate(schema)
        )


class OutputConfig(Body):
    """`effort` and `task_budget` have no effect."""

    effort: str | None = None
    task_budget: TaskBudget | None = None
    format: OutputFormat | None = None
