"""Whatever a grammar says, it is refused for a short reason, or allows a token at every step."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.contract.sampling import Grammar, GrammarKind
from gemserve.decoding.grammar import GrammarFailed, Grammars
from gemserve.decoding.grammar_compiler import InvalidGrammar
from gemserve.errors import SchemasBusy
from tests.fakes import EOS
from tests.fuzz.cases import bounded, cases, changed_json, written

STEPS = 40
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "$ref": "#/$defs/node",
    },
    {"anyOf": [{"const": "x"}, {"enum": [1, None, "ä\n"]}, {"type": "string", "pattern": "^a+$"}]},
    {"type": "string", "minLength": 2, "maxLength": 5, "format": "date"},
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 10, "multipleOf": 0.5},
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "patternProperties": {"^b": {}},
    },
    {"allOf": [{"type": "object"}, {"properties": {"k": {"oneOf": [{"type": "null"}]}}}]},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": False, "uniqueItems": True},
)
PATTERNS = ("(a|b)+c{2,5}", r"\d{3}-[^\s]*", "(?i)yes|no", ".*", "a?b*[x-z]{0,3}", r"\p{L}+")
RULES = (
    'root ::= "a" item*\nitem ::= [0-9]+ "," | "(" root ")"',
    'start: word ("," word)*\nword: /[a-z]+/\n%ignore " "',
    'start: "x" | "(" start ")"',
    'start: obj\nobj: %json {"type": "object"}',
)
PIECES = (
    *'()[]{}*+?|\\^$"/\n\0é🌍',
    *("{9999}", "{0,}", "(?=a)", "(?P<a>", "::=", "start:", "%ignore", "%json {", "~3..9"),
)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, vocab_size=len(tokenizer), end_ids=frozenset({EOS}))


@st.composite
def changed_texts(draw: st.DrawFn, text: str) -> str:
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 3))
        piece = draw(st.sampled_from(PIECES)) * draw(st.sampled_from((1, 1, 1, 2, 300)))
        text = text[:at] + piece + text[at + length :]
    return text


@st.composite
def changed_grammars(draw: st.DrawFn) -> Grammar:
    kind: GrammarKind = draw(st.sampled_from(("json_schema", "regex", "context_free")))
    if kind == "json_schema":
        schema = draw(changed_json(draw(st.sampled_from(SCHEMAS))))
        text = written(schema).decode("utf-8", "replace")
        return Grammar(text, is_strict=draw(st.booleans()))
    return Grammar(
        draw(changed_texts(draw(st.sampled_from(PATTERNS if kind == "regex" else RULES)))),
        kind=kind,
    )


@given(changed_grammars(), st.integers(0, 1 << 30))
@cases(10)
def test_a_grammar_is_followed_or_refused(
    grammars: Grammars, tokenizer: Any, grammar: Grammar, seed: int
) -> None:
    with bounded("grammar", cpu_s=20):
        try:
            matcher = grammars.matcher(grammar)
        except (InvalidGrammar, SchemasBusy) as error:
            assert 0 < len(str(error).encode()) < 2000  # it goes into a reply
            return
        rng, drawn = Random(seed), []
        try:
            while len(drawn) < STEPS and not matcher.is_complete:
                allowed = np.flatnonzero(matcher.allowed()).tolist()
                assert allowed
                token = rng.choice(allowed)
                if token == EOS:
                    break
                drawn.append(token)
                matcher.advance(token)
        except GrammarFailed as error:
            assert str(error)
            return
    if grammar.kind == "json_schema" and len(drawn) < STEPS:
        json.loads(tokenizer.decode(drawn))
