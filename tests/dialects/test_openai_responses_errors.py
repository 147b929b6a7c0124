"""What `/v1/responses` refuses: errors name the field as it was sent, and say why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import Api
from tests.openai_responses_requests import LOGPROBS, NAMED, STOP, TOOLS, WEATHER, post

pytestmark = pytest.mark.anyio
UNHELD = {"type": "object", "not": {}}
FORM = {"type": "json_schema", "name": "x", "strict": True}
IMAGE = {"type": "input_image", "image_url": "data:,"}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_a_number_that_replies_cannot_repeat_is_refused(api: Api, number: str) -> None:
    """It is no error while the body is parsed, and would be one when the reply is written."""
    schema = {"type": "object", "maxProperties": "?"}
    tool = {**WEATHER, "parameters": schema}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    forced = {"tools": TOOLS, "tool_choice": "required", "text": form}
    for fields, param in (
        ({"tools": [tool]}, "tools.0.parameters"),
        (forced, "text.format.schema"),
    ):
        body = json.dumps({"model": "fake", "input": "Hi", **fields}).replace('"?"', number)
        reply = await api.client.post("/v1/responses", content=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param


PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


def held_to(pattern: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": "regex", "definition": pattern}
    return {"type": "custom", "name": "number", "format": form}


def space(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "!", "tools": list(tools)}


def named(number: int) -> dict[str, Any]:
    return {"type": "function", "name": f"f{number}"}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": [WEATHER, {"type": "telepathy"}]}, "tools.1.type", "must be one of function"),
        ({"input": 3}, "input", "must be a text or a list"),
        (
            {"input": [{"role": "user", "content": 3}]},
            "input.0.content",
            "must be a text or a list",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input.0.content.0.text",
            "required",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 3}]}]},
            "input.0.content.0.refusal",
            "string",
        ),
        ({"stop": [3]}, "stop.0", "string"),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", "must be a text or an object"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type", "must be one of text"),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {"name": "a"}}}},
            "text.format.name",
            "required",
        ),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}]},
            "tools.0.format.syntax",
            "required",
        ),
        (
            {"tools": [{"type": "file_search"}], "tool_choice": "required"},
            "tool_choice",
            "no hosted",
        ),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools.0", "no other servers"),
        (
            {
                "tools": [{"type": "web_search"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "web_search"}],
                },
            },
            "tool_choice",
            "no hosted",
        ),
        ({"tools": [PATCH], "tool_choice": "required"}, "tools.0.format.syntax", "lark"),
        (
            {"tools": [WEATHER, PATCH], "tool_choice": {"type": "custom", "name": "patch"}},
            "tools.1.format.syntax",
            "lark",
        ),
        ({"tools": [{**PATCH, "format": {"type": "json"}}]}, "tools.0.format.type", "text, gramm"),
        (
            {"tools": [held_to("(")], "tool_choice": {"type": "custom", "name": "number"}},
            "tools.0.format",
            "pattern",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools.0.tools.0.type",
            "must be one of function, custom",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools.0.tools.0.name",
            "required",
        ),
        ({"tools": [space("a", WEATHER), space("a", WEATHER)]}, "tools", "name a__weather"),
        (
            {
                "tools": [space("a", WEATHER), space("b", WEATHER)],
                "tool_choice": {"type": "function", "name": "weather"},
            },
            "tool_choice.name",
            "one of 2 namespaces",
        ),
        (
            {
                "tools": [STOP, space("a", {**WEATHER, "parameters": UNHELD, "strict": True})],
                "tool_choice": {"type": "function", "name": "a__weather"},
            },
            "tools.1.tools.0.parameters",
            "not",
        ),
        (
            {"tools": [space("a", *(named(i) for i in range(120))), *map(named, range(120))]},
            "tools",
            "240 tools",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name", "required"),
        ({"tools": [{**WEATHER, "more": 1}]}, "tools.0.more", "unknown"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools.0.parameters", "obj"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "2 tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "any"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "not served"),
        ({"tools": TOOLS, "tool_choice": {**NAMED, "name": "x"}}, "tool_choice.name", "'x'"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{**NAMED, "name": "x"}],
                },
            },
            "tool_choice.tools.0.name",
            "'x'",
        ),
        (
            {
                "tools": [STOP, {**WEATHER, "parameters": UNHELD, "strict": True}],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
            },
            "tools.1.parameters",
            "not",
        ),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0", "text only"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input.0", "nothing is stored"),
        ({"input": [{"type": "telepathy", "id": "m"}]}, "input.0", "telepathy is not"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "required"),
        ({"input": [{"role": "user", "content": "x", "more": 1}]}, "input.0.more", "unknown"),
        ({"input": ["x"]}, "input.0", "object"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "empty"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "yaml"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "req"),
        (
            {"text": {"format": {**FORM, "schema": UNHELD}}},
            "text.format.schema",
            "not",
        ),
        ({"top_logprobs": 2}, "top_logprobs", LOGPROBS),
        ({"max_output_tokens": 10**30}, "max_output_tokens", "2147483648"),
        ({"truncation": "most"}, "truncation", "most"),
        ({"n": 2}, "n", "unknown"),
    ],
)
async def test_what_is_wrong_is_named(
    api: Api, fields: dict[str, Any], param: str, word: str
) -> None:
    reply = await post(api, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert word in error["message"]
    assert len(reply.content) < 2048
    assert api.core.requests == []
