"""`response_format` as a grammar that the answer must follow."""

from __future__ import annotations

import json

from gemserve.api.requests.base_bodies import ResponseFormat
from gemserve.decoding.grammar import Grammars
from gemserve.decoding.json_schema import InvalidGrammar
from gemserve.errors import RequestError
from gemserve.types import ANY_OBJECT, Grammar

_SCHEMA = "response_format.json_schema.schema"


def response_grammar(wanted: ResponseFormat | None, grammars: Grammars) -> Grammar | None:
    """The grammar of the answer, checked; None for free text. Slow for a schema not seen lately.

    Raises `RequestError` if no answer can follow it.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return check_grammar(ANY_OBJECT, grammars, "response_format.type")
    # properties are generated in the order in which the schema has them, so it is not sorted
    return check_grammar(Grammar(json.dumps(wanted.json_schema.schema_)), grammars, _SCHEMA)


def check_grammar(grammar: Grammar, grammars: Grammars, field: str) -> Grammar:
    """Return the grammar if it compiles. Raises `RequestError` about `field` otherwise."""
    try:
        grammars.matcher(grammar)
    except InvalidGrammar as error:
        raise RequestError(f"{field}: {error}", param=field) from error
    return grammar
