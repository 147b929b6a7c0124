"""Request bodies of /v1/rerank and /v1/score, with the fields of Jina, Cohere and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import MAX_PRIORITY, Body, ModelBody, TextOr
from gemserve.api.requests.integers import INTEGRAL, Count, Natural
from gemserve.api.requests.json_body import MAX_DOCUMENTS
from gemserve.contract.filter_options import Lexical
from gemserve.errors import RequestError

WHOLE = -1  # of `truncate_prompt_tokens`: nothing is left out


class TextObject(Body):
    """A document as an object."""

    text: str


Text = TextOr[TextObject]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), INTEGRAL]


class RankingBody(ModelBody):
    """What both endpoints take. `model` may be left out: one model is served.

    `truncate_prompt_tokens`: the most tokens of a document and its query together; −1: all.
    """

    model: str | None = None  # type: ignore[assignment]
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=WHOLE, le=field_schemas.MAX_INTEGER), INTEGRAL] | None
    ) = None
    priority: Priority | None = None


class RerankBody(RankingBody):
    """Documents to be ordered by how relevant they are to the query.

    `top_n`: how many of them the reply has; 0: all. `return_documents`: the reply has their texts.
    `max_tokens_per_doc`: the most tokens that are read of each; what is behind is left out.
    `lexical`: "off": the query's words do not count beside what the model looks at.
    """

    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    top_n: Natural | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    lexical: Lexical | None = None
    # Cohere's, which its older clients send as null
    rank_fields: None = None
    max_chunks_per_doc: None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return texts_of(self.documents)

    def returns_documents(self, default: bool) -> bool:
        return default if self.return_documents is None else self.return_documents


# The names of the two sides, in each of vLLM's forms.
_SIDES = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
_NAMES = sorted({name for side in _SIDES for name in side})
Side = TextOr[Texts]


def _form(side: tuple[str, str]) -> dict[str, field_schemas.Json | None]:
    """One of the forms of a body: its fields are required, and those of others are not there."""
    return {name: {} if name in side else None for name in _NAMES}


class ScoreBody(RankingBody):
    """Pairs of a query and a document: one with each, or as many of one as of the other.

    The two sides have the names of one of four forms.
    """

    model_config = ConfigDict(json_schema_extra=field_schemas.either(*map(_form, _SIDES)))
    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None

    @property
    def side_names(self) -> tuple[str, str]:
        """The names of the fields with the queries and with the documents.

        Raises `RequestError` if the body has not the fields of exactly one form.
        """
        given = sorted(name for name in _NAMES if getattr(self, name) is not None)
        for side in _SIDES:
            if sorted(side) == given:
                return side
        forms = "; ".join(" and ".join(side) for side in _SIDES)
        raise RequestError(
            f"{given[0] if given else 'text_1'}: the request has {', '.join(given) or 'no texts'}; "
            f"it must have the fields of one of these forms: {forms}",
            param=given[0] if given else "text_1",
        )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each pair's query and document, in order. Raises `RequestError` if they do not match."""
        first, second = self.side_names
        queries, documents = (_several(getattr(self, name)) for name in (first, second))
        if "" in queries:
            place = "" if isinstance(getattr(self, first), str) else f".{queries.index('')}"
            raise RequestError(f"{first}{place}: must not be empty", param=f"{first}{place}")
        if len(queries) == 1:
            queries *= len(documents)
        if len(queries) != len(documents):
            raise RequestError(
                f"{first}: has {len(queries)} texts, and {second} has {len(documents)}; there must "
                "be one, or as many",
                param=first,
            )
        return list(zip(queries, documents, strict=True))


def texts_of(values: Sequence[Any]) -> tuple[str, ...]:
    """The texts of documents that are texts or objects."""
    return tuple(v if isinstance(v, str) else cast(TextObject, v).text for v in values)


def _several(side: Any) -> list[str]:
    return [*texts_of(side if isinstance(side, list) else [side])]
