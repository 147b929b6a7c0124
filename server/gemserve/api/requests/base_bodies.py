"""Request bodies. Unknown fields are refused by name; so are known ones that would do nothing
where the caller expects something. `FieldsWithoutEffect` are accepted, documented, and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from gemserve.api.requests import field_schemas
from gemserve.api.requests.integers import (
    WHOLE,
    WHOLE_ITEMS,
    Count,
    Natural,
    Seed,
    TokenId,
    TokenIds,
)
from gemserve.types import (
    ADAPTER_NAME,
    FILTER_METHODS,
    FilterOptions,
    Keep,
    ServedMethod,
    parse_keep,
)

MAX_STOPS = 16
MAX_BIASES = 1024
MAX_CHOICES = 128  # of one request: prompts times n
MAX_LOGPROBS = 20
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE]
AdapterName = Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")]
T = TypeVar("T")
# Errors in what is not a text are those of the other form alone.
TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[T, Tag("other")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "other"),
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FilterBody(Body):
    """The `filter` object. What is omitted falls back to the server's settings."""

    method: ServedMethod | None = None
    keep: Annotated[Any, WithJsonSchema(field_schemas.KEEP)] = None
    fallback: bool | None = None
    layer: Natural | Literal["auto"] = "auto"
    pooling: Literal["mean", "max"] | None = None
    return_selection: bool = False

    @field_validator("keep")
    @classmethod
    def _check_keep(cls, value: object) -> Keep | None:
        return None if value is None else parse_keep(value)

    @property
    def options(self) -> FilterOptions:
        """The same without what only the wire has."""
        said = self.model_dump(exclude={"layer"})
        return FilterOptions(layer=None if self.layer == "auto" else self.layer, **said)


class StreamOptions(Body):
    include_usage: bool = False


class FieldsWithoutEffect(Body):
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Filterable(FieldsWithoutEffect):
    """What every endpoint that filters takes."""

    model: str
    filter: FilterBody | None = None  # null: the server's default filter, as if omitted
    adapter: AdapterName | None = None

    @field_validator(
        "filter", mode="before", json_schema_input_type=ServedMethod | FilterBody | None
    )
    @classmethod
    def _expand_shorthand(cls, value: object) -> object:
        if isinstance(value, str):
            if value not in FILTER_METHODS:
                raise ValueError(f"must be an object or one of {', '.join(FILTER_METHODS)}")
            return {"method": value}
        return value


class JsonSchema(Body):
    """`strict` changes nothing: an answer is held to the schema either way."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"type": {"enum": ["text", "json_object"]}, "json_schema": None},
            {"type": {"enum": ["json_schema"]}, "json_schema": {}},
        )
    )
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("needs json_schema exactly if its type is json_schema")
        return self


class Sampled(Filterable):
    """What every endpoint that answers takes."""

    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Natural | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(json_schema_extra={"maxProperties": MAX_BIASES, **field_schemas.TOKEN_KEYS}),
        ]
        | None
    ) = None
    min_tokens: Natural | None = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True), WHOLE_ITEMS] | None
    ) = None
    seed: Seed | None = None
    stop: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)] | None,
        WithJsonSchema(field_schemas.stops(MAX_STOPS)),
    ] = None
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31), WHOLE] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bound_biases(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise ValueError(f"has {len(value)} entries, the limit is {MAX_BIASES}")
        return value

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> list[str] | None:
        stops = [value] if isinstance(value, str) else value
        if stops is not None:
            if len(stops) > MAX_STOPS:
                raise ValueError(f"has {len(stops)} strings, the limit is {MAX_STOPS}")
            if not all(stops):
                raise ValueError("must not contain an empty string")
        return stops


class Generation(Sampled):
    """What both completion endpoints take."""

    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    n: NumChoices | None = None


# Known fields, of which no value but null is served.
UNSUPPORTED = (
    "suffix",
    "previous_response_id",
    "conversation",
    "reasoning",
)


Prompt = Annotated[str | TokenIds, WithJsonSchema({"anyOf": field_schemas.PROMPTS})]
Prompts = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]
    | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES, fail_fast=True)],
    WithJsonSchema(field_schemas.prompts(MAX_CHOICES)),
]


class CompletionBody(Generation):
    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None
    logprobs: NumTop | None = None
    suffix: None = None


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
        """As chat templates take it: arguments parsed, if they can be."""
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
    # null in what the SDKs make of a reply, which comes back as history
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
        return "".join(part.text for part in self.content or ())

    @property
    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.plain for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class SelectionBody(Filterable):
    """A prompt or messages to be filtered, and not answered."""

    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"prompt": {}, "messages": None}, {"messages": {}, "prompt": None}
        )
    )
    prompt: Prompt | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None


class TokenizerBody(Body):
    """What the tokenizer's endpoints take. vLLM's clients may leave out the model."""

    model: str | None = None


class TokenizeBody(TokenizerBody):
    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"prompt": {}, "messages": None, "add_generation_prompt": None},
            {"messages": {}, "prompt": None},
        )
    )
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False


class AdapterBody(Body):
    """A folder to load, `path`, relative to the server's adapter folder."""

    name: AdapterName
    path: Annotated[str, Field(min_length=1, max_length=4096)]


class DetokenizeBody(TokenizerBody):
    tokens: TokenIds
