"""`/v1/responses` through the real `openai` client, and what of it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.fakes import FILTERED, Api, FakeCore, api_over, live_server, serving_over

RESPONSES = "/v1/responses"
TEXT = "Héllo 🌍!"


@pytest.fixture
def client(core: FakeCore, tokenizer: Any) -> Iterator[openai.OpenAI]:
    with (
        live_server(serving_over(core, tokenizer)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


def test_a_whole_response(client: openai.OpenAI, core: FakeCore) -> None:
    response = client.responses.create(
        model="fake",
        input="Où? 🌍",
        instructions="Be brief.",
        temperature=0.5,
        max_output_tokens=9,
        store=False,
        extra_body={"filter": {"method": "gemfilter", "keep": 16}},
    )
    assert response.output_text == TEXT
    assert (response.status, response.error) == ("completed", None)
    assert response.usage is not None
    num_prompt = len(core.requests[0].prompt_ids)
    assert response.usage.input_tokens == num_prompt
    assert response.usage.output_tokens == 4
    assert response.model_extra is not None
    assert response.model_extra["filter"]["prompt_tokens"] == num_prompt
    sampling = core.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 9)
    assert core.requests[0].filter.method == "gemfilter"


def test_a_conversation_renders_as_a_chat(client: openai.OpenAI, core: FakeCore) -> None:
    said: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello."},
        {"type": "message", "role": "user", "content": "And?"},
    ]
    client.responses.create(model="fake", input=said, instructions="Be brief.")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
    ]
    client.chat.completions.create(model="fake", messages=messages)
    assert list(core.requests[0].prompt_ids) == list(core.requests[1].prompt_ids)
    assert core.requests[0].protected == core.requests[1].protected


def test_what_was_answered_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="Hi")
    said: Any = [{"role": "user", "content": "Hi"}, *(o.model_dump() for o in first.output)]
    again = client.responses.create(
        model="fake", input=[*said, {"role": "user", "content": "And?"}]
    )
    assert again.output_text == TEXT


def test_a_stream_s_events(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == TEXT
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT


@pytest.mark.anyio
async def test_an_answer_cut_off_is_incomplete(tokenizer: Any) -> None:
    from gemserve.contract.events import Finished

    core = FakeCore(FILTERED, "a", Finished(reason="length", completion_tokens=1))
    async with api_over(core, tokenizer) as api:
        body = (await post(api)).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["content"][0]["text"] == "a"


@pytest.mark.anyio
@pytest.mark.parametrize("script", [(FILTERED, "a"), (1.2,)])
async def test_a_failure_ends_the_stream_once(tokenizer: Any, script: tuple[Any, ...]) -> None:
    core = FakeCore(*script, RuntimeError("no memory"))
    async with api_over(core, tokenizer) as api:
        reply = await post(api, stream=True)
        kinds = [x.removeprefix("event: ") for x in reply.text.split("\n") if x[:6] == "event:"]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.failed"
        assert "no memory" in reply.text
        assert (await post(api)).status_code == 500


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": "x " * 3000}, "input"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_is_not_served_is_named(api: Api, fields: dict[str, Any], param: str) -> None:
    reply = await post(api, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)
    assert not api.core.requests


async def post(api: Api, **fields: Any) -> Any:
    return await api.client.post(RESPONSES, json={"model": "fake", "input": "Hi", **fields})
