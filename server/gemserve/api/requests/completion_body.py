"""Request body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import MAX_CHOICES, GenerationBody, NumChoices, NumTop
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.integers import Count, TokenIds

PromptField = Annotated[str | TokenIds, WithJsonSchema({"anyOf": field_schemas.PROMPTS})]
PromptsField = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]
    | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES, fail_fast=True)],
    WithJsonSchema(field_schemas.prompts(MAX_CHOICES)),
]


class CompletionBody(GenerationBody):
    """`document`: its text and an empty line stand in front of each prompt."""

    prompt: PromptsField
    document: DocumentReference | None = None
    max_tokens: Count | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None
    logprobs: NumTop | None = None
    suffix: None = None
