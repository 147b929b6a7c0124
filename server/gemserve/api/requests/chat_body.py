"""Request body of /v1/chat/completions: messages, and the tools that an answer may call."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from gemserve.api.requests import field_schemas
from gemserve.api.requests.answer_start_body import AnswerStartBody
from gemserve.api.requests.base_bodies import (
    Body,
    NumTop,
    SomeTextOr,
    TextOr,
)
from gemserve.api.requests.chat_fields_without_effect import ChatFieldsWithoutEffect
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.guided_body import GuidedBody
from gemserve.api.requests.integers import Count, Natural
from gemserve.api.requests.omitted_parts import OmittedPart, but_not, first_of_last_turn
from gemserve.api.requests.paired_calls import paired
from gemserve.api.requests.served_types import by_type, of_type, refuse_others, type_of
from gemserve.api.requests.template_variables import TemplateVariables
from gemserve.errors import RequestError, shown

MAX_TOOLS = 128
_OTHER_PARTS = {
    "image_url": "an image",
    "input_image": "an image",
    "image": "an image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "a video",
}
_STORE_IT = (
    "is a file; this server's model takes text only: store it with POST /v1/documents and name its "
    "file_id"
)
# a mark for other vendors' caches, which this server does without
CacheMark = Annotated[dict[str, Any], Field(description="Without effect.")] | None


class TextPart(Body):
    """`input_text` and `output_text` are what the Responses API calls a text.

    What follows the text has no effect: parts of replies, which come back as history, have it.
    """

    type: Literal["text", "input_text", "output_text"]
    text: str
    cache_control: CacheMark = None
    prompt_cache_breakpoint: CacheMark = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    id: str | None = None
    index: Natural | None = None


_TEXTS = get_args(TextPart.model_fields["type"].annotation)


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


class OmittedChatPart(OmittedPart):
    """A part of another type, or a file that is not stored here."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                but_not(*_TEXTS, "refusal", "file"),
                {
                    "properties": {
                        "type": {"const": "file"},
                        "file": {"type": "object", "required": ["file_data"]},
                    },
                    "required": ["file"],
                },
            ]
        }
    )


def _kind_of(part: object) -> str:
    kind = type_of(part)
    file = part.get("file") if isinstance(part, dict) else None
    if kind == "file" and not (isinstance(file, dict) and "file_data" in file):
        return "a file" if isinstance(part, dict | FilePart) else "another"
    if not isinstance(kind, str) or kind in _TEXTS:
        return "a text"
    return "a refusal" if kind == "refusal" else "another"


