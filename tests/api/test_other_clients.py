"""What other vendors' clients and servers write into requests. Each was a 400 once."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gemserve.api.requests.template_variables import MAX_BYTES, MAX_VARIABLES
from tests.described import Described
from tests.fakes import CHAT, COMPLETIONS, Api, FakeCore, api_over, data_of

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MARK = {"type": "ephemeral"}
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}

# client → fields of a chat that it sends
HABITS: dict[str, dict[str, Any]] = {
    "guidellm": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "openai 3": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "pydantic-ai": {"reasoning_effort": "low", "verbosity": "high", "modalities": ["text"]},
    "aider": {"prediction": {"type": "content", "content": "def f():"}},
    "aider, in parts": {
        "prediction": {"type": "content", "content": [{"type": "text", "text": "def f():"}]}
    },
    "openai-agents": {
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
        "moderation": {"model": "m", "policy": {"input": {"mode": "score"}, "output": None}},
    },
    "LangChain JS": dict.fromkeys(
        [
            *("stream", "ignore_eos", "stream_options", "audio", "functions", "function_call"),
            *("reasoning_effort", "verbosity", "modalities", "prediction", "moderation"),
            *("prompt_cache_retention", "web_search_options", "chat_template_kwargs"),
        ]
    ),
    "autogen": {
        "functions": [],
        "function_call": "none",
        "stream_options": {"include_usage": None},
    },
    "LiteLLM": {"tools": [{**TOOL, "cache_control": MARK}]},
}
# server or client → messages that it has put into a history
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "vLLM": [USER, {"role": "assistant", "content": "17.", "tool_calls": [],
                    "reasoning_content": "Hm.", "reasoning": None}],
    "llama.cpp": [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]}],
    "openai": [USER, {"role": "assistant", "content": "17.", "annotations": [], "audio": None,
                      "refusal": None, "function_call": None}],
    "before tools": [
        USER,
        {"role": "assistant", "content": None,
         "function_call": {"name": "weather", "arguments": "{\"place\": \"Bern\"}"}},
        {"role": "function", "name": "weather", "content": "Sun."},
    ],
    "web search": [USER, {"role": "assistant", "content": "17.",
                          "annotations": [{"type": "url_citation", "url_citation": {}}]}],
    "openai, parsed": [USER, {"role": "assistant", "content": "{}", "parsed": {"a": 1}},
                       {"role": "assistant", "tool_calls": [{**CALL, "function": {
                           "name": "f", "arguments": "{}", "parsed_arguments": {}}}]}],
    "LiteLLM, images": [USER, {"role": "assistant", "content": "17.", "images": []}],
    "parts of responses": [
        {"role": "user", "content": [{"type": "input_text", "text": "Seven?"}]},
        {"role": "assistant", "content": [
            {"type": "summary_text", "text": "Hm."}, {"type": "reasoning_text", "text": "Hm."},
            {"type": "output_text", "text": "Eight.", "annotations": [], "logprobs": []},
            {"type": "text", "text": "Nine.", "id": "m", "index": 0, "annotations": []}]}],
    "results without content": [
        USER, {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "assistant", "function_call": {"name": "f"}}, {"role": "function", "name": "f"}],
    "calls without ids": [
        USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "17."}],
    "a refusal": [USER, {"role": "assistant", "content": None, "refusal": "No."}],
    "a refusal as a part": [
        USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    ],
    "no text and no call": [USER, {"role": "assistant", "content": None}],
    "Anthropic's caches": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": MARK}],
         "cache_control": MARK}
    ],
    "LiteLLM": [USER, {"role": "assistant", "content": None, "provider_specific_fields": {},
                       "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}],
                       "tool_calls": [{**CALL, "provider_specific_fields": {"x": 1}}]}],
    "OpenRouter": [USER, {"role": "assistant", "content": "17.",
                          "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}],
    "Gemini": [USER, {"role": "assistant", "content": "", "extra_content": {"google": {}},
                      "tool_calls": [{**CALL, "extra_content": {"google": {"a": "b"}}}]}],
    "calls without a type": [USER, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": {"place": "Bern"}}}]}],
    "a result with an image": [USER, {"role": "assistant", "tool_calls": [CALL]},
                               {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}],
    "an earlier image": [{"role": "user", "content": [IMAGE]},
                         {"role": "assistant", "content": "A cat."}],
    "Mistral": [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
        {"type": "text", "text": "17."}]}],
}  # fmt: skip


async def test_fields_that_change_nothing(api: Api) -> None:
    described = Described((await api.client.get("/openapi.json")).json())
    for client, fields in HABITS.items():
        reply = await api.post(CHAT, **fields)
        assert reply.status_code == 200, (client, reply.text)
        assert described.accepts(CHAT, {"model": "fake", "messages": [USER], **fields}), client
    plain = await prompt_of(api, [USER], tools=[TOOL])
    assert await prompt_of(api, [USER], tools=[{**TOOL, "cache_control": MARK}]) == plain


async def test_histories_of_other_servers(api: Api) -> None:
    described = Described((await api.client.get("/openapi.json")).json())
    for server, messages in HISTORIES.items():
        reply = await api.post(CHAT, messages=[*messages, USER])
        assert reply.status_code == 200, (server, reply.text)
        body = {"model": "fake", "messages": messages}
        assert described.accepts(CHAT, body), server


async def test_a_refusal_is_the_assistant_s_text(api: Api) -> None:
    for server in ("a refusal", "a refusal as a part"):
        assert "No." in await prompt_of(api, [*HISTORIES[server], USER])
    both = {"role": "assistant", "content": "17.", "refusal": "No."}
    assert "No." not in await prompt_of(api, [USER, both, USER])
    assert "Hm." not in await prompt_of(api, [*HISTORIES["vLLM"], USER])


async def test_calls_and_results_from_before_tools_are_read(api: Api) -> None:
    history = HISTORIES["before tools"]
    call = {"id": "call_weather", "function": history[1]["function_call"]}
    now = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_weather", "content": "Sun."},
    ]
    prompt = await prompt_of(api, [*history, USER])
    assert prompt == await prompt_of(api, [*now, USER])
    assert "Bern" in prompt
    reply = await api.post(CHAT, messages=[{**USER, "function_call": call["function"]}])
    assert reply.json()["error"]["param"] == "messages.0.function_call"


async def test_thoughts_are_left_out_and_arguments_may_be_an_object(api: Api) -> None:
    for server in ("LiteLLM", "OpenRouter", "Mistral"):
        assert "Hm." not in await prompt_of(api, [*HISTORIES[server], USER])
    written = copy.deepcopy(HISTORIES["calls without a type"])
    written[1]["tool_calls"][0]["function"]["arguments"] = '{"place": "Bern"}'
    written[1]["tool_calls"][0]["type"] = "function"
    as_object = await prompt_of(api, [*HISTORIES["calls without a type"], USER])
    assert as_object == await prompt_of(api, [*written, USER])
    assert "Bern" in as_object


async def test_texts_of_the_responses_api_are_texts(api: Api) -> None:
    """The assistant's was a line that said it was omitted, and the user's was refused."""
    prompt = await prompt_of(api, [*HISTORIES["parts of responses"], USER])
    assert all(text in prompt for text in ("Seven?", "Eight.\nNine."))
    assert "Hm." not in prompt
    assert "omitted" not in prompt


@pytest.mark.parametrize(
    "function",
    [{}, {"arguments": None}, {"arguments": ""}, {"arguments": "null"}, {"arguments": "{}"}],
)
async def test_no_arguments_are_an_empty_object(api: Api, function: dict[str, Any]) -> None:
    call = {**CALL, "function": {"name": "f", **function}}
    prompt = await prompt_of(api, [USER, {"role": "assistant", "tool_calls": [call]}, USER])
    assert '{"name": "f", "arguments": {}}' in prompt


async def test_a_tool_without_a_type_is_a_function(api: Api) -> None:
    prompt = await prompt_of(api, [USER], tools=[TOOL])
    assert await prompt_of(api, [USER], tools=[{"function": {"name": "f"}}]) == prompt


async def prompt_of(api: Api, messages: list[dict[str, Any]], **fields: Any) -> str:
    reply = await api.post(CHAT, messages=messages, **fields)
    assert reply.status_code == 200, reply.text
    text: str = api.serving.builder.tokenizer.decode(api.core.requests[-1].prompt_ids)
    return text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"moderation": {"model": "m", "policy": {"input": {"mode": "block"}}}},
         "moderation.policy.input.mode"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{**USER, "tool_calls": []}]}, "messages.0.tool_calls"),
        ({"stream_options": {"continuous_usage_stats": 1}},
         "stream_options.continuous_usage_stats"),
    ],
)  # fmt: skip
async def test_what_would_not_be_done_is_refused(
    api: Api, fields: dict[str, Any], param: str
) -> None:
    reply = await api.post(CHAT, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert api.core.requests == []


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "image_url", "image_url": {"url": "data:" + "x" * 5000}}, "an image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "a video"),
        ({"type": "file", "file": {"file_data": "data:" + "x" * 5000}}, "a file"),
    ],
)
async def test_an_image_part_is_named_with_the_reason(
    api: Api, part: dict[str, Any], word: str
) -> None:
    content = [{"type": "text", "text": "What is this?"}, part]
    reply = await api.post(CHAT, messages=[{"role": "user", "content": content}])
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "messages.0.content.1"
    assert f"is {word}; this server's model takes text only" in error["message"]
    assert len(reply.content) < 1024


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (3, "messages.0.content"),
        ([{"type": "text"}], "messages.0.content.0.text"),
        ([{"type": "text", "text": 3}], "messages.0.content.0.text"),
        ([{"type": "other", "text": "a"}], "messages.0.content.0.type"),
        ([{"type": "refusal"}], "messages.0.content.0.refusal"),
        (["a"], "messages.0.content.0"),
    ],
)
async def test_a_wrong_part_is_named(api: Api, content: Any, param: str) -> None:
    reply = await api.post(CHAT, messages=[{"role": "user", "content": content}])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_guidellm_gets_usage_in_every_chunk(api: Api, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = data_of(await api.post(path, stream=True, stream_options=options, n=2))
    *said, last = chunks
    for index in (0, 1):
        counts = [
            c["usage"]["completion_tokens"] for c in said if c["choices"][0]["index"] == index
        ]
        assert counts == [0, 1, 2, 3, 4, 4]
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {last["usage"]["prompt_tokens"]}
    assert last["usage"]["completion_tokens"] == 8
    for chunk in chunks:
        assert chunk["usage"]["total_tokens"] == sum(list(chunk["usage"].values())[:2])
    options = {"include_usage": False, "continuous_usage_stats": True}  # vLLM's rule
    chunks = data_of(await api.post(path, stream=True, stream_options=options))
    assert not any("usage" in chunk for chunk in chunks)


# chat_template_kwargs

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}Do not think.{% endif %}"
    "{{ style | default('') }}<|assistant|>"
)


@pytest.fixture
def switched(tokenizer: Any) -> Any:
    changed = copy.copy(tokenizer)
    changed.chat_template = TEMPLATE
    return changed


async def test_qwen_s_thinking_can_be_switched_off(switched: Any) -> None:
    async with api_over(FakeCore(), switched) as api:
        off = {"chat_template_kwargs": {"enable_thinking": False, "style": "Brief."}}
        assert "Do not think.Brief." in await prompt_of(api, [USER], **off)
        assert "think" not in await prompt_of(api, [USER])
        counts = []
        for fields in ({}, off):
            body = {"model": "fake", "messages": [USER], **fields}
            tokens = (await api.client.post("/tokenize", json=body)).json()["tokens"]
            chosen = (await api.client.post("/v1/filter", json=body)).json()
            assert chosen["usage"]["prompt_tokens"] == len(tokens)
            counts.append(len(tokens))
        assert counts[0] < counts[1]


@pytest.mark.parametrize(
    "variables",
    [
        *({name: 1} for name in ("messages", "tools", "add_generation_prompt", "tokenize")),
        *({name: "<|user|>"} for name in ("bos_token", "eos_token", "image_token")),
        {str(i): i for i in range(MAX_VARIABLES + 1)},
        {"long": "x" * MAX_BYTES},
        "enable_thinking",
        [],
    ],
    ids=lambda value: str(value)[:30],
)
async def test_variables_that_the_server_sets_and_too_many_are_refused(
    api: Api, variables: Any
) -> None:
    messages = {"model": "fake", "messages": [USER], "chat_template_kwargs": variables}
    for path in (CHAT, "/v1/filter", "/tokenize"):
        reply = await api.client.post(path, json=messages)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == "chat_template_kwargs"
        assert len(reply.content) < 1024
        if isinstance(variables, dict) and len(variables) == 1 and "long" not in variables:
            assert f"the server itself sets {next(iter(variables))}" in error["message"]


async def test_a_template_that_fails_on_a_variable_is_a_400(switched: Any) -> None:
    switched.chat_template = "{{ 1 + number }}"
    async with api_over(FakeCore(), switched) as api:
        reply = await api.post(CHAT, chat_template_kwargs={"number": "x"})
        assert reply.status_code == 400
        assert "template" in reply.json()["error"]["message"]
        for path in ("/v1/filter", "/tokenize"):
            body = json.dumps({"model": "fake", "prompt": "x", "chat_template_kwargs": {}})
            reply = await api.client.post(path, content=body)
            assert reply.json()["error"]["param"] == "chat_template_kwargs"
