"""Tools and typed answers of `/v1/responses` through the real `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, TypeAdapter

from gemserve_dialects.openai_responses.items import Item, chat_messages
from tests.fakes import FILTERED, FakeCore, live_server, serving_over

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
FORCED = (FILTERED, '{"name": "weather",', ' "arguments": {"pla', 'ce": "he', 're"}}')
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "here"}}</tool_call>'

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@pytest.fixture
def client(core: FakeCore, tokenizer: Any) -> Iterator[openai.OpenAI]:
    with (
        live_server(serving_over(core, tokenizer)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as opened,
    ):
        yield opened


def test_a_call_its_result_and_the_next_turn(client: openai.OpenAI, core: FakeCore) -> None:
    """The output goes back as it is, with every field that the client's types have."""
    core.script = FORCED
    said: Any = [{"role": "user", "content": "How warm is it?"}]
    for choice in ("auto", "required"):
        reply = client.responses.create(
            model="fake",
            input=said,
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
        )
        (call,) = reply.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert json.loads(call.arguments) == {"place": "here"}
        said += [item.model_dump() for item in reply.output]
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": "17"})
    client.responses.create(model="fake", input=said, tools=TOOLS)
    (*_, last) = core.requests
    assert len(last.prompt_ids) > len(core.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("choice", "script", "num_calls"),
    [("required", FORCED, 1), ("auto", (FILTERED, CALL, CALL), 2)],
)
def test_the_client_puts_streamed_calls_together(
    client: openai.OpenAI, core: FakeCore, choice: Any, script: tuple[Any, ...], num_calls: int
) -> None:
    core.script = script
    with client.responses.stream(
        model="fake", input="Hi", tools=TOOLS, tool_choice=choice
    ) as stream:
        snapshots = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        response = stream.get_final_response()
    calls: Any = response.output
    assert [call.name for call in calls] == ["weather"] * num_calls
    assert calls[0].parsed_arguments == {"place": "here"}
    assert json.loads(snapshots[-1]) == {"place": "here"}


def test_a_typed_answer(client: openai.OpenAI, core: FakeCore) -> None:
    class Place(BaseModel):
        place: str

    core.script = (FILTERED, '{"place": ', '"here"}')
    whole = client.responses.parse(model="fake", input="Hi", text_format=Place)
    assert whole.output_parsed == Place(place="here")
    assert core.requests[0].grammar is not None
    with client.responses.stream(model="fake", input="Hi", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(place="here")


def test_a_refused_tool_is_a_typed_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no hosted tools") as error:
        client.responses.create(
            model="fake", input="Hi", tools=[{"type": "web_search"}], tool_choice="required"
        )
    assert error.value.param == "tool_choice"


def _call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": "{}"}


def _output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "17"}


@pytest.mark.parametrize(
    ("behind", "in_front"),
    [
        ([_call("a"), "Now I know.", _output("a")], ["Now I know.", _call("a"), _output("a")]),
        (
            ["First.", _call("a"), "Second.", _call("b"), _output("a"), _output("b")],
            ["First.\n\nSecond.", _call("a"), _call("b"), _output("a"), _output("b")],
        ),
        ([_call("a"), _output("a"), "17 degrees."], None),
    ],
)
def test_text_behind_a_call_is_not_between_it_and_its_result(
    behind: list[Any], in_front: list[Any] | None
) -> None:
    def messages(items: list[Any]) -> list[dict[str, Any]]:
        given = [
            {"role": "assistant", "content": item} if isinstance(item, str) else item
            for item in items
        ]
        user = {"role": "user", "content": "How warm is it?"}
        return [message.plain for message in chat_messages(ITEMS.validate_python([user, *given]))]

    found = messages(behind)
    if in_front is not None:
        assert found == messages(in_front)
    roles = [message["role"] for message in found]
    assert roles[:3] == ["user", "assistant", "tool"]
