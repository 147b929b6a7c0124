"""The fields that the bodies of several endpoints share.

An unknown field is an error, and so is a known one that would not do what its sender expects.
`FieldsWithoutEffect` are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from gemserve.api.requests import field_schemas
from gemserve.api.requests.integers import (
    INTEGRAL,
    INTEGRAL_ITEMS,
    Natural,
    Seed,
    TokenId,
    TopK,
)
from gemserve.contract.adapters import ADAPTER_NAME
from gemserve.contract.filter_options import (
    LIBRARY_NAME,
    MOST_CANDIDATES,
    NO_PROTECT,
    FilterOptions,
    FilterReader,
    Heads,
    Keep,
    Lexical,
    Protect,
    SegmentSize,
    parse_heads,
    parse_keep,
    parse_segment_size,
)
from gemserve.filtering.methods import SERVED_METHODS
from gemserve.prompting.answerable import Answerable

MAX_STOPS = 16
MAX_STOP_CHARS = 1000  # of each stop string
MAX_BIASES = 1024
MAX_PRIORITY = 100  # and the lowest is -100
MAX_SALT_CHARS = 512
MAX_IGNORED_CHARS = 4096  # of a text without effect: it is kept until the reply has ended
MAX_CHOICES = 128  # of one request: prompts times n
MAX_LOGPROBS = 20
MOST_PROTECTED = Field(max_length=1024, fail_fast=True)  # messages, or documents
MOST_MARKS = Field(max_length=64, fail_fast=True)  # each is looked for in the whole prompt
Mark = Annotated[str, Field(min_length=1, max_length=1000)]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGRAL]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL]
TopP = Annotated[float, Field(ge=0, le=1, description="0: the likeliest token alone.")]
ServedMethod = Annotated[
    str, GetPydanticSchema(lambda *_: core_schema.literal_schema([*SERVED_METHODS]))
]
LibraryName = Annotated[str, Field(pattern=f"^{LIBRARY_NAME}$")]
MaxSeconds = Annotated[
    float, Field(gt=0, le=86400, description="For the search in libraries and for reading.")
]
NumCandidates = Annotated[int, Field(ge=1, le=MOST_CANDIDATES), INTEGRAL]
AdapterName = Annotated[str, Field(pattern=f"^{ADAPTER_NAME}$")]
FEW = Field(max_length=128, fail_fast=True)  # of a list that is only checked
Ignored = Annotated[str, Field(max_length=MAX_IGNORED_CHARS)]
S = TypeVar("S")
T = TypeVar("T")
# Tags of unions are no names of fields, so that paths in errors leave them out.
_A_TEXT, NO_TEXT = "a text", "no text"
# A text is checked as S only, and another value as T only, so that errors are about its members.
SomeTextOr = Annotated[
    Annotated[S, Tag(_A_TEXT)] | Annotated[T, Tag(NO_TEXT)],
    Discriminator(lambda value: _A_TEXT if isinstance(value, str) else NO_TEXT),
]
TextOr = SomeTextOr[str, T]

LibraryNames = SomeTextOr[
    LibraryName, Annotated[list[LibraryName], Field(min_length=1, max_length=16, fail_fast=True)]
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ProtectBody(Body):
    """What is instruction and what is document, where the server should not tell by itself.

    `messages` and `documents`: numbers of messages, from 0, which are read whole, or are documents.
    `marks`: pairs of texts; what stands between the two is read whole.
    """

    messages: Annotated[list[Natural], MOST_PROTECTED, INTEGRAL_ITEMS] = []
    documents: Annotated[list[Natural], MOST_PROTECTED, INTEGRAL_ITEMS] = []
    marks: Annotated[
        list[Annotated[list[Mark], Field(min_length=2, max_length=2)]], MOST_MARKS
    ] = []

    @property
    def options(self) -> Protect:
        return Protect(
            messages=tuple(self.messages),
            documents=tuple(self.documents),
            marks=tuple((opening, closing) for opening, closing in self.marks),
        )


class FilterBody(Body):
    """The `filter` object. What is omitted falls back to the server's settings."""

    method: ServedMethod | None = None
    keep: Annotated[Any, WithJsonSchema(field_schemas.KEEP)] = None
    fallback: bool | None = None
    layer: Natural | Literal["auto"] = "auto"
    heads: Annotated[Any, WithJsonSchema(field_schemas.HEADS)] = None
    window: Annotated[Any, WithJsonSchema(field_schemas.SEGMENT_SIZE)] = None
    lexical: Lexical | None = None
    reader: FilterReader | None = None
    pooling: Literal["mean", "max"] | None = None
    protect: ProtectBody | None = None
    library: LibraryNames | None = None
    candidates: NumCandidates | None = None
    max_seconds: MaxSeconds | None = None
    citations: bool = False
    return_selection: bool = False
    return_scores: bool | Literal["exact", "heads"] = False
    # what libraries have of the question, once that was looked for
    _answerable: Answerable | None = PrivateAttr(default=None)
    _needs_selection: bool = PrivateAttr(default=False)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The names of the libraries that the answer is to be found in, each once."""
        names = [self.library] if isinstance(self.library, str) else self.library or ()
        return tuple(dict.fromkeys(names))

    @property
    def answerable(self) -> Answerable | None:
        return self._answerable

    def need_selection(self) -> None:
        """Have the report say what was kept, although the reply does not show it."""
        self._needs_selection = True

    def found(self, answerable: Answerable) -> None:
        """Note what libraries have of the question. The request is then built anew."""
        self._answerable = answerable

    @field_validator("max_seconds")
    @classmethod
    def _check_max_seconds(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("library") is None:
            raise ValueError("only with filter.library, whose candidates are read in this time")
        return value

    @field_validator("citations")
    @classmethod
    def _check_citations(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("library") is None:
            raise ValueError("only with filter.library, whose files are cited")
        return value

    @field_validator("keep")
    @classmethod
    def _check_keep(cls, value: object) -> Keep | None:
        return None if value is None else parse_keep(value)

    @field_validator("heads")
    @classmethod
    def _check_heads(cls, value: object) -> Heads | None:
        return None if value is None else parse_heads(value)

    @field_validator("window")
    @classmethod
    def _check_segment_size(cls, value: object) -> SegmentSize | None:
        return None if value is None else parse_segment_size(value)

    @property
    def options(self) -> FilterOptions:
        """The filter's options as the engine takes them."""
        of_libraries = {"library", "candidates", "max_seconds", "citations"}
        fields = self.model_dump(exclude={"layer", "protect", *of_libraries})
        fields["return_selection"] = self.return_selection or self._needs_selection
        return FilterOptions(
            layer=None if self.layer == "auto" else self.layer,
            protect=NO_PROTECT if self.protect is None else self.protect.options,
            **fields,
        )


