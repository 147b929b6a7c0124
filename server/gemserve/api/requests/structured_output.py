"""What an answer is held to: `response_format` as a grammar."""

from __future__ import annotations

import json

from gemserve.api.requests.base_bodies import ResponseFormat
from gemserve.engine.grammar import Grammars
from gemserve.engine.json_schema import InvalidGrammar
from gemserve.errors import RequestError
from gemserve.types import ANY_OBJECT, Grammar

_SCHEMA = "response_format.json_schema.schema"


def response_grammar(wanted: ResponseFormat | None, grammars: Grammars) -> Grammar | None:
    """The grammar asked for, compiled; None for free text. Slow for a schema not seen lately.

    Raises `RequestError` if no answer can be held to it.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return compiled(ANY_OBJECT, grammars, "response_format.type")
    assert wanted.json_schema is not None
    # as written: the order of properties is the order they are generated in
    return compiled(Grammar(json.dumps(wanted.json_schema.schema_)), grammars, _SCHEMA)


def compiled(grammar: Grammar, grammars: Grammars, field: str) -> Grammar:
    """The grammar, once it is known to compile. Raises `RequestError` about `field`."""
    try:
        grammars.matcher(grammar)
    except InvalidGrammar as error:
        raise RequestError(f"{field}: {error}", param=field) from error
    return grammar
