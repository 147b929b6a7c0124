"""Request body of /v1/completions, and its prompts behind the stored document that it names."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from gemserve.api.documents.document_store import Document
from gemserve.api.documents.finder import check_chars
from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import MAX_CHOICES, NumChoices, NumTop
from gemserve.api.requests.document_reference import DocumentReference
from gemserve.api.requests.guided_body import GuidedBody
from gemserve.api.requests.integers import Natural, TokenIds
from gemserve.errors import RequestError, shown

PromptField = Annotated[str | TokenIds, WithJsonSchema({"anyOf": field_schemas.PROMPTS})]
PromptsField = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(max_length=MAX_CHOICES, fail_fast=True)]
    | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES, fail_fast=True)],
    WithJsonSchema(field_schemas.prompts(MAX_CHOICES)),
]
BETWEEN = "\n\n"  # between a document and the prompt
PlainPrompt = str | list[int]


class CompletionBody(GuidedBody):
    """`document`: its text and an empty line stand in front of each prompt, all of them texts."""

    model_config = ConfigDict(
        json_schema_extra=field_schemas.either(
            {"prompt": {}, "document": None},
            {"prompt": field_schemas.text_prompts(MAX_CHOICES), "document": {}},
        )
    )
    prompt: PromptsField
    document: DocumentReference | None = None
    echo: bool | None = None
    max_tokens: Annotated[Natural | None, Field(description="0: only with echo.")] = None
    best_of: NumChoices | None = None
    logprobs: NumTop | None = None
    suffix: Literal[""] | None = None

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise ValueError("must be at least 1; 0 only with echo, for the prompt alone")
        return value

    @property
    def echoes_alone(self) -> bool:
        """Is the reply the prompt, without an answer?"""
        return self.max_tokens == 0


def prompt_list(body: CompletionBody) -> list[PlainPrompt]:
    """One prompt or several prompts, as a list. Raises `RequestError`."""
    given = body.prompt
    if isinstance(given, str) or not given or isinstance(given[0], int):
        prompts = [cast(PlainPrompt, given)]
    else:
        prompts = cast(list[PlainPrompt], given)
    if body.document is not None:
        check_chars(len(prompts) * len(body.document.text))
    return [behind_document(prompt, body.document) for prompt in prompts]


def behind_document(prompt: PlainPrompt, document: Document | None) -> PlainPrompt:
    """The prompt behind the document's text and an empty line. Raises `RequestError`."""
    if document is None or not prompt:
        return prompt
    if not isinstance(prompt, str):
        raise RequestError(
            f"document={shown(document.id)}: only with a prompt that is a text; this one is a list "
            f"of {len(prompt)} token ids",
            param="document",
        )
    return f"{document.text}{BETWEEN}{prompt}"
