"""What the answer must be, whichever field says so: `response_format`, or one of vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from gemserve.api.requests.base_bodies import GenerationBody
from gemserve.api.requests.guided_body import GuidedBody
from gemserve.contract.sampling import ANY_OBJECT, Grammar, GrammarKind
from gemserve.decoding.grammar_compiler import InvalidGrammar, check_size
from gemserve.decoding.schema_preparation import prepare_schema
from gemserve.errors import RequestError, shown

_SCHEMA = "response_format.json_schema.schema"
_OUTPUTS = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """A schema that the answer must fit, and the field that it comes from. None: any object.

    `is_strict`: keywords that no answer can be held to are errors, not ignored. `text`: what
    grammars of another `kind` have in place of a schema.
    """

    field: str
    schema: dict[str, Any] | None = None
    is_strict: bool = False
    kind: GrammarKind = "json_schema"
    text: str = ""

    @property
    def grammar(self) -> Grammar:
        """Raises `RequestError` if the schema is too large."""
        if self.kind != "json_schema":
            return Grammar(self.text, kind=self.kind)
        if self.schema is None:
            return ANY_OBJECT
        schema = prepared(self.schema, self.field, is_strict=self.is_strict)
        return schema_grammar(schema, self.is_strict)


def prepared(schema: dict[str, Any], field: str, *, is_strict: bool) -> dict[str, Any]:
    """The schema to compile. Raises `RequestError` about `field` if it is too large for that."""
    try:
        check_size(json.dumps(schema))
    except InvalidGrammar as error:
        raise RequestError(f"{field}: {error}", param=field) from error
    return prepare_schema(schema, is_strict=is_strict)


def schema_grammar(schema: dict[str, Any], is_strict: bool) -> Grammar:
    # properties are generated in the order in which the schema has them, so it is not sorted
    return Grammar(json.dumps(schema), is_strict)


def answer_format(body: GuidedBody) -> AnswerFormat | None:
    """What the body demands of the answer; None for free text. Raises `RequestError`."""
    formats = [*_of_response_format(body), *_of_guided_fields(body)]
    if len(formats) > 1:
        first, second = (wanted.field for wanted in formats[:2])
        raise RequestError(f"{second}: not together with {first}", param=second)
    return formats[0] if formats else None


def _of_response_format(body: GenerationBody) -> Iterator[AnswerFormat]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return
    if wanted.schema_ is not None:
        yield AnswerFormat(schema=wanted.schema_, field="response_format.schema")
    elif wanted.json_schema is None:
        yield AnswerFormat(field="response_format.type")
    else:
        is_strict = bool(wanted.json_schema.strict)
        yield AnswerFormat(schema=wanted.json_schema.schema_, is_strict=is_strict, field=_SCHEMA)


def _of_guided_fields(body: GuidedBody) -> Iterator[AnswerFormat]:
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_object:
            yield AnswerFormat(field=f"{_OUTPUTS}.json_object")
        yield from _of_schema(outputs.json_, f"{_OUTPUTS}.json")
        yield from _of_text(outputs.regex, "regex", f"{_OUTPUTS}.regex")
        yield from _of_choice(outputs.choice, f"{_OUTPUTS}.choice")
        yield from _of_text(outputs.grammar, "context_free", f"{_OUTPUTS}.grammar")
    yield from _of_schema(body.guided_json, "guided_json")
    yield from _of_text(body.guided_regex, "regex", "guided_regex")
    yield from _of_choice(body.guided_choice, "guided_choice")
    yield from _of_text(body.guided_grammar, "context_free", "guided_grammar")


def _of_schema(given: str | dict[str, Any] | None, field: str) -> Iterator[AnswerFormat]:
    schema: Any = given
    if isinstance(given, str):
        try:
            schema = from_json(given)
        except ValueError as error:
            raise RequestError(f"{field}: is not valid JSON: {error}", param=field) from error
        if not isinstance(schema, dict):
            raise RequestError(f"{field}={shown(given)}: must be an object", param=field)
    if schema is not None:
        yield AnswerFormat(schema=schema, field=field)


def _of_text(given: str | None, kind: GrammarKind, field: str) -> Iterator[AnswerFormat]:
    if given is not None:
        yield AnswerFormat(text=given, kind=kind, field=field)


def _of_choice(given: list[str] | None, field: str) -> Iterator[AnswerFormat]:
    if given is not None:
        texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(given))
        # one token of the grammar, because rules for each text would be as many items in a row
        text = f"start: CHOICE\nCHOICE: {' | '.join(texts)}"
        yield AnswerFormat(text=text, kind="context_free", field=field)