class AnswerFilterBody(FilterBody):
    """The `filter` object of endpoints that can report the attention of their answers."""

    return_attention: bool = False


class StreamOptions(Body):
    """`continuous_usage_stats`: every chunk has its choice's usage so far, if usage is included.

    `include_progress`: chunks without choices say how far the prompt is read.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None  # without effect: nothing is padded
    include_progress: bool | None = False

    @property
    def has_usage_everywhere(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class CacheOptions(Body):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class FieldsWithoutEffect(Body):
    user: Ignored | None = None
    metadata: Annotated[dict[Ignored, Ignored], FEW] | None = None
    store: bool | None = None
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None


class ModelBody(FieldsWithoutEffect):
    """The fields of every endpoint that reads texts with a model."""

    model: str
    adapter: AdapterName | None = None


class FilteringBody(ModelBody):
    """The fields of every endpoint that filters. `can_cite`: its replies may have citations."""

    can_cite: ClassVar[bool] = False
    filter: FilterBody | None = None  # null: the server's default filter, as if omitted
    # the prompt shares what is computed of it only with prompts of the same one
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @field_validator("filter")
    @classmethod
    def _check_can_cite(cls, value: FilterBody | None) -> FilterBody | None:
        if value is not None and value.citations and not cls.can_cite:
            raise ValueError(
                "citations: replies of this endpoint have no place for them; filter.sources of the "
                "reply says the same"
            )
        return value

    @field_validator(
        "filter", mode="before", json_schema_input_type=ServedMethod | FilterBody | None
    )
    @classmethod
    def _expand_shorthand(cls, value: object) -> object:
        return _expanded(value)


def _expanded(value: object) -> object:
    """The `filter` object that a bare name of a method stands for."""
    if isinstance(value, str):
        if value not in SERVED_METHODS:
            raise ValueError(f"must be an object or one of {', '.join(SERVED_METHODS)}")
        return {"method": value}
    return value


class JsonSchema(Body):
    """An answer is held to the schema; with `strict`, keywords that cannot be held are errors."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: Ignored | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """`schema` is llama.cpp's, for the object."""

    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"type": {"enum": ["text"]}, "json_schema": None, "schema": None},
            {"type": {"enum": ["json_object"]}, "json_schema": None},
            {"type": {"enum": ["json_schema"]}, "json_schema": {}, "schema": None},
        )
    )
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("needs json_schema exactly if its type is json_schema")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("has schema only if its type is json_object")
        return self


class SamplingBody(FilteringBody):
    """The fields of every endpoint that generates."""

    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
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
        Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True), INTEGRAL_ITEMS] | None
    ) = None
    seed: Seed | None = None
    stop: Annotated[
        TextOr[Annotated[list[str], Field(fail_fast=True)]] | None,
        WithJsonSchema(field_schemas.stops(MAX_STOPS, MAX_STOP_CHARS)),
    ] = None
    ignore_eos: bool | None = False
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), INTEGRAL] | None = None

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
            longest = max(map(len, stops), default=0)
            if longest > MAX_STOP_CHARS:
                raise ValueError(
                    f"a stop string has {longest} characters, the limit is {MAX_STOP_CHARS}"
                )
        return stops


class GenerationBody(SamplingBody):
    """The fields of both completion endpoints."""

    filter: AnswerFilterBody | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None  # llama.cpp's name for `include_progress`
    response_format: ResponseFormat | None = None
    n: NumChoices | None = None
    return_token_ids: bool | None = None  # vLLM's: the ids of prompts and answers
    truncate_max_tokens: bool | None = None  # lower max_tokens to what the context leaves

    @field_validator(
        "filter", mode="before", json_schema_input_type=ServedMethod | AnswerFilterBody | None
    )
    @classmethod
    def _expand_shorthand(cls, value: object) -> object:
        return _expanded(value)
