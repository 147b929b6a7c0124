"""`tools` on chats: prompts, grammars, replies and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import CHAT, FILTERED, Api, data_of
from tests.schemas import REFUSED

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "How warm is it?"}
PARAMETERS = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}},
    "required": ["place"],
    "$defs": {"place": {"enum": ["here", "there"]}},
    "additionalProperties": False,
}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


WEATHER = tool("weather", description="The weather.", parameters=PARAMETERS, strict=True)
TOOLS = [WEATHER, tool("stop")]
NAMED = {"type": "function", "function": {"name": "weather"}}
TEXT = (FILTERED, '{"name": "weather", ', '"arguments": ', '{"place": "he', 're"}', "}")


async def prompt_of(api: Api, **fields: Any) -> str:
    reply = await api.post(CHAT, **fields)
    assert reply.status_code == 200, reply.text
    text: str = api.serving.builder.tokenizer.decode(api.core.requests[-1].prompt_ids)
    return text


@pytest.mark.parametrize(
    ("choice", "is_held", "reason"),
    [(None, False, "tool_calls"), ("auto", False, "tool_calls"), ("required", True, "tool_calls"),
     (NAMED, True, "stop")],
)  # fmt: skip
async def test_a_call_whole_and_streamed(api: Api, choice: Any, is_held: bool, reason: str) -> None:
    api.core.script = TEXT
    body = {"tools": TOOLS, "tool_choice": choice}
    whole = (await api.post(CHAT, **body)).json()["choices"][0]
    assert (api.core.requests[0].grammar is not None) == is_held
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"place": "here"}
    assert whole["finish_reason"] == reason

    chunks = data_of(await api.post(CHAT, stream=True, **body))
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [c for choice in choices for c in choice["delta"].get("tool_calls", ())]
    assert deltas[0]["function"]["name"] == "weather"
    assert deltas[0]["id"].startswith("call_")
    arguments = "".join(delta["function"]["arguments"] for delta in deltas)
    assert json.loads(arguments) == {"place": "here"}
    assert {delta["index"] for delta in deltas} == {0}
    assert not any(choice["delta"].get("content") for choice in choices)
    assert choices[-1]["finish_reason"] == reason
    if is_held:
        assert len(deltas) > 2  # arguments come as they are generated


async def test_without_a_call_content_is_as_ever(api: Api) -> None:
    for choice in ("auto", "none"):
        whole = (await api.post(CHAT, tools=TOOLS, tool_choice=choice)).json()["choices"][0]
        assert whole["message"]["content"] == "Héllo 🌍!"
        assert "tool_calls" not in whole["message"]
        assert whole["finish_reason"] == "stop"
        chunks = data_of(await api.post(CHAT, tools=TOOLS, tool_choice=choice, stream=True))
        said = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(said) == "Héllo 🌍!"


async def test_no_call_is_made_of_text_if_none_is_wanted(api: Api) -> None:
    api.core.script = TEXT
    reply = await api.post(CHAT, tools=TOOLS, tool_choice="none")
    assert reply.json()["choices"][0]["message"]["content"] == "".join(TEXT[1:])  # type: ignore[arg-type]


async def test_each_choice_has_a_call_of_its_own(api: Api) -> None:
    api.core.script = TEXT
    reply = await api.post(CHAT, tools=TOOLS, tool_choice="required", n=3)
    calls = [choice["message"]["tool_calls"][0] for choice in reply.json()["choices"]]
    assert len({call["id"] for call in calls}) == 3
    chunks = data_of(await api.post(CHAT, tools=TOOLS, tool_choice=NAMED, n=2, stream=True))
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        deltas = [d for choice in own for d in choice["delta"].get("tool_calls", ())]
        text = "".join(d["function"]["arguments"] for d in deltas)
        assert json.loads(text) == {"place": "here"}


async def test_a_template_without_tools_is_told_in_the_system_message(api: Api) -> None:
    system = {"role": "system", "content": "Be brief."}
    for messages in ([USER], [system, USER]):
        said = await prompt_of(api, messages=messages, tools=TOOLS)
        assert said.count("<|system|>") == 1
        assert "The weather." in said
        assert '"stop"' in said
    assert "Be brief." in said
    for fields in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        assert "weather" not in await prompt_of(api, messages=[USER], **fields)


async def test_calls_and_results_are_part_of_the_history(api: Api) -> None:
    call = {"id": "call_1", **NAMED}
    call["function"] = {"name": "weather", "arguments": '{"place": "here"}'}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees"}
    for content in ({"content": None}, {}, {"content": "I look."}):
        asked = {"role": "assistant", "tool_calls": [call], **content}
        said = await prompt_of(api, messages=[USER, asked, result], tools=TOOLS)
        assert '{"name": "weather", "arguments": {"place": "here"}}' in said
        assert "17 degrees" in said
        assert ("I look." in said) == (content.get("content") is not None)
    tokens = await api.client.post("/tokenize", json={"messages": [USER, asked, result]})
    text = api.serving.builder.tokenizer.decode(tokens.json()["tokens"])
    assert '"weather"' in text


async def test_arguments_that_are_no_json_stay_as_they_are(api: Api) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{oops"}}
    said = await prompt_of(api, messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert '"{oops"' in said


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "weather"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "search", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a", parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool("a", parameters={"type": "string"})]}, "tools.0.function.parameters"),
        ({"tools": [tool("a", more=1)]}, "tools.0.function.more"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages"),
        ({"messages": [{**USER, "tool_calls": [CALLED]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALLED, "id": 3}]}]},
            "messages.0.tool_calls.0.id",
        ),
    ],
)
async def test_what_is_wrong_is_named(api: Api, fields: dict[str, Any], param: str) -> None:
    reply = await api.post(CHAT, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert len(reply.content) < 2048
    assert api.core.requests == []


@pytest.mark.parametrize("name", ["not", "lookahead", "unique", "remote"])
async def test_parameters_that_cannot_be_held_to_are_named(api: Api, name: str) -> None:
    schema, word = REFUSED[name]
    parameters = {"properties": {"x": schema}, "type": "object"}
    bad = tool("bad", parameters=parameters, strict=True)
    forced = {"type": "function", "function": {"name": "bad"}}
    for choice, param in ((forced, "tools.1.function.parameters"), ("required", "tools")):
        reply = await api.post(CHAT, tools=[WEATHER, bad], tool_choice=choice)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
        assert word in reply.json()["error"]["message"]
    # nothing is held to them where the model is free to answer
    assert (await api.post(CHAT, tools=[bad])).status_code == 200


async def test_one_tool_that_is_not_strict_does_not_hide_a_strict_one_s_fault(api: Api) -> None:
    unique = {"type": "object", "properties": {"x": REFUSED["unique"][0]}}
    for tools, status in (
        ([tool("a", parameters=unique), tool("b", parameters=unique, strict=True)], 400),
        ([tool("a", parameters=unique), tool("b", parameters=PARAMETERS, strict=True)], 200),
    ):
        for fields in (
            {"tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
        ):
            reply = await api.post(CHAT, tools=tools, **fields)
            assert reply.status_code == status, reply.text
            if status == 400:
                assert reply.json()["error"]["param"] == "tools.1.function.parameters"


ANSWER = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}


@pytest.mark.parametrize("given", [FORMAT, {"type": "json_object"}])
async def test_openai_agents_sends_tools_and_a_format_on_every_turn(api: Api, given: Any) -> None:
    """It was refused, so that no agent with a typed answer could use a tool."""
    for choice, has_answer, has_call in (
        (None, True, True),
        ("auto", True, True),
        ("none", True, False),
        ("required", False, True),
        (NAMED, False, True),
    ):
        reply = await api.post(CHAT, tools=TOOLS, tool_choice=choice, response_format=given)
        assert reply.status_code == 200, reply.text
        grammar = api.core.requests[-1].grammar
        assert grammar is not None
        assert ("weather" in grammar.text) == (not has_answer)
        assert (grammar.calls is not None) == (has_answer and has_call)
    await api.post(CHAT, tools=TOOLS, response_format={"type": "text"})
    assert api.core.requests[-1].grammar is None


async def test_a_typed_answer_beside_tools_streams_as_it_comes(api: Api) -> None:
    """All that begins with a brace was held back until the end, as it might be a call."""
    body = {"tools": TOOLS, "response_format": FORMAT}
    for said in (TEXT[1:], ('{"name": "we', 'ekly"', "}"), ('{"a"', ": 1", "}")):
        api.core.script = (FILTERED, *said)
        chunks = data_of(await api.post(CHAT, stream=True, **body))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        contents = [d["content"] for d in deltas if d.get("content")]
        if said == TEXT[1:]:
            assert contents == []
            assert any(d.get("tool_calls") for d in deltas)
        else:
            assert "".join(contents) == "".join(said)
            assert len(contents) > 1


async def test_which_of_tools_and_format_is_wrong_is_named(api: Api) -> None:
    empty = REFUSED["empty range"][0]
    bad_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": empty}}
    bad_tool = tool(
        "a", parameters={"type": "object", "properties": {"x": empty}, "required": ["x"]}
    )
    for tools, given, param in (
        (TOOLS, bad_format, "response_format.json_schema.schema"),
        ([bad_tool], FORMAT, "tools.0.function.parameters"),
    ):
        reply = await api.post(CHAT, tools=tools, response_format=given)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
