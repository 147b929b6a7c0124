"""The grammar that an answer must follow: of `response_format`, of tools, or of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemserve.api.requests.base_bodies import ResponseFormat
from gemserve.api.requests.chat_body import Tool
from gemserve.api.requests.tool_choice import ToolCallRules
from gemserve.decoding.grammar import Grammars
from gemserve.decoding.json_schema import InvalidGrammar
from gemserve.decoding.schema_preparation import prepare_schema
from gemserve.errors import RequestError
from gemserve.types import ANY_OBJECT, Grammar

_SCHEMA = "response_format.json_schema.schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """A schema that the answer must fit, and the field that it comes from. None: any object.

    `is_strict`: keywords that no answer can be held to are errors, not ignored.
    """

    schema: dict[str, Any] | None
    is_strict: bool
    field: str

    @property
    def grammar(self) -> Grammar:
        if self.schema is None:
            return ANY_OBJECT
        return _grammar(prepare_schema(self.schema, is_strict=self.is_strict), self.is_strict)


def answer_format(wanted: ResponseFormat | None) -> AnswerFormat | None:
    """What `response_format` demands; None for free text."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return AnswerFormat(schema=None, is_strict=False, field="response_format.type")
    is_strict = bool(wanted.json_schema.strict)
    return AnswerFormat(schema=wanted.json_schema.schema_, is_strict=is_strict, field=_SCHEMA)


def answer_grammar(
    wanted: AnswerFormat | None,
    tools: Sequence[Tool],
    rules: ToolCallRules | None,
    grammars: Grammars,
) -> Grammar | None:
    """The grammar of the answer, checked; None for free text.

    A forced call follows its function's parameters, whatever the format. An answer that may be a
    call, and has a format, is one or the other. Raises `RequestError` if no answer can follow it,
    and `TrialNeeded` for a schema that must be tried first.
    """
    if rules is None or (wanted is not None and not rules.is_forced):
        if wanted is None:
            return None
        if rules is None:
            return check_grammar(wanted.grammar, grammars, wanted.field)
        return _call_or_answer(wanted, tools, rules, grammars)
    if not rules.is_forced:
        return None
    return _calls(tools, rules, grammars)


def check_grammar(grammar: Grammar, grammars: Grammars, field: str) -> Grammar:
    """The grammar in its compiled form. Raises `RequestError` about `field`, `TrialNeeded`."""
    try:
        return grammars.known(grammar)
    except InvalidGrammar as error:
        raise RequestError(f"{field}: {error}", param=field) from error


def _call_or_answer(
    wanted: AnswerFormat, tools: Sequence[Tool], rules: ToolCallRules, grammars: Grammars
) -> Grammar:
    answer = wanted.grammar
    calls = _call_grammar(tools, rules)
    both = replace(
        answer,
        calls=calls.schema,
        is_strict=answer.is_strict and calls.is_strict,
        is_parallel=rules.is_parallel,
    )
    if answer.is_strict and not calls.is_strict:
        check_grammar(answer, grammars, wanted.field)
    _check_strict_tools(tools, rules, grammars, is_all_strict=both.is_strict)
    try:
        return grammars.known(both)
    except InvalidGrammar:  # a part of it has the better message
        check_grammar(answer, grammars, wanted.field)
        _calls(tools, rules, grammars)
        return check_grammar(both, grammars, "tools")


def _calls(tools: Sequence[Tool], rules: ToolCallRules, grammars: Grammars) -> Grammar:
    """The grammar of one call of a function that the rules name, checked."""
    grammar = _call_grammar(tools, rules)
    _check_strict_tools(tools, rules, grammars, is_all_strict=grammar.is_strict)
    named = _named(tools, rules)
    field = rules.field(named[0][0]) if len(named) == 1 else "tools"
    return check_grammar(grammar, grammars, field)


def _check_strict_tools(
    tools: Sequence[Tool], rules: ToolCallRules, grammars: Grammars, *, is_all_strict: bool
) -> None:
    """Check the strict ones, which a grammar that is not strict as a whole would not."""
    if is_all_strict:
        return
    for index, tool in _named(tools, rules):
        if tool.function.strict and tool.function.parameters is not None:
            alone = _grammar(_arguments(index, tool), is_strict=True)
            check_grammar(alone, grammars, rules.field(index))


def _call_grammar(tools: Sequence[Tool], rules: ToolCallRules) -> Grammar:
    named = _named(tools, rules)
    # without parameters there is nothing to be strict about
    is_strict = all(t.function.strict or t.function.parameters is None for _, t in named)
    return _grammar({"anyOf": [_call_schema(i, tool) for i, tool in named]}, is_strict)


def _named(tools: Sequence[Tool], rules: ToolCallRules) -> list[tuple[int, Tool]]:
    return [(i, tool) for i, tool in enumerate(tools) if tool.function.name in rules.names]


def _call_schema(index: int, tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": _arguments(index, tool),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(index: int, tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        parameters = {"properties": {}}
    # with its own id, references such as #/$defs/x stay within this function's schema
    arguments = {"$id": f"urn:gemserve:tool:{index}", "type": "object", **parameters}
    return prepare_schema(arguments, is_strict=bool(tool.function.strict))


def _grammar(schema: dict[str, Any], is_strict: bool) -> Grammar:
    # properties are generated in the order in which the schema has them, so it is not sorted
    return Grammar(json.dumps(schema), is_strict)
