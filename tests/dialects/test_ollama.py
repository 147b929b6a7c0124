"""Ollama's endpoints: what a request means, the lines of a stream, and the form of errors."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.contract.events import Finished
from gemserve.contract.sampling import ANY_OBJECT
from tests.fakes import FILTERED, Api, FakeCore, api_over, replace_file

pytestmark = pytest.mark.anyio
CHAT, GENERATE = "/api/chat", "/api/generate"
SAID = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [SAID]},
    GENERATE: {"model": "fake", "prompt": "Hi"},
}
both = pytest.mark.parametrize("path", [CHAT, GENERATE])
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def post(api: Api, path: str, **fields: Any) -> httpx.Response:
    return await api.client.post(path, json={**BODIES[path], **fields})


async def ask(api: Api, path: str, **fields: Any) -> dict[str, Any]:
    reply = await post(api, path, stream=False, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    body: dict[str, Any] = reply.json()
    return body


async def lines_of(api: Api, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = await post(api, path, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.text.splitlines()]


def text_of(path: str, line: dict[str, Any]) -> str:
    text: str = line["message"]["content"] if path == CHAT else line["response"]
    return text


@both
async def test_an_answer(api: Api, path: str) -> None:
    reply = await ask(api, path)
    assert text_of(path, reply) == "Héllo 🌍!"
    assert (reply["model"], reply["done"], reply["done_reason"]) == ("fake", True, "stop")
    assert datetime.fromisoformat(reply["created_at"]).tzinfo is not None
    assert reply["prompt_eval_count"] == len(api.core.requests[0].prompt_ids)
    assert reply["eval_count"] == 4
    parts = sum(reply[f"{name}_duration"] for name in ("load", "prompt_eval", "eval"))
    assert 0 <= parts <= reply["total_duration"] < 60e9
    assert reply["filter"]["reason"] == "short_prompt"
    if path == CHAT:
        assert set(reply["message"]) == {"role", "content"}


@both
async def test_a_stream_is_lines_unless_it_is_switched_off(api: Api, path: str) -> None:
    for fields in ({}, {"stream": True}, {"stream": None}):
        first, *rest, last = await lines_of(api, path, **fields)
        assert first["filter"]["reason"] == "short_prompt"
        assert "".join(text_of(path, line) for line in (first, *rest, last)) == "Héllo 🌍!"
        assert [line["done"] for line in (first, *rest, last)] == [False] * (len(rest) + 1) + [True]
        assert (last["done_reason"], last["eval_count"]) == ("stop", 4)
        assert text_of(path, last) == ""
        assert not any("done_reason" in line for line in rest)


@both
async def test_a_cut_answer_says_so(api: Api, path: str) -> None:
    api.core.script = (FILTERED, "a", Finished(reason="length", completion_tokens=1))
    assert (await ask(api, path))["done_reason"] == "length"
    assert (await lines_of(api, path))[-1]["done_reason"] == "length"


@both
async def test_silence_has_lines_too(core: FakeCore, tokenizer: Any, path: str) -> None:
    """Ollama's client parses every line, also an empty one."""
    core.script = (0.3, FILTERED, 0.3, "a")
    async with api_over(core, tokenizer, keep_alive_s=0.1) as api:
        lines = await lines_of(api, path)
    assert [text_of(path, line) for line in lines].count("") >= 4
    assert "filter" not in lines[0]
    assert sum("filter" in line for line in lines) == 1


