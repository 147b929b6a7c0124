"""`response_format`: what is asked for reaches the engine; what cannot be held to is a 400."""

from __future__ import annotations

import json
import time
from itertools import cycle
from typing import Any

import pytest

from gemserve.contract.sampling import ANY_OBJECT
from tests.fakes import CHAT, COMPLETIONS, Api
from tests.schemas import REFUSED, UNHELD, nested

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b"]}
FIELD = "response_format.json_schema.schema"


def wanted(schema: object, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_reaches_the_engine_as_written(api: Api, path: str, stream: bool) -> None:
    full = wanted(SCHEMA, strict=True, description="An answer.")
    reply = await api.post(path, response_format=full, stream=stream)
    assert reply.status_code == 200, reply.text
    grammar = api.core.requests[0].grammar
    assert grammar is not None
    # the order of properties included, and no others
    assert grammar.text == json.dumps({**SCHEMA, "additionalProperties": False})
    assert grammar.is_strict


@both
async def test_any_object_and_free_text(api: Api, path: str) -> None:
    for given, grammar in (
        ({"type": "json_object"}, ANY_OBJECT),
        ({"type": "text"}, None),
        (None, None),
    ):
        assert (await api.post(path, response_format=given)).status_code == 200
        assert api.core.requests[-1].grammar == grammar


@both
async def test_the_schema_of_an_object_in_llama_cpp_s_form(api: Api, path: str) -> None:
    assert (await api.post(path, response_format=wanted(SCHEMA))).status_code == 200
    given = {"type": "json_object", "schema": SCHEMA}
    assert (await api.post(path, response_format=given)).status_code == 200
    first, second = api.core.requests
    assert first.grammar == second.grammar is not None
    wrong = {"type": "json_object", "schema": {"type": "nothing"}}
    reply = await api.post(path, response_format=wrong)
    assert reply.json()["error"]["param"] == "response_format.schema"


# in turn: trying a schema takes long, and is the same for both
@pytest.mark.parametrize(
    ("path", "name"),
    # with the bounds that integers get, the remainders of a number can be held
    list(zip(cycle((COMPLETIONS, CHAT)), [n for n in REFUSED if n != "remainders"], strict=False)),
)
async def test_a_schema_that_cannot_be_held_to_is_named(api: Api, path: str, name: str) -> None:
    schema, word = REFUSED[name]
    started = time.monotonic()
    reply = await api.post(path, response_format=wanted(schema, strict=True))
    assert time.monotonic() - started < 30
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (FIELD, "invalid_request_error")
    assert word in error["message"]
    assert len(reply.content) < 2048
    assert api.core.requests == []
    await api.assert_alive()


@both
@pytest.mark.parametrize("name", UNHELD)
async def test_instructor_s_schemas_lose_what_cannot_be_held(
    api: Api, path: str, name: str
) -> None:
    """A set's `uniqueItems` was an error, whether or not the client asked for strictness."""
    for fields in ({}, {"strict": None}, {"strict": False}):
        reply = await api.post(path, response_format=wanted(REFUSED[name][0], **fields))
        assert reply.status_code == 200, reply.text
        grammar = api.core.requests[-1].grammar
        assert grammar is not None
        assert not grammar.is_strict


@both
async def test_unknown_formats_are_annotations(api: Api, path: str) -> None:
    for name in ("path", "binary", "uuid4", "int32", "password"):
        schema = {"type": "string", "format": name}
        for is_strict in (False, True):
            reply = await api.post(path, response_format=wanted(schema, strict=is_strict))
            assert reply.status_code == 200, reply.text


@both
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_object", "strict": True}, "response_format.strict"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "text", "json_schema": {"name": "x", "schema": {}}}, "response_format"),
        ({"type": "text", "schema": {}}, "response_format"),
        ({"type": "json_object", "schema": "x"}, "response_format.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
        ),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, FIELD),
        (wanted({}, name="a b"), "response_format.json_schema.name"),
        (wanted({}, strict="yes"), "response_format.json_schema.strict"),
        (wanted({}, extra=1), "response_format.json_schema.extra"),
        *((wanted(value), FIELD) for value in (None, True, [], "{}", 3)),
    ],
)
async def test_a_wrong_shape_is_named(api: Api, path: str, given: Any, param: str) -> None:
    reply = await api.post(path, response_format=given)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert api.core.requests == []


@both
async def test_nesting_without_end_is_no_crash(api: Api, path: str) -> None:
    deep = '{"type": "array", "items": ' * 10_000 + "{}" + "}" * 10_000
    body = json.dumps({"model": "fake", "prompt": "x", "response_format": wanted(0)})
    reply = await api.client.post(path, content=body.replace(": 0", f": {deep}"))
    assert reply.status_code == 400
    assert len(reply.content) < 2048
    nearly = await api.post(path, response_format=wanted(nested(80)))  # parsed, then refused
    assert nearly.json()["error"]["param"] == FIELD
    await api.assert_alive()


async def test_a_schema_that_is_too_large_is_not_prepared(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten megabytes were walked through before they were refused."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("prepared")

    monkeypatch.setattr("gemserve.api.requests.answer_format.prepare_schema", never)
    schema = {"enum": ["x" * 65536]}
    reply = await api.post(CHAT, response_format=wanted(schema))
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    replies = [reply, await api.post(CHAT, tools=[tool], tool_choice="required")]
    for reply, field in zip(replies, (FIELD, "tools.0.function.parameters"), strict=True):
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
        assert "65536" in reply.json()["error"]["message"]