Part = Annotated[
    Annotated[TextPart, Tag("a text")]
    | Annotated[RefusalPart, Tag("a refusal")]
    | Annotated[FilePart, Tag("a file")]
    | Annotated[OmittedChatPart, Tag("another")],
    Discriminator(_kind_of),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
AnyPart = TextPart | RefusalPart | FilePart | OmittedChatPart


class CalledFunction(Body):
    """`parsed_arguments` has no effect: OpenAI's SDK adds it to replies."""

    name: str
    arguments: TextOr[dict[str, Any]] | None = None
    parsed_arguments: Any = None
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's


def parsed_arguments(written: str | dict[str, Any] | None) -> Any:
    """A call's arguments as an object; what is cut off, or made up, stays as it is."""
    arguments: Any = written or {}
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = from_json(arguments)
    return {} if arguments is None else arguments


class ToolCall(Body):
    """What follows `function` has no effect. One without an id gets it: see `paired_calls`."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction
    index: Natural | None = None  # of a stream's delta
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's
    extra_content: dict[str, Any] | None = None  # Gemini's

    @property
    def plain(self) -> dict[str, Any]:
        """The call in the form of chat templates: its arguments are parsed, if they can be."""
        function = {
            "name": self.function.name,
            "arguments": parsed_arguments(self.function.arguments),
        }
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"content": {}, "tool_calls": None, "function_call": None},
            {"role": {"enum": ["tool", "function"]}, "tool_calls": None, "function_call": None},
            {"role": {"enum": ["assistant"]}},
        )
    )
    # "function", and `function_call` below, are what OpenAI had before tools
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    content: Annotated[TextOr[Parts] | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # an assistant's text if it has no content
    # replies of this and other servers have these, and come back as history
    annotations: list[Any] | None = None
    parsed: Any = None  # the SDK of OpenAI's
    images: list[Any] | None = None  # LiteLLM's
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None  # OpenRouter's
    thinking_blocks: list[Any] | None = None  # LiteLLM's
    extra_content: dict[str, Any] | None = None  # Gemini's
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's
    audio: None = None
    function_call: CalledFunction | None = None
    cache_control: CacheMark = None

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _check_caller(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("role") != "assistant":
            raise ValueError("only the assistant's messages have them")
        return value

    @field_validator("content")
    @classmethod
    def _check_content(
        cls, value: str | list[AnyPart] | None, info: ValidationInfo
    ) -> str | list[AnyPart] | None:
        if value is None and info.data.get("role") not in ("assistant", "tool", "function"):
            raise PydanticCustomError("missing", "Field required")
        return value

    @property
    def text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if not _is_thought(part))

    @property
    def plain(self) -> dict[str, Any]:
        """The message in the form of chat templates."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.plain for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @property
    def with_tools(self) -> Message:
        """The message with a call, or as the result of one, in today's form and without an id."""
        if self.role == "function":
            return self.model_copy(update={"role": "tool"})
        if self.function_call is None or self.tool_calls:
            return self
        call = ToolCall(function=self.function_call)
        return self.model_copy(update={"tool_calls": [call], "function_call": None})


def _is_thought(part: AnyPart) -> bool:
    return isinstance(part, OmittedPart) and part.is_thought


def _with_tools(messages: list[Message]) -> list[Message]:
    return paired([message.with_tools for message in messages])


def _check_last_turn(messages: list[Message]) -> list[Message]:
    """Raise `RequestError` for a part that the user has sent last, and that is not read."""
    first = first_of_last_turn([message.role for message in messages])
    for index, message in enumerate(messages[first:], first):
        parts = message.content if isinstance(message.content, list) else ()
        for place, part in enumerate(parts):
            if isinstance(part, OmittedPart) and message.role == "user":
                raise _not_read(part.type, f"messages.{index}.content.{place}")
    return messages


def _not_read(kind: str, path: str) -> RequestError:
    """The error for a part of this type at `path`."""
    if kind == "file":
        return RequestError(f"{path}: {_STORE_IT}", param=path)
    if kind in _OTHER_PARTS:
        reason = f"is {_OTHER_PARTS[kind]}; this server's model takes text only"
        return RequestError(f"{path}: {reason}", param=path)
    return RequestError(
        f"{path}.type={shown(kind)}: must be one of text, file", param=f"{path}.type"
    )


Messages = Annotated[
    list[Message],
    Field(min_length=1, fail_fast=True),
    AfterValidator(_with_tools),
    AfterValidator(_check_last_turn),
]


class Function(Body):
    """Forced arguments are held to `parameters`; `strict`: keywords that cannot be are errors."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Field(json_schema_extra=field_schemas.OBJECT)] | None = (
        None
    )
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
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


class ToolSelection(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Body):
    """Of all tools, those that this answer may call. Only they are in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSelection

    def of(self, tools: list[Tool]) -> list[Tool]:
        """The tools that are allowed. Raises `RequestError` for one that is none of `tools`."""
        known = {tool.function.name for tool in tools}
        for index, named in enumerate(self.allowed_tools.tools):
            if named.function.name not in known:
                field = f"tool_choice.allowed_tools.tools.{index}.function.name"
                raise RequestError(
                    f"{field}={shown(named.function.name)}: not one of the tools", param=field
                )
        allowed = {named.function.name for named in self.allowed_tools.tools}
        return [tool for tool in tools if tool.function.name in allowed]


ChoiceWord = Literal["none", "auto", "required"]
ChosenTools = Annotated[
    Annotated[NamedTool, of_type("function")] | Annotated[AllowedTools, of_type("allowed_tools")],
    by_type(),
    refuse_others(("function", "allowed_tools"), {}),
]


class ChatBody(GuidedBody, AnswerStartBody, ChatFieldsWithoutEffect):
    can_cite = True
    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: Tools | None = None
    tool_choice: SomeTextOr[ChoiceWord, ChosenTools] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _only_allowed(self) -> Self:
        """Leave the tools that may be called, and the choice among them."""
        if isinstance(self.tool_choice, AllowedTools):
            self.tools = self.tool_choice.of(self.tools or [])
            self.tool_choice = self.tool_choice.allowed_tools.mode
        return self