async def test_options_reach_the_engine(api: Api) -> None:
    for path in (CHAT, GENERATE):
        options = {
            **{"num_predict": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
            **{"seed": 3, "stop": ["x"], "repeat_penalty": 1.1, "presence_penalty": 0.5},
            **{"frequency_penalty": 0.25, "num_ctx": 4096, "num_gpu": -1, "mirostat": 0},
        }
        await ask(api, path, options=options, keep_alive="5m", think=False)
        sampling = api.core.requests[-1].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
        assert (sampling.top_k, sampling.min_p, sampling.seed) == (5, 0.1, 3)
        assert (sampling.stop, sampling.repetition_penalty) == (("x",), 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
        for unlimited in (-1, -2, None):
            await ask(api, path, options={"num_predict": unlimited}, keep_alive=-1, think="high")
            assert api.core.requests[-1].sampling.max_tokens > 500


@both
async def test_the_filter_and_its_report(api: Api, path: str) -> None:
    long = "The river runs. " * 40
    fields = {"messages": [{"role": "user", "content": long}]} if path == CHAT else {"prompt": long}
    reply = await ask(api, path, filter={"method": "gemfilter", "keep": 32}, **fields)
    assert (reply["filter"]["method"], reply["filter"]["kept_tokens"]) == ("gemfilter", 32)
    assert api.core.requests[0].filter.keep == 32
    headers = (await post(api, path, filter="none", **fields)).headers
    assert json.loads(headers["X-Gemserve-Filter"])["reason"] == "disabled"


@both
async def test_formats(api: Api, path: str) -> None:
    for form, grammar in (("json", ANY_OBJECT), ("", None), (None, None)):
        await ask(api, path, format=form)
        assert api.core.requests[-1].grammar == grammar
    await ask(api, path, format=SCHEMA)
    held = api.core.requests[-1].grammar
    assert held is not None
    assert json.loads(held.text)["required"] == ["a"]


async def test_calls_and_their_results(api: Api) -> None:
    api.core.script = (FILTERED, *(CALL[at : at + 7] for at in range(0, len(CALL), 7)))
    reply = await ask(api, CHAT, tools=[WEATHER])
    [call] = reply["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (reply["message"]["content"], reply["done_reason"]) == ("", "stop")
    lines = await lines_of(api, CHAT, tools=[WEATHER])
    calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert [made["function"] for [made] in calls] == [call["function"]]
    assert not any(line["message"]["content"] for line in lines)
    said = [
        SAID,
        reply["message"],
        {"role": "tool", "content": "21 degrees", "tool_name": "weather"},
    ]
    api.core.script = (FILTERED, "It is warm.")
    assert (await ask(api, CHAT, messages=said, tools=[WEATHER]))["message"]["content"]
    prompt = api.serving.builder.tokenizer.decode(api.core.requests[-1].prompt_ids)
    assert "Paris" in prompt
    assert "21 degrees" in prompt


async def test_messages_of_other_servers_are_taken(api: Api) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {**SAID, "images": [], "thinking": None},
        {"role": "assistant", "content": "Yes?", "thinking": "Hm.", "tool_calls": None},
        SAID,
    ]
    await ask(api, CHAT, messages=said)
    prompt = api.serving.builder.tokenizer.decode(api.core.requests[-1].prompt_ids)
    assert "Be brief." in prompt
    assert "Hm." not in prompt


async def test_generate_s_prompt_is_a_chat(api: Api) -> None:
    await ask(api, GENERATE, prompt="Where?", system="Be brief.")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    await ask(api, CHAT, messages=said)
    first, second = (list(request.prompt_ids) for request in api.core.requests)
    assert first == second


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    *((path, {"images": ["aGk="]}, 400, "images=") for path in (GENERATE,)),
    (CHAT, {"messages": [{**SAID, "images": ["aGk="]}]}, 400, "messages.0.images="),
    (
        CHAT,
        {"messages": [{"role": "user", "content": " "}]},
        400,
        "messages: must not all be empty",
    ),
    (CHAT, {"messages": [{"role": "bot", "content": "x"}]}, 400, "messages.0.role="),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools.0.function"),
    (CHAT, {"tools": [WEATHER, WEATHER]}, 400, "tools: 2 functions have the name weather"),
    (GENERATE, {"prompt": " "}, 400, "prompt: must not all be empty"),
    (GENERATE, {"prompt": "a " * 9000}, 400, "prompt too long; exceeded max context length by"),
    (GENERATE, {"suffix": "x"}, 400, "suffix="),
    (GENERATE, {"template": "x"}, 400, "template="),
    (GENERATE, {"raw": True}, 400, "raw="),
    (GENERATE, {"context": [1]}, 400, "context="),
    *(
        (path, fields, status, said)
        for path in BODIES
        for fields, status, said in (
            ({"model": "other"}, 404, "other"),
            ({"stream": "yes"}, 400, "stream='yes'"),
            ({"nonsense": 1}, 400, "nonsense: unknown field"),
            ({"options": {"nonsense": 1}}, 400, "options.nonsense: unknown field"),
            ({"options": {"temperature": 9}}, 400, "options.temperature=9"),
            ({"options": {"num_predict": 0}}, 400, "options.num_predict=0"),
            ({"options": {"num_predict": 5000}}, 400, "prompt too long; exceeded max context"),
            ({"options": {"mirostat": 2}}, 400, "options.mirostat=2"),
            ({"options": {"stop": 3}}, 400, "options.stop=3"),
            ({"format": "yaml"}, 400, "format="),
            ({"format": {"type": "wrong"}}, 400, "format: "),
            ({"logprobs": True}, 400, "logprobs="),
            ({"filter": {"keep": 3}}, 400, "filter.keep=3"),
            ({"adapter": "none"}, 404, "adapter"),
        )
    ),
]


@pytest.mark.parametrize(("path", "fields", "status", "said"), WRONG, ids=lambda v: str(v)[:60])
async def test_errors_name_the_field_in_ollama_s_form(
    api: Api, path: str, fields: dict[str, Any], status: int, said: str
) -> None:
    for stream in ({}, {"stream": False}):
        reply = await api.client.post(path, json={**BODIES[path], **stream, **fields})
        assert reply.status_code == status, reply.text
        assert list(reply.json()) == ["error"]
        message = reply.json()["error"]
        assert message.startswith(said) or (status == 404 and said in message), message
    assert api.core.requests == []


@both
async def test_a_failure_is_an_error_once(api: Api, path: str) -> None:
    api.core.script = (FILTERED, "one", ValueError("boom"))
    reply = await post(api, path, stream=False)
    assert reply.status_code == 500
    assert "boom" in reply.json()["error"]
    *_, last = await lines_of(api, path)
    assert list(last) == ["error"]
    assert "boom" in last["error"]


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/api/pull", "other models"),
        ("DELETE", "/api/delete", "other models"),
        ("POST", "/api/embed", "embeddings"),
        ("GET", "/api/ps", "/api/tags"),
        ("GET", "/api/nowhere", "/api/chat"),
        ("GET", "/api", "/api/chat"),
    ],
)
async def test_other_paths_say_what_is_served(api: Api, method: str, path: str, said: str) -> None:
    reply = await api.client.request(method, path)
    assert reply.status_code == 404
    assert list(reply.json()) == ["error"]
    assert said in reply.json()["error"]


