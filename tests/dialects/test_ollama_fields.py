"""Every field and example of the page on Ollama's protocol is taken, or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gemserve_dialects.ollama.messages import OllamaMessage, chat_messages
from tests.fakes import Api

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
SKY = {"role": "user", "content": "why is the sky blue?"}
OBJECT = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The location"},
                "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "format"],
        },
    },
}
# all of them, as the page sets them, but for other ways to draw
OPTIONS: Json = {
    **{"num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0},
    **{"repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5},
    **{"frequency_penalty": 1.0, "mirostat_tau": 0.8, "mirostat_eta": 0.6, "numa": False},
    **{"penalize_newline": True, "stop": ["\n", "user:"], "num_ctx": 1024, "num_batch": 2},
    **{"num_gpu": 1, "main_gpu": 0, "low_vram": False, "vocab_only": False, "use_mmap": True},
    **{"use_mlock": False, "num_thread": 8, "mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0},
    **{"f16_kv": True, "logits_all": False},
}
HISTORY = [
    SKY,
    {"role": "assistant", "content": "due to rayleigh scattering."},
    {"role": "user", "content": "how is that different than mie scattering?"},
]
BOTH: list[Json] = [
    *({name: None} for name in ("format", "options", "stream", "think", "keep_alive")),
    *({name: None} for name in ("truncate", "shift", "logprobs", "top_logprobs")),
    *({"stream": value} for value in (True, False)),
    *({"format": value} for value in ("json", "", OBJECT)),
    *({"think": value} for value in (True, False, "low", "medium", "high")),
    *({"truncate": value, "shift": value} for value in (True, False)),
    *({"keep_alive": value} for value in (0, -1, 300, 1.5, "5m", "1h30m", "-1m", "-1", "1.5h")),
    *({"keep_alive": value} for value in ("0s", "+5m", ".5h", "10\u00b5s", "10\u03bcs")),
    {"logprobs": False, "top_logprobs": 0},
    {"options": OPTIONS},
    {"options": {"seed": 101, "temperature": 0}},
    {"options": {"stop": "user:"}},
    {"options": dict.fromkeys(OPTIONS)},
]
TAKEN: list[tuple[str, Json]] = [
    *((path, fields) for path in (CHAT, GENERATE) for fields in BOTH),
    *((GENERATE, {name: None}) for name in ("system", "suffix", "images", "template", "raw")),
    (GENERATE, {"context": None}),
    (GENERATE, {"suffix": "", "images": [], "template": "", "context": [], "raw": False}),
    (GENERATE, {"system": "Be brief."}),
    (CHAT, {"messages": HISTORY}),
    (CHAT, {"tools": [WEATHER]}),
    (CHAT, {"tools": []}),
    (CHAT, {"tools": None}),
]


async def sent(api: Api, path: str, fields: Json) -> httpx.Response:
    asked: Json = {"messages": [SKY]} if path == CHAT else {"prompt": SKY["content"]}
    return await api.client.post(path, json={"model": "fake", **asked, **fields})


@pytest.mark.parametrize(("path", "fields"), TAKEN, ids=lambda value: json.dumps(value)[:60])
async def test_a_field_is_taken(api: Api, path: str, fields: Json) -> None:
    """`vocab_only`, `truncate`, `shift` and a single stop text were unknown or wrong."""
    reply = await sent(api, path, fields)
    assert reply.status_code == 200, reply.text
    assert json.loads(reply.text.splitlines()[-1])["done_reason"] == "stop"


def called(*functions: Json) -> Json:
    return {"role": "assistant", "tool_calls": [{"function": each} for each in functions]}


async def prompt_of(api: Api, *said: Json) -> str:
    reply = await sent(api, CHAT, {"messages": [SKY, *said]})
    assert reply.status_code == 200, reply.text
    text: str = api.serving.builder.tokenizer.decode(api.core.requests[-1].prompt_ids)
    return text


async def test_roles_and_names_of_clients(api: Api) -> None:
    """The role and `name`, which Ollama's examples had before `tool_name`, were refused."""
    developer = {"role": "developer", "content": "Be brief."}
    assert "Be brief." in await prompt_of(api, developer, SKY)
    for name in ("name", "tool_name"):
        result = {"role": "tool", "content": "17 degrees", name: "f"}
        assert "17 degrees" in await prompt_of(api, called({"name": "f", "arguments": {}}), result)
    assert await prompt_of(api, {**SKY, "name": "Ann"}) == await prompt_of(api, SKY)


@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}])
async def test_a_call_without_arguments(api: Api, function: Json) -> None:
    """Ollama's own replies have `arguments: null` there."""
    assert '{"name": "f", "arguments": {}}' in await prompt_of(
        api, called({"name": "f"} | function)
    )
    text = called({"name": "f", "arguments": '{"a": 1}'})
    assert await prompt_of(api, text) == await prompt_of(
        api, called({"name": "f", "arguments": {"a": 1}})
    )


