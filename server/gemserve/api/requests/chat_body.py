"""Request body of /v1/chat/completions, with the tools that an answer may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import Body, Generation, Message, NumTop
from gemserve.api.requests.integers import Count

MAX_TOOLS = 128


class Function(Body):
    """`strict` changes nothing: forced arguments are held to `parameters` either way."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)] | None = (
        None
    )
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(Generation):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
