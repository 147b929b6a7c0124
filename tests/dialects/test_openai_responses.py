"""`/v1/responses`: tools, structured outputs, histories, and the events of its stream."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from gemserve.api.replies.answer_parts import Part
from gemserve.api.replies.logprobs import chat_logprobs
from gemserve.contract.events import Finished, TextDelta, TokenLogprob
from gemserve_dialects.openai_responses.response_object import ResponseInProgress
from tests.fakes import CHAT, FILTERED, Api
from tests.openai_responses_requests import (
    CALLS,
    FORCED,
    LOGPROBS,
    NAMED,
    PARAMETERS,
    TOOLS,
    WEATHER,
    post,
    put_together,
    streamed,
    whole,
    without_ids,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("choice", "is_held"),
    [
        (None, False),
        ("auto", False),
        ("required", True),
        (NAMED, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, False),
    ],
)
async def test_a_call_whole_and_streamed(api: Api, choice: Any, is_held: bool) -> None:
    api.core.script = FORCED
    fields = {"tools": TOOLS, "tool_choice": choice}
    response = await whole(api, **fields)
    assert (api.core.requests[0].grammar is not None) == is_held
    (call,) = response["output"]
    assert call["type"] == "function_call"
    assert call["id"].startswith("fc")
    assert call["call_id"].startswith("call_")
    assert (call["name"], call["status"]) == ("weather", "completed")
    assert json.loads(call["arguments"]) == {"place": "here"}
    assert response["status"] == "completed"
    assert response["tool_choice"] == (choice or "auto")
    assert response["tools"][0] == {**WEATHER, "strict": None}

    events = await streamed(api, **fields)
    assert without_ids(put_together(events)) == without_ids(response["output"])
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(response["output"])
    assert last["output"][0]["id"] == events[2]["item"]["id"]
    assert last["usage"] == response["usage"]
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 or not is_held  # arguments come as they are generated


async def test_the_events_of_a_call_in_their_order(api: Api) -> None:
    """Byte for byte but for ids, times and the whole responses."""
    api.core.script = FORCED
    events = await streamed(api, tools=TOOLS, tool_choice="required")
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 3,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[3] == {
        "type": "response.function_call_arguments.delta",
        "sequence_number": 3,
        "item_id": events[2]["item"]["id"],
        "output_index": 0,
        "delta": '{"place": "h',
    }


async def test_several_calls_have_an_item_each(api: Api) -> None:
    api.core.script = (FILTERED, CALLS, "\n", CALLS.replace("here", "there"))
    response = await whole(api, tools=TOOLS)
    places = [json.loads(call["arguments"])["place"] for call in response["output"]]
    assert places == ["here", "there"]
    assert len({call["call_id"] for call in response["output"]}) == 2
    events = await streamed(api, tools=TOOLS)
    assert without_ids(put_together(events)) == without_ids(response["output"])
    closed = [e["output_index"] for e in events if e["type"] == "response.output_item.done"]
    assert closed == [0, 1]
    one = await whole(api, tools=TOOLS, parallel_tool_calls=False)
    assert len(one["output"]) == 1
    assert one["parallel_tool_calls"] is False


async def test_text_is_a_message_where_calls_were_possible(api: Api) -> None:
    for choice in ("auto", "none"):
        response = await whole(api, tools=TOOLS, tool_choice=choice)
        (message,) = response["output"]
        assert message["content"][0]["text"] == "Héllo 🌍!"
        events = await streamed(api, tools=TOOLS, tool_choice=choice)
        assert without_ids(put_together(events)) == without_ids([message])


async def test_an_empty_answer_is_an_empty_message(api: Api) -> None:
    api.core.script = (FILTERED,)
    (message,) = (await whole(api))["output"]
    assert message["content"][0]["text"] == ""
    assert without_ids(put_together(await streamed(api))) == without_ids([message])


@pytest.mark.parametrize("num_steps", [1, 2, 4])
async def test_a_call_that_is_cut_off_is_incomplete(api: Api, num_steps: int) -> None:
    api.core.script = (*FORCED[:num_steps], Finished(reason="length", completion_tokens=9))
    response = await whole(api, tools=TOOLS, tool_choice="required")
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["incomplete"] * (num_steps == 4)
    events = await streamed(api, tools=TOOLS, tool_choice="required")
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(put_together(events)) == without_ids(response["output"])


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "name": "w", "schema": PARAMETERS, "strict": True},
        {"type": "text"},
    ],
)
async def test_text_is_held_to_its_format(api: Api, form: dict[str, Any]) -> None:
    response = await whole(api, text={"format": form, "verbosity": "low"})
    grammar = api.core.requests[0].grammar
    if form["type"] == "text":
        assert grammar is None
    else:
        assert grammar is not None
        assert ("place" in grammar.text) == (form["type"] == "json_schema")
    echoed = response["text"]["format"]
    assert {name: value for name, value in echoed.items() if value is not None} == form


async def test_tools_and_a_format_together_allow_a_call_or_the_format(api: Api) -> None:
    """Agents send both on every turn."""
    form = {"type": "json_schema", "name": "w", "schema": PARAMETERS, "strict": True}
    fields = {"tools": TOOLS, "text": {"format": form}}
    for script, kind in (
        ((FILTERED, '{"place": ', '"here"}'), "message"),
        (FORCED, "function_call"),
    ):
        api.core.script = script
        (item,) = (await whole(api, **fields))["output"]
        assert item["type"] == kind
        assert without_ids(put_together(await streamed(api, **fields))) == without_ids([item])
    grammar = api.core.requests[0].grammar
    assert grammar is not None
    assert grammar.calls is not None
    await whole(api, **fields, tool_choice="required")
    assert api.core.requests[-1].grammar != grammar


async def test_the_same_conversation_is_the_same_prompt_as_a_chat_s(api: Api) -> None:
    """Calls and results, in the forms in which clients send them back."""
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"a": 1}'}
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Warm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x" * 40},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": None,
            "content": [
                {"type": "output_text", "text": "I look.", "annotations": [{"type": "url"}]},
                {"type": "refusal", "refusal": "Or not."},
            ],
        },
        {**call, "id": "fc_1", "status": "completed", "namespace": None, "caller": None},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "17"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "18"}],
        },
    ]
    reply = await post(api, input=given, instructions="Say how warm it is.", tools=TOOLS)
    assert reply.status_code == 200, reply.text
    chat_call = {"type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Say how warm it is."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {
            "role": "assistant",
            "content": "I look.\nOr not.",
            "tool_calls": [{"id": "c1", **chat_call}, {"id": "c2", **chat_call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "17"},
        {"role": "tool", "tool_call_id": "c2", "content": "18"},
    ]
    functions = [{k: v for k, v in t.items() if k != "type" and v is not None} for t in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    assert (await api.post(CHAT, messages=messages, tools=tools)).status_code == 200
    first, second = api.core.requests
    assert first.prompt_ids == second.prompt_ids
    assert first.protected == second.protected


async def test_only_the_allowed_tools_are_in_the_prompt(api: Api) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{**NAMED, "name": "stop"}]}
    await whole(api, tools=TOOLS, tool_choice=allowed)
    said = api.serving.builder.tokenizer.decode(api.core.requests[0].prompt_ids)
    assert '"stop"' in said
    assert "weather" not in said


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content", "file_search_call.results"]},
        {"include": None, "reasoning": {"effort": "high", "summary": "auto"}},
        {"truncation": "auto", "max_tool_calls": 3},
        {"stream_options": {"include_obfuscation": False}},
        {"text": {"format": None, "verbosity": None}, "top_logprobs": 0},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
async def test_what_has_no_effect_is_accepted(api: Api, fields: dict[str, Any]) -> None:
    response = await whole(api, **fields)
    assert response["output"][0]["content"][0]["text"] == "Héllo 🌍!"
    assert response["truncation"] == fields.get("truncation", "disabled")
    assert response["max_tool_calls"] == fields.get("max_tool_calls")
    assert (await streamed(api, **fields))[-1]["type"] == "response.completed"


async def test_truncation_auto_does_not_truncate(api: Api) -> None:
    reply = await post(api, input="x " * 3000, truncation="auto")
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_stream_whose_end_cannot_be_built_ends_with_an_error(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error had what could not be built in it, and the stream broke off."""

    def fail_when_whole(_: ResponseInProgress, part: Part) -> list[Any]:
        if part.text:
            raise RuntimeError("a bug")
        return []

    monkeypatch.setattr(ResponseInProgress, "annotations_of", fail_when_whole)
    last = (await streamed(api))[-1]
    assert last["type"] == "response.failed"
    assert "could not be built" in last["response"]["error"]["message"]
    assert last["response"]["output"] == []


