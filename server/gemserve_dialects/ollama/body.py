"""Request bodies of Ollama's endpoints."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gemserve.api.requests.base_bodies import Body, FilteringBody, JsonSchema, ResponseFormat
from gemserve.api.requests.chat_body import MAX_TOOLS, Tool
from gemserve.api.requests.chat_form import ChatForm, as_chat, plain_message
from gemserve_dialects.ollama.messages import NoImages, OllamaMessage, chat_messages
from gemserve_dialects.ollama.options import NAMES, Options

# One that has no effect: the answers come without thinking.
Thinking = bool | Literal["low", "medium", "high"] | None

_NO_TIME = ("0", "0s", "0m", "0h", "0ms")

# Ollama's clients add the tag of a model's newest version to a name that has none.
ModelName = Annotated[str, AfterValidator(lambda name: name.removesuffix(":latest"))]


class AnsweredBody(FilteringBody):
    """What both endpoints take that answer. `think` has no effect.

    `keep_alive` has none on an answer: the model stays. A request without a prompt asks to load it,
    or, with 0, to unload it, which is confirmed.
    """

    model: ModelName
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    stream: bool | None = None  # None: true
    keep_alive: str | Annotated[float, Field(ge=-1e12, le=1e12)] | None = None
    think: Thinking = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None

    @property
    def says_nothing(self) -> bool:
        """Has it no prompt, so that it asks for nothing but the model to be loaded or unloaded?"""
        raise NotImplementedError

    @property
    def unloads(self) -> bool:
        kept = self.keep_alive
        return kept == 0 or (isinstance(kept, str) and kept.strip() in _NO_TIME)

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    def _form(self, names: dict[str, str], **fields: Any) -> ChatForm:
        options = self.options or Options()
        known = {
            **{"stream": self.is_streamed, "logprobs": None, "top_logprobs": None},
            "response_format": self._response_format(),
            **options.chat_fields,
            **fields,
        }
        formats = {r"response_format(\..*)?": "format"}
        return ChatForm(as_chat(self, **known), {**NAMES, **formats, **names})

    def _response_format(self) -> ResponseFormat | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return ResponseFormat.model_construct(type="json_object", json_schema=None)
        schema = JsonSchema.model_validate({"name": "answer", "schema": self.format})
        return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


class OllamaChatBody(AnsweredBody):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @property
    def says_nothing(self) -> bool:
        return not self.messages

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same. Raises `RequestError`."""
        return self._form({}, messages=chat_messages(self.messages))


class GenerateBody(AnsweredBody):
    """One prompt, which the chat template makes a chat."""

    prompt: str = ""
    system: str | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[Any], Field(max_length=0)] | None = None
    raw: Literal[False] | None = None
    images: NoImages | None = None

    @property
    def says_nothing(self) -> bool:
        return not self.prompt

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same."""
        messages = [plain_message("system", self.system)] if self.system else []
        messages.append(plain_message("user", self.prompt))
        return self._form({r"messages(\..*)?": "prompt"}, messages=messages)


class ShowBody(Body):
    """`verbose` has no effect."""

    model: ModelName
    verbose: bool | None = None
