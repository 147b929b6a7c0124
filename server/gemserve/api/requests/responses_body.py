"""Request body of /v1/responses. It accepts the fields without effect that clients usually send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from gemserve.api.requests.base_bodies import Body, SamplingBody, TextOr
from gemserve.api.requests.integers import INTEGRAL, Count


def _check_false(value: bool) -> bool:
    """Not `Literal[False]`, which 0 is equal to."""
    if value:
        raise ValueError("must be false")
    return value


class InputText(Body):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Body):
    """A message of the conversation; an earlier answer as the server gave it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[Annotated[list[InputText], Field(fail_fast=True)]]
    id: str | None = None
    phase: None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message in the form of chat templates."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(SamplingBody):
    input: TextOr[Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: (
        Annotated[bool, AfterValidator(_check_false), WithJsonSchema({"const": False})] | None
    ) = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0), INTEGRAL] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    reasoning: None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in the form of chat templates."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return messages + [message.plain for message in self.input]
