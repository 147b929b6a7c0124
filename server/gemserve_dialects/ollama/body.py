"""Request bodies of Ollama's endpoints."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import Body, FilteringBody, JsonSchema, ResponseFormat
from gemserve.api.requests.chat_body import MAX_TOOLS, Tool
from gemserve.api.requests.chat_form import ChatForm, as_chat, plain_message
from gemserve.api.requests.served_types import TEXT_ONLY
from gemserve.errors import RequestError
from gemserve_dialects.ollama.messages import NoImages, OllamaMessage, chat_messages
from gemserve_dialects.ollama.options import NAMES, Options
from gemserve_dialects.ollama.values import KeepAlive, because, is_no_time

# One that has no effect: the answers come without thinking.
Thinking = Annotated[
    bool | Literal["low", "medium", "high"] | None,
    because('must be true, false, "low", "medium" or "high"'),
]
Format = Annotated[
    Literal["", "json"] | dict[str, Any] | None, because('must be "json" or a JSON schema')
]
_NO_LOGPROBS = because("not served here; /v1/chat/completions has log-probabilities")
_AS_IT_IS = because("not served here; /v1/completions continues a text as it is")

# Ollama's clients add the tag of a model's newest version to a name that has none.
ModelName = Annotated[str, AfterValidator(lambda name: name.removesuffix(":latest"))]


class AnsweredBody(FilteringBody):
    """What both endpoints take that answer. `think` has no effect.

    Neither have `truncate` and `shift`: a prompt that does not fit is an error, and an answer ends.
    `keep_alive` has none on an answer: the model stays. A request without a prompt asks to load it,
    or, with 0, to unload it, which is confirmed.
    """

    model: ModelName
    format: Format = None
    options: Options | None = None
    stream: bool | None = None  # None: true
    keep_alive: KeepAlive = None
    think: Thinking = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: Annotated[Literal[False] | None, _NO_LOGPROBS] = None
    top_logprobs: Annotated[Literal[0] | None, _NO_LOGPROBS] = None

    @property
    def says_nothing(self) -> bool:
        """Has it no prompt, so that it asks for nothing but the model to be loaded or unloaded?"""
        raise NotImplementedError

    @property
    def unloads(self) -> bool:
        return is_no_time(self.keep_alive)

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
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @property
    def says_nothing(self) -> bool:
        return not self.messages

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same. Raises `RequestError`."""
        return self._form({}, messages=chat_messages(self.messages or ()))


class GenerateBody(AnsweredBody):
    """One prompt, which the chat template makes a chat."""

    prompt: str | None = None
    system: str | None = None
    suffix: Literal[""] | None = None
    template: Annotated[Literal[""] | None, _AS_IT_IS] = None
    context: Annotated[
        Annotated[list[Any], Field(max_length=0)] | None,
        because("not served here; /api/chat takes the messages of a conversation"),
    ] = None
    raw: Annotated[Literal[False] | None, _AS_IT_IS] = None
    images: Annotated[NoImages | None, because(TEXT_ONLY)] = None

    @property
    def says_nothing(self) -> bool:
        return not self.prompt

    @cached_property
    def form(self) -> ChatForm:
        """The chat that means the same."""
        messages = [plain_message("system", self.system)] if self.system else []
        messages.append(plain_message("user", self.prompt or ""))
        return self._form({r"messages(\..*)?": "prompt"}, messages=messages)


class ShowBody(Body):
    """`name` is what older clients call `model`. What follows it has no effect."""

    model_config = ConfigDict(
        json_schema_extra=field_schemas.either({"model": {}}, {"name": {}, "model": None})
    )
    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None

    @property
    def shown(self) -> str:
        """The model's name. Raises `RequestError` if there is none."""
        name = self.model or self.name
        if name is None:
            raise RequestError("model: required", param="model", code="missing_field")
        return name
