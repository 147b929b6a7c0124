"""Tools and structured outputs through the real `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes import FILTERED, FakeCore, live_server, serving_over

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
USER: Any = {"role": "user", "content": "How warm is it?"}
SCRIPT = (FILTERED, '{"name": "weather",', ' "arguments": {"pla', 'ce": "he', 're"}}')


@pytest.fixture
def client(tokenizer: Any) -> Iterator[openai.OpenAI]:
    with (
        live_server(serving_over(FakeCore(*SCRIPT), tokenizer)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as opened,
    ):
        yield opened


def test_a_call_its_result_and_the_next_turn(client: openai.OpenAI) -> None:
    """The reply's message goes back as it is, which is how every example has it."""
    messages: Any = [USER]
    for choice in ("auto", "required"):
        reply = client.chat.completions.create(
            model="fake", messages=messages, tools=TOOLS, tool_choice=choice
        )
        message = reply.choices[0].message
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"place": "here"}
        assert reply.choices[0].finish_reason == "tool_calls"
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"}]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_client_puts_a_streamed_call_together(client: openai.OpenAI, choice: Any) -> None:
    with client.chat.completions.stream(
        model="fake", messages=[USER], tools=TOOLS, tool_choice=choice
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.name == "weather"
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": "here"}


def test_a_schema_made_by_the_client(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        name: str
        arguments: dict[str, str]

    reply = client.chat.completions.parse(model="fake", messages=[USER], response_format=Weather)
    assert reply.choices[0].message.parsed == Weather(name="weather", arguments={"place": "here"})
