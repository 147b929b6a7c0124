"""Request bodies of /v1/messages and /v1/messages/count_tokens, in Anthropic's form."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gemserve.api.replies.citations import CitedDocument
from gemserve.api.requests.base_bodies import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    Body,
    FilterBody,
    FilteringBody,
    TopP,
)
from gemserve.api.requests.chat_form import ChatForm, as_chat
from gemserve.api.requests.integers import Count, TopK
from gemserve.errors import RequestError
from gemserve_dialects.anthropic.blocks import (
    ConversationMessage,
    Texts,
    chat_messages,
    cited_documents,
)
from gemserve_dialects.anthropic.fields_without_effect import FieldsWithoutEffect
from gemserve_dialects.anthropic.tools import (
    OutputConfig,
    OutputFormat,
    ServedTool,
    ToolChoice,
)

_MAX_TOOLS = 1024
_FORMAT = "output_config.format"
_NAMES = {
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
    r"tool_choice\.function": "tool_choice",
    r"response_format\.json_schema": _FORMAT,
    "response_format": _FORMAT,
    "stop": "stop_sequences",
}


class Metadata(Body):
    user_id: str | None = None


class MessageStreamOptions(Body):
    """`include_progress`: `ping` events say how far the prompt is read."""

    include_progress: bool | None = None


class CountedBody(FilteringBody, FieldsWithoutEffect):
    """What the prompt is made of. `metadata` has no effect."""

    can_cite = True
    messages: Annotated[list[ConversationMessage], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ServedTool], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    metadata: Metadata | None = None  # type: ignore[assignment]

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same. Raises `RequestError`."""
        names = _NAMES
        if self._format is self.output_format:
            names = {old: new.replace(_FORMAT, "output_format") for old, new in _NAMES.items()}
        return ChatForm(as_chat(self, **self._chat_fields()), names)

    @property
    def _format(self) -> OutputFormat | None:
        """What the answer is held to. Raises `RequestError` if two fields say it."""
        newer = None if self.output_config is None else self.output_config.format
        if newer is not None and self.output_format is not None:
            raise RequestError(
                f"output_format: not together with {_FORMAT}, which means the same",
                param="output_format",
            )
        return newer or self.output_format

    def _chat_fields(self) -> dict[str, Any]:
        choice, wanted = self.tool_choice, self._format
        is_single = getattr(choice, "disable_parallel_tool_use", None)
        return {
            "messages": chat_messages(self.system, self.messages),
            "tools": [tool.chat for tool in self.tools or ()],
            "tool_choice": None if choice is None else choice.chat,
            "parallel_tool_calls": not is_single,
            "response_format": None if wanted is None else wanted.chat,
            "metadata": None,
        }


class AnthropicBody(CountedBody):
    max_tokens: Count
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS, fail_fast=True),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: MessageStreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    @cached_property
    def cited_documents(self) -> list[CitedDocument]:
        """The documents of which the answer should say what was kept."""
        return cited_documents(self.messages)

    @model_validator(mode="after")
    def _need_selection(self) -> Self:
        if self.cited_documents:
            self.filter = self.filter or FilterBody()
            self.filter.need_selection()
        return self

    @property
    def has_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    def _chat_fields(self) -> dict[str, Any]:
        return {
            **super()._chat_fields(),
            "stop": self.stop_sequences,
            "stream": bool(self.stream),
            "stream_options": None,
            "truncate_max_tokens": True,
        }
