"""vLLM's fields that hold an answer to a form: what they mean, and what is refused at once."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from gemserve.contract.sampling import ANY_OBJECT
from gemserve.decoding.grammar import Matcher
from tests.fakes import CHAT, COMPLETIONS, EOS, FILTERED, Api

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
SCHEMA = {"type": "object", "properties": {"b": {}}, "required": ["b"]}
LARK = 'start: "a" NUMBER+\nNUMBER: /[0-9]/'
GBNF = 'root ::= "a" number+\nnumber ::= [0-9]'
TOOLS = [{"type": "function", "function": {"name": "find"}}]
# fields, texts that fit, texts that do not
HELD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": "[0-9]{3}"}, ["123"], ["12", "1234", "abc"]),
    (
        {"choice": ["yes", "no", 'a "b" 🌍\\', "no"]},
        ["yes", "no", 'a "b" 🌍\\'],
        ["y", "maybe", ""],
    ),
    ({"choice": [f"option {i}" for i in range(3000)]}, ["option 7", "option 2999"], ["option"]),
    ({"grammar": LARK}, ["a1", "a123"], ["a", "1", "b1"]),
    ({"grammar": GBNF}, ["a1", "a123"], ["a", "1", "b1"]),
    ({"json": SCHEMA}, ['{"b": 1}'], ["{}", '{"b": 1, "c": 2}']),
    ({"json": json.dumps(SCHEMA)}, ['{"b": 1}'], ["{}"]),
]
HOSTILE = {
    "a regex that is none": {"regex": "(a"},
    "a look-ahead": {"regex": "(?=a)b"},
    "a back-reference": {"regex": r"(a)\1"},
    "nothing fits": {"regex": "[a&&b]"},
    "repeated repetitions": {"grammar": 'start: (((("a" | "b"){1,1000}){1,1000}){1,1000}){1,1000}'},
    "an intersection": {
        "grammar": "start: A\nA: " + " & ".join(f"/.*(a|b).{{{i}}}/" for i in range(22))
    },
    "deep rules": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
    },
    "deep brackets": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "deep brackets of llama.cpp": {"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
    "no start": {"grammar": 'other: "a"'},
    "an unknown rule": {"grammar": "start: other"},
    "an endless rule": {"grammar": "start: start"},
    "no grammar": {"grammar": "?"},
    "an empty grammar": {"grammar": ""},
    "a cut escape": {"grammar": 'root ::= "\\'},
    "too long": {"regex": "a" * 70_000},
    "no schema": {"json": "{"},
    "a schema that is no object": {"json": "[]"},
    "a wrong schema": {"json": {"type": "wrong"}},
}


def fits(api: Api, matcher: Matcher, text: str) -> bool:
    """May the answer be this text?"""
    tokenizer = api.serving.builder.tokenizer
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in np.flatnonzero(matcher.allowed()):
            return False
        matcher.advance(token)
    return matcher.is_complete or EOS in np.flatnonzero(matcher.allowed())


@both
@pytest.mark.parametrize(("fields", "good", "bad"), HELD, ids=str)
async def test_an_answer_is_held_to_its_form(
    api: Api, path: str, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    [(name, value)] = fields.items()
    for body in ({"structured_outputs": fields}, {f"guided_{name}": value}):
        reply = await api.post(path, **body)
        assert reply.status_code == 200, reply.text
        grammar = api.core.requests[-1].grammar
        assert grammar is not None
        for text in good + bad:
            matcher = api.serving.builder.grammars.matcher(grammar)
            assert fits(api, matcher, text) == (text in good), text


@both
async def test_any_object(api: Api, path: str) -> None:
    reply = await api.post(path, structured_outputs={"json_object": True})
    assert reply.status_code == 200
    assert api.core.requests[-1].grammar == ANY_OBJECT


@both
async def test_what_has_no_effect_is_accepted(api: Api, path: str) -> None:
    for fields in (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "grammar": None}},
        {"guided_regex": "a", "guided_decoding_backend": "xgrammar", "guided_json": None},
        {"guided_regex": "a", "response_format": {"type": "text"}},
        {"structured_outputs": None},
    ):
        reply = await api.post(path, **fields)
        assert reply.status_code == 200, reply.text
        held = fields != {"structured_outputs": None}
        assert (api.core.requests[-1].grammar is not None) == held


# each in one of both paths: a trial takes long, and is the same for both
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_cannot_be_held_to_is_refused_before_it_is_queued(api: Api, name: str) -> None:
    """Repeated repetitions took more than 25 s, and deep rules ended the whole process."""
    [(form, value)] = HOSTILE[name].items()
    started_s = time.monotonic()
    for path, body, field in (
        (CHAT, {"structured_outputs": HOSTILE[name]}, f"structured_outputs.{form}"),
        (COMPLETIONS, {f"guided_{form}": value}, f"guided_{form}"),
    ):
        reply = await api.post(path, **body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(field)
        assert len(error["message"]) < 500
    assert time.monotonic() - started_s < 30
    assert api.core.requests == []


@both
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice",
            "not together with guided_regex",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "not together with response_format",
        ),
        (
            {"guided_json": {}, "structured_outputs": {"json": {}}},
            "guided_json",
            "not together with structured_outputs",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "not together with structured_outputs.json",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of json, regex, choice"),
        ({"structured_outputs": {"choices": []}}, "structured_outputs.choices", "unknown field"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
        ({"guided_choice": [""]}, "guided_choice.0", "at least 1 character"),
        ({"guided_choice": "yes"}, "guided_choice", "valid list"),
        ({"guided_regex": 3}, "guided_regex", "valid string"),
        ({"guided_json": 3}, "guided_json", "a text or an object"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}},
            "structured_outputs.whitespace_pattern",
            "None",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "False",
        ),
    ],
    ids=str,
)
async def test_wrong_fields_are_named(
    api: Api, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    reply = await api.post(path, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


async def test_beside_tools_only_schemas_stand(api: Api) -> None:
    for fields in ({"guided_regex": "a"}, {"structured_outputs": {"choice": ["a"]}}):
        for choice in ("auto", "required"):
            reply = await api.post(CHAT, tools=TOOLS, tool_choice=choice, **fields)
            assert reply.status_code == 400
            assert "not with tools" in reply.json()["error"]["message"]
        assert (await api.post(CHAT, tools=TOOLS, tool_choice="none", **fields)).status_code == 200
    assert (await api.post(CHAT, tools=TOOLS, guided_json=SCHEMA)).status_code == 200
    grammar = api.core.requests[-1].grammar
    assert grammar is not None
    assert grammar.calls is not None


async def test_an_answer_beside_tools_is_not_taken_for_a_call(api: Api) -> None:
    """It is JSON that the schema describes, though it looks like a call of an unknown form."""
    api.core.script = (FILTERED, '{"b": ', "1}")
    message = (await api.post(CHAT, tools=TOOLS, guided_json=SCHEMA)).json()["choices"][0][
        "message"
    ]
    assert message["content"] == '{"b": 1}'
    assert "tool_calls" not in message


async def test_refusals_are_counted(api: Api) -> None:
    await api.post(CHAT, guided_regex="(")
    assert (await api.metrics())['admission_rejections_total{reason="invalid_request"}'] == 1
