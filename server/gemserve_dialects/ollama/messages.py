"""`messages` of /api/chat: texts, calls of tools, and what the calls gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gemserve.api.requests.base_bodies import TextOr
from gemserve.api.requests.chat_body import CalledFunction, Message, ToolCall
from gemserve.api.requests.integers import Natural
from gemserve.api.requests.omitted_parts import first_of_last_turn, omitted
from gemserve.api.requests.paired_calls import paired
from gemserve.api.requests.served_types import TEXT_ONLY, HistoryItem
from gemserve.errors import RequestError

NoImages = Annotated[
    list[Any], Field(max_length=0, description="Images are refused: models read text only.")
]


Images = Annotated[list[Any], Field(description="Images are not read: models read text only.")]


class OllamaFunction(HistoryItem):
    """`index` and `description` have no effect."""

    name: str
    arguments: TextOr[dict[str, Any]] | None = None  # a text of JSON, or nothing
    index: Natural | None = None
    description: str | None = None


class OllamaCall(HistoryItem):
    """A call that an earlier answer asked for."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: OllamaFunction

    @property
    def chat(self) -> ToolCall:
        function = CalledFunction.model_construct(
            name=self.function.name, arguments=self.function.arguments
        )
        return ToolCall.model_construct(id=self.id, type="function", function=function)


class OllamaMessage(HistoryItem):
    """`thinking` is left out of the prompt. `tool_name`, or `name`: whose result it is.

    Of the images of earlier messages the prompt says that they are omitted.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    images: Images | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @property
    def chat(self) -> Message:
        lines = [omitted("image")] * len(self.images or ())
        calls = [call.chat for call in self.tool_calls or ()]
        return Message.model_construct(
            role=self.role,
            content="\n".join(filter(None, [self.content, *lines])),
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            name=self.tool_name or self.name,
        )


def chat_messages(said: Sequence[OllamaMessage]) -> list[Message]:
    """The messages as those of a chat. Raises `RequestError` for images that were sent last."""
    first = first_of_last_turn([message.role for message in said])
    for index, message in enumerate(said[first:], first):
        if message.images and message.role == "user":
            field = f"messages.{index}.images"
            raise RequestError(f"{field}={len(message.images)} images: {TEXT_ONLY}", param=field)
    return paired([message.chat for message in said])
