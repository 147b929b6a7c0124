"""Values at the ends of their ranges mean what they mean at OpenAI, vLLM and Anthropic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemserve.contract.sampling import SamplingParams
from gemserve.decoding.sampling import sorted_probabilities
from tests.described import Described
from tests.fakes import CHAT, COMPLETIONS, FILTERED, MODEL, Api, data_of

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
SAID: Json = {"messages": [{"role": "user", "content": "Hi"}]}
GOOD: dict[str, Json] = {
    COMPLETIONS: {"prompt": "Hello there"},
    CHAT: SAID,
    RESPONSES: {"input": "Hi"},
    MESSAGES: {**SAID, "max_tokens": 9},
    OLLAMA: {**SAID, "stream": False},
}


async def answered(api: Api, path: str, **fields: Any) -> Json:
    """The reply to a body that the document must allow, too."""
    body = {"model": MODEL, **GOOD[path], **fields}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    document = Described((await api.client.get("/openapi.json")).json())
    assert document.accepts(path, body)
    read: Json = reply.json()
    return read


@pytest.mark.parametrize("path", GOOD)
async def test_top_p_zero_and_top_k_minus_one(api: Api, path: str) -> None:
    wanted = {"top_p": 0, "top_k": -1}
    await answered(api, path, **({"options": wanted} if path == OLLAMA else wanted))
    sampling = api.core.requests[-1].sampling
    assert (sampling.top_p, sampling.top_k) == (0, 0)


def test_top_p_zero_leaves_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.9], [3.0, 3.0, 1.0]])
    params = [SamplingParams(max_tokens=1, top_p=0.0)] * 2
    probabilities, ids = sorted_probabilities(logits, params)
    assert probabilities.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert ids[:, 0].tolist() == [1, 0]


async def test_an_echo_without_an_answer(api: Api) -> None:
    """Evaluations ask so for the log-probabilities of a text."""
    reply = await answered(api, COMPLETIONS, echo=True, max_tokens=0)
    assert reply["choices"][0]["text"] == "Hello there"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    sent = await api.post(COMPLETIONS, echo=True, max_tokens=0, n=2)
    assert sent.headers["x-gemserve-max-tokens"] == "0"
    assert [choice["text"] for choice in sent.json()["choices"]] == ["Hello there"] * 2
    chunks = data_of(await api.post(COMPLETIONS, echo=True, max_tokens=0, stream=True))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Hello there"
    assert choices[-1]["finish_reason"] == "length"
    for fields in ({}, {"echo": False}):
        refused = await api.post(COMPLETIONS, max_tokens=0, **fields)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "max_tokens"
        assert "only with echo" in refused.json()["error"]["message"]


async def test_more_tools_than_openai_takes_at_messages(api: Api) -> None:
    """Agents with several MCP servers have more than 128."""

    async def status(count: int) -> int:
        tools = [
            {"name": f"t{place}", "input_schema": {"type": "object"}} for place in range(count)
        ]
        body = {"model": MODEL, **SAID, "tools": tools}
        return (await api.client.post(f"{MESSAGES}/count_tokens", json=body)).status_code

    assert await status(129) == 200
    assert await status(1024) == 200
    assert await status(1025) == 400


@pytest.mark.parametrize(
    ("path", "field", "member"),
    [
        (CHAT, "modalities", "x"),
        (RESPONSES, "include", "x"),
        (RESPONSES, "context_management", {}),
        (MESSAGES, "betas", "x"),
        (MESSAGES, "fallbacks", {}),
    ],
)
async def test_lists_without_effect_are_bounded(
    api: Api, path: str, field: str, member: Any
) -> None:
    """They had no limit, and each wrong member of a modality was an error of its own."""
    body = {"model": MODEL, **GOOD[path], field: [member] * 129}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400
    assert field in reply.text
    document = Described((await api.client.get("/openapi.json")).json())
    assert not document.accepts(path, body)


def function(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Json:
    chosen = {"mode": mode, "tools": [function(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": chosen}


async def test_only_allowed_tools_are_in_the_prompt_of_a_chat(api: Api) -> None:
    tools = [function("weather"), function("clock")]
    await answered(api, CHAT, tools=tools, tool_choice=allowed("auto", "clock"))
    first = api.core.requests[-1]
    await answered(api, CHAT, tools=tools[1:], tool_choice="auto")
    assert list(first.prompt_ids) == list(api.core.requests[-1].prompt_ids)
    assert first.grammar is None
    api.core.script = (FILTERED, '{"name": "clock", "arguments": {}}')
    reply = await answered(api, CHAT, tools=tools, tool_choice=allowed("required", "clock"))
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"
    grammar = api.core.requests[-1].grammar
    assert grammar is not None
    assert "weather" not in grammar.text


async def test_a_tool_that_is_not_there_cannot_be_allowed(api: Api) -> None:
    for fields in ({"tools": [function("clock")]}, {}):
        choice = allowed("auto", "clock", "x") if fields else allowed("auto", "clock")
        reply = await api.post(CHAT, **fields, tool_choice=choice)
        assert reply.status_code == 400
        place = 1 if fields else 0
        field = f"tool_choice.allowed_tools.tools.{place}.function.name"
        assert reply.json()["error"]["param"] == field


async def test_nothing_asked_for_by_name_is_nothing(api: Api) -> None:
    reply = await answered(api, CHAT, logprobs=False, top_logprobs=0)
    assert reply["choices"][0]["logprobs"] is None
    await answered(api, CHAT, top_logprobs=0)
    await answered(api, COMPLETIONS, suffix="")
