"""Request body of /v1/chat/completions: messages, and the tools that an answer may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, from_json

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import Body, GenerationBody, NumTop
from gemserve.api.requests.integers import Count

MAX_TOOLS = 128


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """The call in the form of chat templates: its arguments are parsed, if they can be."""
        try:
            arguments = from_json(self.function.arguments)
        except ValueError:  # cut off, or made up
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"content": {}, "tool_calls": None},
            {"role": {"enum": ["assistant"]}, "tool_calls": {}},
        )
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)] | None = None
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None,
        Field(validate_default=True),
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    # the SDKs write these nulls when they send a reply back as history
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @field_validator("tool_calls")
    @classmethod
    def _check_caller(
        cls, value: list[ToolCall] | None, info: ValidationInfo
    ) -> list[ToolCall] | None:
        if value is not None and info.data.get("role") != "assistant":
            raise ValueError("only the assistant's messages have them")
        return value

    @field_validator("content")
    @classmethod
    def _check_content(
        cls, value: str | list[TextPart] | None, info: ValidationInfo
    ) -> str | list[TextPart] | None:
        if value is None and info.data.get("tool_calls") is None:
            raise PydanticCustomError("missing", "Field required")
        return value

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    @property
    def plain(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.plain for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


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


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
