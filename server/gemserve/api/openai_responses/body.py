"""Request body of /v1/responses. It accepts the fields without effect that clients usually send."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from gemserve.api.openai_responses.items import Item, chat_messages
from gemserve.api.openai_responses.tools import (
    AllowedTools,
    ChosenFunction,
    FunctionTool,
    SchemaFormat,
    ServedTool,
    TextFormat,
    TextOptions,
    ToolChoice,
)
from gemserve.api.requests.base_bodies import Body, NumTop, SamplingBody, TextOr
from gemserve.api.requests.chat_body import MAX_TOOLS, Message
from gemserve.api.requests.chat_fields_without_effect import Moderation
from gemserve.api.requests.chat_form import ChatForm, as_chat, plain_message
from gemserve.api.requests.integers import Count, Natural
from gemserve.errors import RequestError, shown

LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    r"response_format\.json_schema\.schema": "text.format.schema",
    "response_format": "text.format",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.function": "tool_choice",
}


def _check_false(value: bool) -> bool:
    """Not `Literal[False]`, which 0 is equal to."""
    if value:
        raise ValueError("must be false")
    return value


class ResponseStreamOptions(Body):
    """`include_progress`: further `response.in_progress` events say how far the prompt is read.

    The others have no effect: the last event has the usage, and nothing is padded.
    """

    include_obfuscation: bool | None = None
    include_usage: bool | None = None
    include_progress: bool | None = None


class OpenAIResponsesBody(SamplingBody):
    input: TextOr[Annotated[list[Item], Field(min_length=1, fail_fast=True)]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ServedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: NumTop | None = None
    # what follows has no effect, or must be what it says
    truncation: Literal["disabled", "auto"] | None = None
    max_tool_calls: Natural | None = None  # of hosted tools: there are none
    stream_options: ResponseStreamOptions | None = None
    reasoning: dict[str, Any] | None = None
    moderation: Moderation | None = None
    background: (
        Annotated[bool, AfterValidator(_check_false), WithJsonSchema({"const": False})] | None
    ) = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None

    @property
    def has_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same. Raises `RequestError`."""
        if self.top_logprobs and not self.has_logprobs:
            raise RequestError(
                f'top_logprobs={self.top_logprobs}: needs "{LOGPROBS}" in include',
                param="top_logprobs",
            )
        tools, choice, names = self.tools or [], self.tool_choice, _NAMES
        if isinstance(choice, AllowedTools):
            places = _allowed(choice, tools)
            tools, choice = [tools[place] for place in places], choice.mode
            moved = {rf"tools\.{to}\.function": f"tools.{at}" for to, at in enumerate(places)}
            names = {**moved, **names}
        chat = as_chat(
            self,
            messages=self._messages,
            max_tokens=self.max_output_tokens,
            tools=[tool.chat for tool in tools],
            tool_choice=choice.chat if isinstance(choice, ChosenFunction) else choice,
            response_format=None if self.format is None else self.format.chat,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs if self.has_logprobs else None,
            stream_options=None,
        )
        return ChatForm(chat, names)

    @property
    def format(self) -> TextFormat | SchemaFormat | None:
        return None if self.text is None else self.text.format

    @property
    def _messages(self) -> list[Message]:
        instructions, given = self.instructions, self.input
        messages = [plain_message("system", instructions)] if instructions else []
        if isinstance(given, str):
            return [*messages, plain_message("user", given)]
        return messages + chat_messages(given)


def _allowed(choice: AllowedTools, tools: Sequence[FunctionTool]) -> list[int]:
    """The places of the allowed tools. Raises `RequestError` for one that is not there."""
    names = [tool.name for tool in tools]
    for index, allowed in enumerate(choice.tools):
        if allowed.name not in names:
            field = f"tool_choice.tools.{index}.name"
            raise RequestError(f"{field}={shown(allowed.name)}: not one of the tools", param=field)
    allowed_names = {allowed.name for allowed in choice.tools}
    return [place for place, name in enumerate(names) if name in allowed_names]