async def test_log_probabilities_if_they_are_included(api: Api) -> None:
    token = TokenLogprob(token_id=72, logprob=-0.5, top=((72, -0.5), (73, -1.5)))
    delta = TextDelta(text="Hi", token_ids=(72,), drawn_s=0, logprobs=(token,))
    last = TextDelta(text="", token_ids=(2,), drawn_s=0, logprobs=(token,))
    api.core.script = (FILTERED, delta, last)
    fields = {"include": [LOGPROBS], "top_logprobs": 2}
    response = await whole(api, **fields)
    assert api.core.requests[0].sampling.logprobs == 2
    scored = response["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in scored] == [-0.5, -0.5]
    assert len(scored[0]["top_logprobs"]) == 2
    events = await streamed(api, **fields)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert deltas[0]["logprobs"] == scored[:1]
    (done,) = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == scored


async def test_log_probabilities_of_a_long_answer_are_written_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last four events have all of them: 4,096 tokens kept the loop for a second."""
    token = TokenLogprob(token_id=72, logprob=-0.5, top=((72, -0.5), (73, -1.5)))
    deltas = [
        TextDelta(text="Hi", token_ids=(72,) * 100, drawn_s=0, logprobs=(token,) * 100)
        for _ in range(4)
    ]
    api.core.script = (FILTERED, *deltas)
    most, scored = [0], chat_logprobs

    def counted(vocabulary: Any, tokens: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            most[0] = max(most[0], len(tokens))
        return scored(vocabulary, tokens)

    name = "gemserve_dialects.openai_responses.response_object.chat_logprobs"
    monkeypatch.setattr(name, counted)
    events = await streamed(api, include=[LOGPROBS], top_logprobs=2)
    assert events[-1]["type"] == "response.completed"
    assert len(events[-1]["response"]["output"][0]["content"][0]["logprobs"]) == 400
    assert most == [100]
