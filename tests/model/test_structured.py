"""The built-in model held to schemas: whatever it draws, the answer parses and validates."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.contract.sampling import Grammar
from gemserve.decoding.grammar import GrammarFailed, Grammars, Matcher
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from tests.fakes import data_of, text_of
from tests.schemas import random_schema

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("use_compiled_step")]
NUM_SCHEMAS = int(os.environ.get("GEMSERVE_TEST_SCHEMAS", "12"))
STRING_LIST = {"type": "array", "items": {"type": "string"}, "minItems": 100}


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core(ModelConfig(device="cpu"), EngineConfig(kv_memory_bytes=64 << 20))


@pytest.fixture
async def client(core: Core) -> AsyncIterator[httpx.AsyncClient]:
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    transport = httpx.ASGITransport(create_app(serving))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=60
    ) as opened:
        yield opened
    serving.engine.stop()


def chat(response_format: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me about the harbour."}]
    return {
        "model": "builtin",
        "messages": messages,
        "response_format": response_format,
        "max_tokens": 1000,
        **fields,
    }


def held_to(schema: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat(wanted, **fields)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """The answer's text, and why it ended."""
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


async def test_random_schemas_whole_and_streamed(client: httpx.AsyncClient) -> None:
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(seed)
        body = held_to(schema, temperature=1, seed=seed)
        text, reason = await ask(client, body)
        assert reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)
        if seed % 4:
            continue
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
        chunks = data_of(streamed)
        assert text_of(chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_plain_completions_take_it_too(client: httpx.AsyncClient) -> None:
    body = held_to({"enum": [[1, 2], "x"]})
    del body["messages"]
    reply = await client.post("/v1/completions", json={**body, "prompt": "The harbour"})
    assert json.loads(reply.json()["choices"][0]["text"]) in ([1, 2], "x")


async def test_any_object(client: httpx.AsyncClient) -> None:
    for seed in range(5):
        text, reason = await ask(client, chat({"type": "json_object"}, seed=seed, max_tokens=60))
        assert text.startswith("{")
        assert reason == "length" or isinstance(json.loads(text), dict)


async def test_an_answer_without_bound_is_cut(client: httpx.AsyncClient) -> None:
    text, reason = await ask(client, held_to(STRING_LIST, max_tokens=12))
    assert reason == "length"
    assert text.startswith('["')


async def test_the_last_token_may_be_the_one_that_completes_it(client: httpx.AsyncClient) -> None:
    whole = await client.post("/v1/chat/completions", json=held_to({"enum": ["abcdefgh"]}))
    count = whole.json()["usage"]["completion_tokens"]
    for limit, expected in ((count, "stop"), (count - 1, "length")):
        _, reason = await ask(client, held_to({"enum": ["abcdefgh"]}, max_tokens=limit, seed=0))
        assert reason == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True},
        {"min_tokens": 300},
        {"stop_token_ids": [0, 1, 2]},
        {"logit_bias": {"2": 100}},
        {"logit_bias": {"2": -100}, "frequency_penalty": 2},
        {"temperature": 0},
        {"temperature": 2, "top_k": 1},
        {"filter": {"method": "none"}},
    ],
    ids=str,
)
async def test_no_option_keeps_a_complete_answer_from_ending(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    schema = {"type": "array", "items": {"enum": ["é", 1]}, "minItems": 2, "maxItems": 4}
    text, reason = await ask(client, held_to(schema, **fields))
    assert reason == "stop"
    jsonschema.validate(json.loads(text), schema)


async def test_ignore_eos_ends_where_more_would_be_allowed(client: httpx.AsyncClient) -> None:
    """An integer's end is never the only thing allowed."""
    body = held_to({"type": "integer"}, ignore_eos=True, logit_bias={"2": 100})
    text, reason = await ask(client, body)
    assert reason == "stop"
    assert isinstance(json.loads(text), int)


async def test_a_stop_string_still_stops(client: httpx.AsyncClient) -> None:
    assert await ask(client, held_to({"const": "one two"}, stop="two")) == ('"one ', "stop")


async def test_requests_together_are_held_to_their_own_schemas(client: httpx.AsyncClient) -> None:
    schemas = [{"enum": [[i] * 5]} for i in range(6)]
    free = {**chat(None), "max_tokens": 5}
    *held, _ = await asyncio.gather(*(ask(client, held_to(s)) for s in schemas), ask(client, free))
    assert [json.loads(text) for text, _ in held] == [[i] * 5 for i in range(6)]


async def test_a_matcher_that_fails_ends_its_request_alone(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Matcher):
        def advance(self, token: int) -> None:
            raise GrammarFailed("a limit")

    def matcher(self: Grammars, grammar: Grammar) -> Matcher:
        made = original(self, grammar)
        return Failing(made._matcher) if "bad" in grammar.text else made

    original = Grammars.matcher
    monkeypatch.setattr(Grammars, "matcher", matcher)
    bodies = [held_to({"const": [text, 1, 2, 3]}) for text in ("ok", "bad", "fine")]
    first, bad, last = await asyncio.gather(
        *(client.post("/v1/chat/completions", json=body) for body in bodies)
    )
    assert (first.status_code, last.status_code) == (200, 200)
    assert bad.status_code == 500
    assert "a limit" in bad.json()["error"]["message"]
    assert (await ask(client, held_to({"const": 1})))[0] == "1"


async def test_forced_tool_calls_parse_and_validate(client: httpx.AsyncClient) -> None:
    schemas = {f"function_{i}": random_schema(1000 + i) for i in range(2)}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    named = {"type": "function", "function": {"name": "function_1"}}
    for seed in range(20):
        choice = named if seed % 4 == 0 else "required"
        body = chat(None, tools=tools, tool_choice=choice, temperature=1, seed=seed)
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        said = reply.json()["choices"][0]
        assert said["finish_reason"] == ("stop" if choice is named else "tool_calls")
        (call,) = said["message"]["tool_calls"]
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
        assert choice is not named or function["name"] == "function_1"
        if seed % 5:
            continue
        chunks = data_of(await client.post("/v1/chat/completions", json={**body, "stream": True}))
        deltas = [
            delta["function"]
            for chunk in chunks
            for delta in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert deltas[0]["name"] == function["name"]
        assert "".join(delta["arguments"] for delta in deltas) == function["arguments"]


async def test_a_call_that_is_cut_keeps_its_name(client: httpx.AsyncClient) -> None:
    parameters = {"type": "object", "properties": {"x": STRING_LIST}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = chat(None, tools=tools, tool_choice="required", max_tokens=40)
    said = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert said["finish_reason"] == "length"
    assert said["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert said["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"x"')
