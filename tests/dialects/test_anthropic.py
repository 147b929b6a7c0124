"""`/v1/messages` and its token counts, in Anthropic's form."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from gemserve.contract.events import Finished
from tests.anthropic_requests import (
    CALL,
    COUNT,
    FORCED,
    MESSAGES,
    SCHEMA,
    TEXT,
    TOOLS,
    USER,
    WEATHER,
    post,
    put_together,
    streamed,
    whole,
    without_ids,
)
from tests.fakes import CHAT, CONTEXT, FILTERED, Api, FakeCore, api_over

pytestmark = pytest.mark.anyio
LARGEST = sys.float_info.max


async def test_a_whole_message(api: Api) -> None:
    reply = await post(
        api,
        system="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["STOP"],
        metadata={"user_id": "me"},
        thinking={"type": "disabled"},
        filter={"method": "gemfilter", "keep": 16},
    )
    message = reply.json()
    (request,) = api.core.requests
    assert message["id"].startswith("msg_")
    assert message["content"] == [{"type": "text", "text": TEXT}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["input_tokens"] == len(request.prompt_ids)
    assert message["usage"]["output_tokens"] == 4
    assert message["filter"]["method"] == "gemfilter"
    assert message["filter"]["prompt_tokens"] == len(request.prompt_ids)
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    assert reply.headers["x-gemserve-prompt-tokens"] == str(len(request.prompt_ids))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.max_tokens, sampling.stop) == (50, ("STOP",))
    assert (request.filter.method, request.filter.keep) == ("gemfilter", 16)


async def test_the_bytes_of_a_stream(api: Api) -> None:
    api.core.script = (FILTERED, "Hé", "llo")
    reply = await post(api, stream=True)
    start, rest = reply.text.split("\n\n", 1)
    assert start.startswith('event: message_start\ndata: {"type": "message_start", "message": {"id')
    message = json.loads(start.split("data: ")[1])["message"]
    assert message["filter"]["reason"] == "short_prompt"
    in_header = json.loads(reply.headers["x-gemserve-filter"])
    assert in_header == {**message["filter"], "messages": None}
    num_prompt = len(api.core.requests[0].prompt_ids)
    assert message["usage"]["input_tokens"] == num_prompt
    zeros = '"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0'
    assert rest == (
        "event: content_block_start\n"
        'data: {"type": "content_block_start", "index": 0,'
        ' "content_block": {"type": "text", "text": ""}}\n\n'
        "event: content_block_delta\n"
        'data: {"type": "content_block_delta", "index": 0,'
        ' "delta": {"type": "text_delta", "text": "Hé"}}\n\n'
        "event: content_block_delta\n"
        'data: {"type": "content_block_delta", "index": 0,'
        ' "delta": {"type": "text_delta", "text": "llo"}}\n\n'
        "event: content_block_stop\n"
        'data: {"type": "content_block_stop", "index": 0}\n\n'
        "event: message_delta\n"
        'data: {"type": "message_delta",'
        ' "delta": {"stop_reason": "end_turn", "stop_sequence": null},'
        f' "usage": {{"input_tokens": {num_prompt}, "output_tokens": 2, {zeros}}}}}\n\n'
        "event: message_stop\n"
        'data: {"type": "message_stop"}\n\n'
    )


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [
        (None, False),
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ],
)
async def test_a_call_whole_and_streamed(api: Api, choice: Any, is_held: bool) -> None:
    api.core.script = FORCED
    message = await whole(api, tools=TOOLS, tool_choice=choice)
    assert (api.core.requests[0].grammar is not None) == is_held
    (block,) = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert block["id"].startswith("toolu_")
    assert block["input"] == {"place": "here"}
    assert message["stop_reason"] == "tool_use"
    events = await streamed(api, tools=TOOLS, tool_choice=choice)
    assert without_ids(put_together(events)) == without_ids(message)
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert len(deltas) > 1 or not is_held  # arguments come as they are generated


async def test_several_calls_have_a_block_each(api: Api) -> None:
    api.core.script = (FILTERED, CALL, "\n", CALL.replace("here", "there"))
    message = await whole(api, tools=TOOLS)
    assert [block["input"]["place"] for block in message["content"]] == ["here", "there"]
    assert len({block["id"] for block in message["content"]}) == 2
    assert without_ids(put_together(await streamed(api, tools=TOOLS))) == without_ids(message)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await whole(api, tools=TOOLS, tool_choice=one))["content"]) == 1


async def test_no_call_is_made_of_text_if_none_is_wanted(api: Api) -> None:
    api.core.script = FORCED
    message = await whole(api, tools=TOOLS, tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": "".join(FORCED[1:])}]  # type: ignore[arg-type]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("end", "reason", "stop"),
    [
        (Finished(reason="length", completion_tokens=1), "max_tokens", None),
        (Finished(reason="stop", completion_tokens=1, stop="END"), "stop_sequence", "END"),
        (Finished(reason="stop", completion_tokens=1), "end_turn", None),
    ],
)
async def test_why_an_answer_ends(api: Api, end: Finished, reason: str, stop: str | None) -> None:
    api.core.script = (FILTERED, "a", end)
    message = await whole(api, stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert put_together(await streamed(api))["stop_reason"] == reason


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"place": "he', {}),  # cut off
        ('{"x": 1e999, "y": -%s}' % ("9" * 5000), {"x": LARGEST, "y": -LARGEST}),
        ('{"x": "\\ud800"}', {"x": "?"}),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", {}),
    ],
)  # fmt: skip
async def test_odd_arguments_do_not_break_a_message(
    api: Api, arguments: str, expected: dict[str, Any]
) -> None:
    api.core.script = (FILTERED, '{"name": "weather", "arguments": ', arguments, "}")
    message = await whole(api, tools=TOOLS, tool_choice={"type": "any"})
    assert message["content"][0]["input"] == expected


async def test_an_empty_answer_has_no_block(api: Api) -> None:
    api.core.script = (FILTERED,)
    assert (await whole(api))["content"] == []
    kinds = [event["type"] for event in await streamed(api)]
    assert kinds == ["message_start", "message_delta", "message_stop"]


HISTORY: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Warm?", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "here"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}, "caller": None},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "17"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "place"}],
                "is_error": True,
            },
            {"type": "text", "text": "And now?"},
        ],
    },
]


async def test_the_same_conversation_is_the_same_prompt_as_a_chat_s(api: Api) -> None:
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "And kind."}]
    await whole(api, messages=HISTORY, system=system, tools=TOOLS)

    def call(number: int, arguments: str) -> dict[str, Any]:
        function = {"name": "weather", "arguments": arguments}
        return {"id": f"t{number}", "type": "function", "function": function}

    messages = [
        {"role": "system", "content": "Be brief.\n\nAnd kind."},
        {"role": "user", "content": "Warm?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call(1, '{"place": "here"}'), call(2, "{}")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "17"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\n\nplace"},
        {"role": "user", "content": "And now?"},
    ]
    functions = [
        {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
        {"name": "stop", "parameters": {"type": "object"}},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    assert (await api.post(CHAT, messages=messages, tools=tools)).status_code == 200
    first, second = api.core.requests
    assert first.prompt_ids == second.prompt_ids
    assert first.protected == second.protected
    reply = await post(api, COUNT, messages=HISTORY, system=system, tools=TOOLS)
    assert reply.json() == {"input_tokens": len(first.prompt_ids)}


async def test_an_answer_is_held_to_its_format(api: Api) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    await whole(api, output_config={"format": form, "effort": "low"})
    grammar = api.core.requests[0].grammar
    assert grammar is not None
    assert "place" in grammar.text


async def test_a_prompt_that_is_too_long_is_counted(api: Api) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    reply = await post(api, COUNT, messages=long)
    assert reply.status_code == 200
    assert reply.json()["input_tokens"] > 2000
    assert api.core.requests == []
    refused = await post(api, messages=long)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    tokens = reply.json()["input_tokens"]
    assert message == f"prompt is too long: {tokens} tokens > 1000 maximum"


async def test_a_silence_is_filled_with_pings(tokenizer: Any) -> None:
    core = FakeCore(0.3, FILTERED, "a", 0.3, "b")
    async with api_over(core, tokenizer, keep_alive_s=0.05) as api:
        events = await streamed(api)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "ping"
    start = kinds.index("content_block_delta")
    assert "ping" in kinds[start:]
    assert put_together(events)["content"] == [{"type": "text", "text": "ab"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive"}, "service_tier": "auto"},
        {"cache_control": {"type": "ephemeral"}, "metadata": {"user_id": None}},
        {"system": None, "tools": [], "tool_choice": None, "stream": None, "metadata": None},
        {"tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}, "strict": True}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"betas": ["context-management-2025-06-27"], "mcp_servers": [], "container": "c"},
        {"container": {"id": None, "skills": []}, "inference_geo": "us", "speed": "fast"},
        {"diagnostics": {"previous_message_id": None}, "fallbacks": "default"},
        {"fallbacks": [{"model": "x"}], "fallback_credit_token": "t", "compaction": None},
        {"billing_policy": {"type": "billing_policy"}, "thread": None, "service_tier": "auto"},
        {"thinking": {"type": "enabled", "budget_tokens": 31_999, "display": "omitted"}},
        {"thinking": {"type": "between_tools"}},
        {"output_config": {"effort": "max", "task_budget": {"type": "tokens", "total": 9}}},
    ],
)
async def test_what_has_no_effect_is_accepted(api: Api, fields: dict[str, Any]) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-thing"}
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], **fields}
    reply = await api.client.post(f"{MESSAGES}?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.json()["content"] == [{"type": "text", "text": TEXT}]


async def test_a_limit_beyond_the_context_is_lowered_and_told(api: Api) -> None:
    """Claude Code sends 32000 whatever the model is."""
    reply = await post(api, max_tokens=32_000, filter="none")
    (request,) = api.core.requests
    room = CONTEXT - len(request.prompt_ids)
    assert request.sampling.max_tokens == room
    assert reply.json()["max_tokens"] == room
    assert reply.headers["x-gemserve-max-tokens"] == str(room)
    start = (await streamed(api, max_tokens=32_000, filter="none"))[0]
    assert start["message"]["max_tokens"] == room
    assert (await whole(api, max_tokens=7))["max_tokens"] == 7


async def test_a_lowered_limit_leaves_room_for_a_fallback(api: Api) -> None:
    long = {"role": "user", "content": "one two three four " * 150}
    options = {"method": "sieve", "keep": 64, "fallback": True}
    await whole(api, max_tokens=32_000, messages=[long], filter=options)
    (request,) = api.core.requests
    assert len(request.prompt_ids) > 500
    assert request.sampling.max_tokens == CONTEXT - len(request.prompt_ids)


async def test_the_reply_says_that_no_context_was_edited(api: Api) -> None:
    edits = [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}},
    ]
    fields = {"context_management": {"edits": edits}}
    none_applied = {"applied_edits": []}
    assert (await whole(api, **fields))["context_management"] == none_applied
    *_, delta, _ = await streamed(api, **fields)
    assert delta["context_management"] == none_applied
    assert "context_management" not in await whole(api)


async def test_the_older_name_of_the_format(api: Api) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    await whole(api, output_format=form)
    await whole(api, output_config={"format": form})
    first, second = api.core.requests
    assert first.grammar == second.grammar is not None


async def test_a_reference_to_a_tool_is_a_result(api: Api) -> None:
    """Claude Code's own search for tools answers with these."""
    use = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "x"}}
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": "t", "content": found}
    messages = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    await whole(api, messages=messages, tools=[{**WEATHER, "defer_loading": True}])
    prompt = api.serving.builder.tokenizer.decode(api.core.requests[0].prompt_ids)
    assert "You can call the tool weather." in prompt
