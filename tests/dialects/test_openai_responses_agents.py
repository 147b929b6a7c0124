"""Tools of `/v1/responses` that coding agents send: namespaces, custom tools and searches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemserve.contract.events import Finished
from tests.described import Described
from tests.fakes import CHAT, CONTEXT, FILTERED, Api
from tests.openai_responses_requests import (
    CALLS,
    RESPONSES,
    STOP,
    WEATHER,
    post,
    put_together,
    streamed,
    whole,
    without_ids,
)

pytestmark = pytest.mark.anyio
SPACE = {
    "type": "namespace",
    "name": "mcp__sky",
    "description": "Tools of the sky.",
    "tools": [WEATHER, {"type": "function", "name": "rain", "strict": False}],
}
GRAMMAR = 'start: "*** Begin" /(.+)/'
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
NUMBER = {
    "type": "custom",
    "name": "number",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"},
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
HOSTED = [
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    {"type": "tool_search"},
    {"type": "local_shell"},
]
SPACED_CALL = '{"name": "mcp__sky__weather", "arguments": {"place": "here"}}'


def called(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def prompt_of(api: Api) -> str:
    tokenizer = api.serving.builder.tokenizer
    return str(tokenizer.decode(api.core.requests[-1].prompt_ids))


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "weather"}])
async def test_a_call_of_a_namespace_names_it_apart(api: Api, choice: Any) -> None:
    """Codex knows a tool by the two names, and no tool by one that has both in it."""
    api.core.script = (FILTERED, SPACED_CALL[:20], SPACED_CALL[20:])
    fields = {"tools": [SPACE, *HOSTED], "tool_choice": choice}
    response = await whole(api, **fields)
    expected = {
        "type": "function_call",
        "name": "weather",
        "namespace": "mcp__sky",
        "arguments": '{"place": "here"}',
        "status": "completed",
    }
    assert without_ids(response["output"]) == [expected]
    assert "mcp__sky__weather" in prompt_of(api)
    assert "All functions mcp__sky__…: Tools of the sky." in prompt_of(api)
    events = await streamed(api, **fields)
    assert without_ids(put_together(events)) == [expected]
    assert [e["name"] for e in events if e["type"].endswith("arguments.done")] == ["weather"]


async def test_the_reply_repeats_the_tools_that_can_be_called(api: Api) -> None:
    tools = (await whole(api, tools=[SPACE, PATCH, SEARCH, *HOSTED, STOP]))["tools"]
    assert [tool["type"] for tool in tools] == ["namespace", "custom", "tool_search", "function"]
    assert [tool["name"] for tool in tools[0]["tools"]] == ["weather", "rain"]
    assert tools[1] == PATCH
    assert "web_search" not in prompt_of(api)


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_hosted_tools_alone(api: Api, choice: str) -> None:
    reply = await post(api, tools=HOSTED, tool_choice=choice)
    assert reply.status_code == (200 if choice == "auto" else 400)


async def test_a_custom_call_has_its_input_as_text(api: Api) -> None:
    text = '*** Begin Patch\n+"é"\n'
    api.core.script = (FILTERED, called("patch", {"input": text}))
    tools = [{**SPACE, "tools": [PATCH]}, PATCH]
    response = await whole(api, tools=tools)
    expected = {"type": "custom_tool_call", "name": "patch", "input": text, "status": "completed"}
    assert without_ids(response["output"]) == [expected]
    assert GRAMMAR.replace('"', '\\"') in prompt_of(api)
    kinds = [
        (event["type"].removeprefix("response."), event.get("delta", event.get("input")))
        for event in await streamed(api, tools=tools)
    ]
    assert kinds[2:-1] == [
        ("output_item.added", None),
        ("custom_tool_call_input.delta", text),
        ("custom_tool_call_input.done", text),
        ("output_item.done", None),
    ]
    api.core.script = (FILTERED, called("mcp__sky__patch", {"input": ""}))
    (call,) = (await whole(api, tools=tools))["output"]
    assert (call["name"], call["namespace"], call["input"]) == ("patch", "mcp__sky", "")


@pytest.mark.parametrize(
    ("arguments", "text"), [({"patch": "x"}, '{"patch": "x"}'), ({"input": 3}, '{"input": 3}')]
)
async def test_other_arguments_of_a_custom_tool_are_not_lost(
    api: Api, arguments: dict[str, Any], text: str
) -> None:
    api.core.script = (FILTERED, called("patch", arguments))
    assert (await whole(api, tools=[PATCH]))["output"][0]["input"] == text


async def test_forced_custom_input_is_held_to_its_expression(api: Api) -> None:
    api.core.script = (FILTERED, '{"name": "number", "arguments": ', '{"input": "1', '23"}', "}")
    choice = {"type": "custom", "name": "number"}
    (call,) = (await whole(api, tools=[NUMBER, PATCH], tool_choice=choice))["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "123")
    (request,) = api.core.requests
    assert request.grammar is not None
    assert "^(?:[0-9]{3})$" in request.grammar.text


@pytest.mark.parametrize(("num_steps", "text"), [(3, "1"), (2, "")])
async def test_custom_input_that_is_cut_off_is_incomplete(
    api: Api, num_steps: int, text: str
) -> None:
    steps = (FILTERED, '{"name": "number", "arguments": {', '"input": "1', '23"}', "}")
    api.core.script = (*steps[:num_steps], Finished(reason="length", completion_tokens=5))
    choice = {"type": "custom", "name": "number"}
    response = await whole(api, tools=[NUMBER], tool_choice=choice)
    assert response["status"] == "incomplete"
    assert [(c["input"], c["status"]) for c in response["output"]] == [(text, "incomplete")]


async def test_a_search_for_tools_is_the_client_s(api: Api) -> None:
    api.core.script = (FILTERED, called("tool_search", {"query": "sky"}))
    response = await whole(api, tools=[SEARCH])
    expected = {
        "type": "tool_search_call",
        "execution": "client",
        "arguments": {"query": "sky"},
        "status": "completed",
    }
    assert without_ids(response["output"]) == [expected]
    (added, done) = [
        event["item"]["arguments"]
        for event in await streamed(api, tools=[SEARCH])
        if "item" in event
    ]
    assert (added, done) == ({}, {"query": "sky"})


async def test_tools_that_a_search_found_can_be_called(api: Api) -> None:
    """Codex sends what its search found as an item, with every later request."""
    search = {"type": "tool_search_call", "call_id": "s1", "arguments": {"query": "sky"}}
    found = {"type": "tool_search_output", "call_id": "s1", "tools": [SPACE], "status": "completed"}
    given: list[dict[str, Any]] = [
        {"type": "additional_tools", "role": "developer", "tools": [PATCH]},
        {"role": "user", "content": "Warm?"},
        {**search, "execution": "client", "id": "ts_1"},
        found,
        {**search, "call_id": "s2"},
        {**found, "call_id": "s2"},
    ]
    api.core.script = (FILTERED, SPACED_CALL)
    response = await whole(api, input=given, tools=[SEARCH])
    (call,) = response["output"]
    assert (call["name"], call["namespace"]) == ("weather", "mcp__sky")
    said = prompt_of(api)
    assert said.count("You can call mcp__sky__weather, mcp__sky__rain.") == 2
    assert '"patch"' in said
    assert [tool["type"] for tool in response["tools"]] == ["tool_search"]


async def test_the_default_namespace_has_no_name(api: Api) -> None:
    api.core.script = (FILTERED, CALLS)
    space = {"type": "namespace", "name": "functions", "description": "", "tools": [WEATHER]}
    given = [
        {"type": "additional_tools", "role": "developer", "tools": [space]},
        {"role": "user", "content": "Warm?"},
    ]
    (call,) = (await whole(api, input=given))["output"]
    assert call["name"] == "weather"
    assert "namespace" not in call


async def test_calls_of_agents_are_the_same_prompt_as_a_chat_s(api: Api) -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "Warm?"},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "namespace": "mcp__sky",
            "arguments": '{"place": "here"}',
            "caller": {"type": "direct"},
        },
        {"type": "function_call_output", "call_id": "c1", "output": "17"},
        {
            "type": "custom_tool_call",
            "call_id": "c2",
            "name": "patch",
            "input": "ü\n",
            "status": "completed",
        },
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "Done."}],
        },
    ]
    await whole(api, input=given)
    functions = [
        {"name": "mcp__sky__weather", "arguments": '{"place": "here"}'},
        {"name": "patch", "arguments": json.dumps({"input": "ü\n"})},
    ]
    calls = [
        {"id": f"c{at}", "type": "function", "function": function}
        for at, function in enumerate(functions, start=1)
    ]
    messages = [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "c1", "content": "17"},
        {"role": "assistant", "content": "", "tool_calls": calls[1:]},
        {"role": "tool", "tool_call_id": "c2", "content": "Done."},
    ]
    assert (await api.post(CHAT, messages=messages)).status_code == 200
    first, second = api.core.requests
    assert first.prompt_ids == second.prompt_ids


async def test_a_limit_beyond_the_context_is_lowered_and_told(api: Api) -> None:
    reply = await post(api, max_output_tokens=3000, filter="none")
    (request,) = api.core.requests
    room = CONTEXT - len(request.prompt_ids)
    assert request.sampling.max_tokens == reply.json()["max_output_tokens"] == room
    assert reply.headers["x-gemserve-max-tokens"] == str(room)
    assert (await whole(api))["max_output_tokens"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"client_metadata": {"session_id": "x", "x-codex-window-id": "y:0"}, "store": False},
        {"prompt_cache_key": "k", "previous_response_id": None, "reasoning": {"summary": "auto"}},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"tools": [{**WEATHER, "defer_loading": True, "output_schema": {"type": "object"}}]},
        {"tools": [{**PATCH, "allowed_callers": ["direct"], "format": {"type": "text"}}]},
    ],
)
async def test_what_has_no_effect_is_accepted(api: Api, fields: dict[str, Any]) -> None:
    await whole(api, **fields)
    assert (await streamed(api, **fields))[-1]["type"] == "response.completed"


async def test_the_count_is_that_of_the_prompt(api: Api) -> None:
    fields = {"input": [{"role": "user", "content": "Hi"}], "tools": [SPACE, *HOSTED]}
    count = await api.client.post("/v1/responses/input_tokens", json=fields)
    assert count.status_code == 200, count.text
    used = (await whole(api, **fields))["usage"]["input_tokens"]
    assert count.json() == {"object": "response.input_tokens", "input_tokens": used}
    named = {**fields, "model": "fake", "truncation": "auto", "reasoning": {"effort": "low"}}
    again = await api.client.post("/v1/responses/input_tokens", json=named)
    assert again.json() == count.json()
    for wrong, param in (({}, "input"), ({"input": "x", "model": "y"}, "model")):
        refused = await api.client.post("/v1/responses/input_tokens", json=wrong)
        assert refused.json()["error"]["param"] == param


async def test_a_count_may_exceed_the_context(api: Api) -> None:
    count = await api.client.post("/v1/responses/input_tokens", json={"input": "x " * 3000})
    assert count.json()["input_tokens"] > CONTEXT


@pytest.mark.parametrize(
    "answer",
    [
        SPACED_CALL,
        called("patch", {"input": "x"}),
        called("tool_search", {"query": "x"}),
        called("number", {"input": ""}),
    ],
)
async def test_replies_are_as_described(api: Api, answer: str) -> None:
    described = Described((await api.client.get("/openapi.json")).json())
    api.core.script = (FILTERED, answer)
    fields = {"model": "fake", "input": "?", "tools": [SPACE, PATCH, NUMBER, SEARCH, *HOSTED]}
    assert described.accepts(RESPONSES, fields)
    for stream in (False, True):
        reply = await post(api, **fields, stream=stream)
        assert reply.status_code == 200, reply.text
        assert "call_id" in reply.text
        described.check(reply)
