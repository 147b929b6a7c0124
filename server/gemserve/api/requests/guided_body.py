"""vLLM's fields that hold an answer to a form: `structured_outputs`, and the older `guided_…`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from gemserve.api.requests import field_schemas
from gemserve.api.requests.base_bodies import Body, GenerationBody, TextOr

Schema = TextOr[dict[str, Any]]  # a schema may be written as a text
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]
_FORMS: tuple[str, ...] = ("json", "regex", "choice", "grammar", "json_object")


def _only(name: str) -> dict[str, Any]:
    return {other: {} if other == name else None for other in _FORMS}


class StructuredOutputs(Body):
    """Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    `grammar` is in Lark's notation or in llama.cpp's. `disable_any_whitespace` has no effect: there
    is no other white space than one space behind a comma or a colon in any case.
    """

    model_config = ConfigDict(json_schema_extra=field_schemas.either(*map(_only, _FORMS)))
    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        forms = (self.json_, self.regex, self.choice, self.grammar, self.json_object)
        if all(form is None for form in forms):
            raise ValueError(f"needs one of {', '.join(_FORMS)}")
        return self


class GuidedBody(GenerationBody):
    """The fields of both completion endpoints, with vLLM's.

    `guided_decoding_backend` has no effect: there is one."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: None = None
