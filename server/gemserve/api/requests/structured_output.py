"""The grammar that an answer must follow: of its format, of tools, or of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemserve.api.requests.answer_format import AnswerFormat, prepared, schema_grammar
from gemserve.api.requests.chat_body import Tool
from gemserve.api.requests.tool_choice import ToolCallRules
from gemserve.contract.sampling import Grammar
from gemserve.decoding.grammar import Grammars
from gemserve.decoding.grammar_compiler import InvalidGrammar
from gemserve.errors import RequestError


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
    if wanted is not None and wanted.kind != "json_schema" and rules is not None:
        raise RequestError(
            f"{wanted.field}: not with tools, unless tool_choice is none; a JSON schema may stand "
            "beside them",
            param=wanted.field,
        )
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
        calls=calls.text,
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
            field = rules.field(index)
            alone = schema_grammar(_arguments(index, tool, field), is_strict=True)
            check_grammar(alone, grammars, field)


def _call_grammar(tools: Sequence[Tool], rules: ToolCallRules) -> Grammar:
    named = _named(tools, rules)
    # without parameters there is nothing to be strict about
    is_strict = all(t.function.strict or t.function.parameters is None for _, t in named)
    calls = [_call_schema(index, tool, rules.field(index)) for index, tool in named]
    return schema_grammar({"anyOf": calls}, is_strict)


def _named(tools: Sequence[Tool], rules: ToolCallRules) -> list[tuple[int, Tool]]:
    return [(i, tool) for i, tool in enumerate(tools) if tool.function.name in rules.names]


def _call_schema(index: int, tool: Tool, field: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": _arguments(index, tool, field),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(index: int, tool: Tool, field: str) -> dict[str, Any]:
    parameters = tool.function.parameters
    if parameters is None:
        parameters = {"properties": {}}
    # with its own id, references such as #/$defs/x stay within this function's schema
    arguments = {"$id": f"urn:gemserve:tool:{index}", "type": "object", **parameters}
    return prepared(arguments, field, is_strict=bool(tool.function.strict))
