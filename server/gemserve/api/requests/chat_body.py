"""Request body of /v1/chat/completions: messages, and the tools that an answer may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError, from_json

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import Body, NumTop, TextOr
from gemserve.api.requests.chat_fields_without_effect import ChatFieldsWithoutEffect
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.guided_body import GuidedBody
from gemserve.api.requests.integers import Count, Natural
from gemserve.api.requests.template_variables import TemplateVariables

MAX_TOOLS = 128
_OTHER_PARTS = {
    "image_url": "an image",
    "input_image": "an image",
    "image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
}
# a mark for other vendors' caches, which this server does without
CacheMark = Annotated[dict[str, Any], Field(description="Without effect.")] | None


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheMark = None
    prompt_cache_breakpoint: CacheMark = None


class RefusalPart(Body):
    """An earlier answer of another server, which is its text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class FileReference(Body):
    """`filename` has no effect."""

    file_id: DocumentReference
    filename: str | None = None


class FilePart(Body):
    """A stored document in place of its text."""

    type: Literal["file"]
    file: FileReference
    cache_control: CacheMark = None
    prompt_cache_breakpoint: CacheMark = None

    @property
    def text(self) -> str:
        return self.file.file_id.text


def _check_kind(part: object) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    file = part.get("file") if isinstance(part, dict) and kind == "file" else None
    if isinstance(file, dict) and "file_data" in file:
        raise ValueError(
            "is a file; this server's model takes text only: store it with POST /v1/documents and "
            "name its file_id"
        )
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        raise ValueError(f"is {_OTHER_PARTS[kind]}; this server's model takes text only")
    return part


def _kind_of(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return {"refusal": "a refusal", "file": "a file"}.get(str(kind), "a text")


Part = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[FilePart, Tag("a file")],
    Discriminator(_kind_of),
    BeforeValidator(_check_kind),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Natural | None = None  # of a stream's delta; it has no effect

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
            {"role": {"enum": ["assistant"]}},
        )
    )
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    content: Annotated[TextOr[Parts] | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # an assistant's text if it has no content
    # replies of this and other servers have these, and come back as history
    annotations: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's
    audio: None = None
    function_call: None = None
    cache_control: CacheMark = None

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
        cls, value: str | list[TextPart | RefusalPart | FilePart] | None, info: ValidationInfo
    ) -> str | list[TextPart | RefusalPart | FilePart] | None:
        if value is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "Field required")
        return value

    @property
    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    @property
    def plain(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.plain for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Function(Body):
    """Forced arguments are held to `parameters`; `strict`: keywords that cannot be are errors."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)] | None = (
        None
    )
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: CacheMark = None

    @property
    def plain(self) -> dict[str, Any]:
        """The tool in the form of chat templates."""
        return self.model_dump(exclude_none=True, exclude={"cache_control"})


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GuidedBody, ChatFieldsWithoutEffect):
    can_cite = True
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
