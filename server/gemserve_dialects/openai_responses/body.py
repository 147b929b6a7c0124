"""Request bodies of /v1/responses and of its count of tokens.

They accept the fields without effect that clients usually send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from gemserve.api.requests.base_bodies import FEW, Body, FilteringBody, NumTop, SamplingBody, TextOr
from gemserve.api.requests.chat_body import Message
from gemserve.api.requests.chat_fields_without_effect import Moderation
from gemserve.api.requests.chat_form import ChatForm, as_chat, plain_message
from gemserve.api.requests.integers import Count, Natural
from gemserve.api.requests.tool_choice import ToolChoice as ChatToolChoice
from gemserve.errors import RequestError
from gemserve_dialects.openai_responses.called_tools import CalledTool, called_tools, chosen_tools
from gemserve_dialects.openai_responses.items import Item, chat_messages, further_tools
from gemserve_dialects.openai_responses.tools import (
    HostedTool,
    SchemaFormat,
    TextFormat,
    TextOptions,
    ToolChoice,
    Tools,
)

LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    r"response_format\.json_schema\.schema": "text.format.schema",
    "response_format": "text.format",
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


class InputBody(FilteringBody):
    """What the prompt is made of."""

    can_cite = True
    input: TextOr[Annotated[list[Item], Field(min_length=1, fail_fast=True)]]
    instructions: str | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # what follows has no effect, or must be what it says
    truncation: Literal["disabled", "auto"] | None = None
    reasoning: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    context_management: Annotated[list[dict[str, Any]], FEW] | None = None
    previous_response_id: None = None
    conversation: None = None

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same. Raises `RequestError`."""
        has_hosted = any(isinstance(tool, HostedTool) for tool in self.tools or ())
        tools, choice = chosen_tools(
            self.tool_choice, [*self.called_tools.values()], has_hosted=has_hosted
        )
        places = {}
        for index, tool in enumerate(tools):
            function = rf"tools\.{index}\.function"
            places[rf"{function}\.parameters"] = tool.parameters_field
            places[function] = tool.field
        return ChatForm(as_chat(self, **self._chat_fields(tools, choice)), {**places, **_NAMES})

    @cached_property
    def called_tools(self) -> dict[str, CalledTool]:
        """The tools that can be called, by their names in the prompt. Raises `RequestError`."""
        found = () if isinstance(self.input, str) else further_tools(self.input)
        return {tool.flat_name: tool for tool in called_tools(self.tools or (), found)}

    def _chat_fields(self, tools: Sequence[CalledTool], choice: ChatToolChoice) -> dict[str, Any]:
        return {
            "messages": self._messages,
            "tools": [tool.chat for tool in tools],
            "tool_choice": choice,
            "response_format": None if self.format is None else self.format.chat,
            "stream_options": None,
        }

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


class CountedInputBody(InputBody):
    model: str | None = None  # type: ignore[assignment]


class OpenAIResponsesBody(InputBody, SamplingBody):
    max_output_tokens: Count | None = None
    include: Annotated[list[str], FEW] | None = None
    top_logprobs: NumTop | None = None
    # what follows has no effect, or must be what it says
    max_tool_calls: Natural | None = None  # of hosted tools: there are none
    stream_options: ResponseStreamOptions | None = None
    moderation: Moderation | None = None
    background: (
        Annotated[bool, AfterValidator(_check_false), WithJsonSchema({"const": False})] | None
    ) = None
    prompt: None = None

    @property
    def has_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def _chat_fields(self, tools: Sequence[CalledTool], choice: ChatToolChoice) -> dict[str, Any]:
        if self.top_logprobs and not self.has_logprobs:
            raise RequestError(
                f'top_logprobs={self.top_logprobs}: needs "{LOGPROBS}" in include',
                param="top_logprobs",
            )
        return {
            **super()._chat_fields(tools, choice),
            "max_tokens": self.max_output_tokens,
            "truncate_max_tokens": True,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
        }
