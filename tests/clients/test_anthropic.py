"""Anthropic's own client for Python, which speaks `/v1/messages` only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemserve.contract.events import Finished
from tests.clients.environments import python_of
from tests.fakes import FILTERED, FakeCore
from tests.guide import run_example

START = """
import anthropic
from pydantic import BaseModel

client = anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key="none", max_retries=0)
USER = {"role": "user", "content": "How warm is it?"}
ASKED = {"model": "builtin", "max_tokens": 30, "messages": [USER]}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
"""
TEXTS = """
message = client.messages.create(
    **ASKED,
    system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    stop_sequences=["x"],
    metadata={"user_id": "me"},
    thinking={"type": "disabled"},
    extra_body={"filter": {"method": "gemfilter", "keep": 64}, "temperature": 0.5},
)
assert message.content[0].text == TEXT
assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 4)
assert message.model_extra["filter"]["method"] == "gemfilter"
assert message._request_id.startswith("req")
with client.messages.stream(**ASKED) as stream:
    assert "".join(stream.text_stream) == TEXT
    final = stream.get_final_message()
assert final.content[0].text == TEXT
assert final.model_extra["filter"]["reason"] == "short_prompt"
assert final.usage.output_tokens == 4
count = client.messages.count_tokens(model="builtin", messages=[USER])
assert count.input_tokens == final.usage.input_tokens
for fields, error in (
    ({"model": "claude"}, anthropic.NotFoundError),
    ({"max_tokens": 0}, anthropic.BadRequestError),
):
    try:
        client.messages.create(**{**ASKED, **fields})
    except error as caught:
        assert caught.body["type"] == "error"
        assert caught.request_id == caught.body["request_id"]
    else:
        raise AssertionError(fields)
"""
CALLS = """
said = [USER]
for choice in ("auto", "any"):
    asked = {**ASKED, "messages": said, "tools": TOOLS, "tool_choice": {"type": choice}}
    message = client.messages.create(**asked)
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"place": "here"})
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert snapshots[-1] == final.content[0].input == call.input
    assert final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "17", "is_error": False}
    said += [{"role": "assistant", "content": message.content}]
    said += [{"role": "user", "content": [result]}]
"""
TYPED = """
class Place(BaseModel):
    place: str

assert client.messages.parse(**ASKED, output_format=Place).parsed_output == Place(place="here")
"""
FAILED = """
for is_streamed in (False, True):
    try:
        answer = client.messages.create(**ASKED, stream=is_streamed)
        list(answer)
    except anthropic.APIStatusError as error:
        assert error.body["error"]["type"] == "api_error"
        assert "no memory" in error.body["error"]["message"]
    else:
        raise AssertionError(is_streamed)
"""

DOCUMENTS = """
stored = client.post("/v1/documents", cast_to=object, body={"text": "The lantern. " * 30})
source = {"type": "file", "file_id": stored["id"]}
block = {"type": "document", "source": source, "cache_control": {"type": "ephemeral"}}
asked = {**ASKED, "messages": [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}]}
for messages in (client.messages, client.beta.messages):
    assert messages.create(**asked).content[0].text == TEXT
assert client.messages.count_tokens(model="builtin", messages=asked["messages"]).input_tokens > 60
source["file_id"] = "doc-" + "0" * 32
try:
    client.messages.create(**asked)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError(asked)
"""


def run(url: str, folder: Path, core: FakeCore, code: str, *script: Any) -> None:
    if script:
        core.script = script
    interpreter = python_of("anthropic")
    text = f"TEXT = 'Héllo 🌍!'\n{START}{code}"
    run_example(text, "python", url=url, folder=folder, interpreter=interpreter)


@pytest.mark.capability("Anthropic SDK, Python", "chat", "stream", "errors", "filter")
def test_texts_streams_counts_and_typed_errors(url: str, folder: Path, core: FakeCore) -> None:
    run(url, folder, core, TEXTS)
    request = core.requests[0]
    assert (request.filter.method, request.filter.keep) == ("gemfilter", 64)
    assert (request.sampling.temperature, request.sampling.stop) == (0.5, ("x",))


def test_stored_documents(url: str, folder: Path, core: FakeCore) -> None:
    run(url, folder, core, DOCUMENTS)
    first, second = (request.prompt_ids for request in core.requests[1:])
    assert first == second


@pytest.mark.capability("Anthropic SDK, Python", "tools")
def test_calls_and_their_results(url: str, folder: Path, core: FakeCore) -> None:
    script = ('{"name": "weather", ', '"arguments": ', '{"place": "he', 're"}', "}")
    run(url, folder, core, CALLS, FILTERED, *script)
    assert [request.grammar is not None for request in core.requests] == [False] * 2 + [True] * 2


@pytest.mark.capability("Anthropic SDK, Python", "typed")
def test_a_typed_answer(url: str, folder: Path, core: FakeCore) -> None:
    run(url, folder, core, TYPED, FILTERED, '{"place": ', '"here"}')
    assert core.requests[0].grammar is not None


def test_a_failure_is_an_error_once(url: str, folder: Path, core: FakeCore) -> None:
    end = Finished(reason="error", completion_tokens=1, error="no memory")
    run(url, folder, core, FAILED, FILTERED, "one", end)