def test_results_without_ids_are_those_of_the_calls_that_they_name() -> None:
    """Each turn's calls had the same ids, and results had none."""
    calls = called({"name": "f", "arguments": {}}, {"name": "g", "arguments": {}})
    results = [{"role": "tool", "content": "x", "tool_name": name} for name in ("g", "f")]
    said = [OllamaMessage.model_validate(each) for each in (calls, *results, calls, *results)]
    plain = [message.plain for message in chat_messages(said)]
    ids = [[call["id"] for call in plain[turn]["tool_calls"]] for turn in (0, 3)]
    assert len({*ids[0], *ids[1]}) == 4
    for turn, (f, g) in zip((0, 3), ids, strict=True):
        assert [each["tool_call_id"] for each in plain[turn + 1 : turn + 3]] == [g, f]


async def test_one_stop_text_is_a_list_of_one(api: Api) -> None:
    await sent(api, CHAT, {"options": {"stop": "user:"}})
    assert api.core.requests[0].sampling.stop == ("user:",)


OFF = "must be off: tokens are drawn by temperature, top_k, top_p, min_p and the penalties"
AS_IT_IS = "not served here; /v1/completions continues a text as it is"
NO_LOGPROBS = "not served here; /v1/chat/completions has log-probabilities"
LEVELS = 'must be true, false, "low", "medium" or "high"'
SECONDS = 'must be a number of seconds, or a duration such as "5m" or "1h30m"'
IMAGE = "is not read: this server takes text only"
REFUSED: list[tuple[str, Json, str]] = [
    (GENERATE, {"suffix": "    return result"}, "suffix='    return result': not supported"),
    (GENERATE, {"images": ["iVBO"]}, f"images=['iVBO']: {IMAGE}"),
    (CHAT, {"messages": [{**SKY, "images": ["iVBO"]}]}, f"messages.0.images=1 images: {IMAGE}"),
    (GENERATE, {"raw": True}, f"raw=True: {AS_IT_IS}"),
    (GENERATE, {"template": "{{ .Prompt }}"}, f"template='{{{{ .Prompt }}}}': {AS_IT_IS}"),
    (GENERATE, {"context": [1, 2]}, "context=[1, 2]: not served here; /api/chat takes the"),
    (GENERATE, {"prompt": ["a"]}, "prompt=['a']: must be a text"),
    *(
        (path, fields, said)
        for path in (CHAT, GENERATE)
        for fields, said in (
            ({"options": {"mirostat": 1}}, f"options.mirostat=1: {OFF}"),
            ({"options": {"typical_p": 0.7}}, f"options.typical_p=0.7: {OFF}"),
            ({"options": {"tfs_z": 0.5}}, f"options.tfs_z=0.5: {OFF}"),
            ({"logprobs": True}, f"logprobs=True: {NO_LOGPROBS}"),
            ({"top_logprobs": 3}, f"top_logprobs=3: {NO_LOGPROBS}"),
            ({"think": "much"}, f"think='much': {LEVELS}"),
            ({"keep_alive": "soon"}, f"keep_alive='soon': {SECONDS}"),
            ({"keep_alive": ""}, f"keep_alive='': {SECONDS}"),
            ({"keep_alive": True}, f"keep_alive=True: {SECONDS}"),
            ({"format": "xml"}, "format='xml': must be \"json\" or a JSON schema"),
            ({"format": []}, 'format=[]: must be "json" or a JSON schema'),
            ({"options": {"stop": [3]}}, "options.stop.0=3: "),
            ({"options": {"stop": 3}}, "options.stop=3: must be a text or a list"),
            (
                {"options": {"num_predict": -5}},
                "options.num_predict=-5: Input should be greater than or equal to 1, or -1 or -2",
            ),
        )
    ),
]


@pytest.mark.parametrize(("path", "fields", "said"), REFUSED, ids=lambda value: str(value)[:60])
async def test_a_field_is_refused_with_a_reason(
    api: Api, path: str, fields: Json, said: str
) -> None:
    reply = await sent(api, path, fields)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(said)
    assert api.core.requests == []


async def test_a_model_is_shown(api: Api) -> None:
    more: tuple[Json, ...] = (
        {},
        {"verbose": True},
        {"verbose": None},
        {"options": {}, "system": ""},
    )
    for model in ({"model": "fake"}, {"name": "fake"}, {"name": "fake:latest", "model": ""}):
        for fields in more:
            reply = await api.client.post(SHOW, json={**model, **fields})
            assert reply.status_code == 200, reply.text
    for nothing in ({}, {"model": None}):
        reply = await api.client.post(SHOW, json=nothing)
        assert (reply.status_code, reply.json()) == (400, {"error": "model: required"})