async def test_a_wrong_method(api: Api) -> None:
    for method, path, allowed in (("GET", CHAT, "POST"), ("POST", "/api/tags", "GET, HEAD")):
        reply = await api.client.request(method, path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
        assert list(reply.json()) == ["error"]


async def test_models(api: Api) -> None:
    assert (await api.client.get("/api/version")).json()["version"].count(".") == 2
    [model] = (await api.client.get("/api/tags")).json()["models"]
    assert model["name"] == model["model"] == "fake"
    shown = (await api.client.post("/api/show", json={"model": "fake", "verbose": True})).json()
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 2000
    assert shown["capabilities"] == ["completion", "tools"]
    for body, status in (({"model": "other"}, 404), ({}, 400), ({"model": "fake", "x": 1}, 400)):
        reply = await api.client.post("/api/show", json=body)
        assert reply.status_code == status
        assert list(reply.json()) == ["error"]


async def test_keys_quotas_and_hosts_apply(tokenizer: Any, tmp_path: Path) -> None:
    keys = replace_file(tmp_path / "keys", "sk-a")
    async with api_over(
        FakeCore(), tokenizer, api_key_file=keys, requests_per_minute=2, max_body_bytes=1000
    ) as api:
        for path in ("/api/tags", "/api/version", "/api/none"):
            reply = await api.client.get(path)
            assert reply.status_code == 401
            assert list(reply.json()) == ["error"]
            assert reply.headers["www-authenticate"] == "Bearer"
        key = {"Authorization": "Bearer sk-a"}
        statuses = []
        for content in (b"{", b" " * 1001, b"{"):
            reply = await api.client.post(CHAT, content=content, headers=key)
            statuses.append(reply.status_code)
            assert list(reply.json()) == ["error"]
            assert reply.headers["x-request-id"]
        assert statuses == [400, 413, 429]
        assert int(reply.headers["retry-after"]) >= 1
    async with api_over(FakeCore(), tokenizer) as api:
        reply = await api.client.get("/api/tags", headers={"Host": "evil.example"})
        assert (reply.status_code, list(reply.json())) == (403, ["error"])


async def test_a_full_queue(tokenizer: Any) -> None:
    async with api_over(FakeCore(), tokenizer, max_queue=0) as api:
        for path in BODIES:
            reply = await post(api, path)
            assert reply.status_code == 503
            assert list(reply.json()) == ["error"]
            assert int(reply.headers["retry-after"]) >= 1


async def test_the_tag_of_the_newest_version_is_no_adapter(api: Api) -> None:
    """Ollama's clients add it to names, and were told that the adapter "latest" does not exist."""
    asked = {"model": "fake:latest", "messages": [{"role": "user", "content": "Hi"}]}
    reply = await api.client.post("/api/chat", json={**asked, "stream": False})
    assert reply.status_code == 200, reply.text
    shown = await api.client.post("/api/show", json={"model": "fake:latest"})
    assert shown.status_code == 200, shown.text


async def test_head_needs_a_key_too(tokenizer: Any, tmp_path: Path) -> None:
    keys = replace_file(tmp_path / "keys", "sk-a")
    async with api_over(FakeCore(), tokenizer, api_key_file=keys) as api:
        assert (await api.client.head("/api/tags")).status_code == 401
