"""Wrong requests: each a small 400 that names the field, and the server goes on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.fakes import CHAT, COMPLETIONS, FILTER_LAYER, Api

pytestmark = pytest.mark.anyio
NAN, INF = float("nan"), float("inf")
HUGE = 10**400
KEEPS: list[Any] = [0, 0.0, 1, 1.0, 15, 16.5, -1, -0.5, True, False, "most", "64", [], NAN, INF]
PROMPTS: list[Any] = [
    "",
    [],
    [""],
    None,
    3,
    {},
    [["a"]],
    ["a", 1],
    [-1],
    [4096],
    [True],
    [1.5],
    [[[1]]],
    [2**70],
]

# field, value, `param` of the reply
COMMON: list[tuple[str, Any, str]] = [
    ("temprature", 1, "temprature"),
    ("int", 1, "int"),
    ("literal_x", 1, "literal_x"),
    ("model", 3, "model"),
    ("model", None, "model"),
    ("temperature", "hot", "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", NAN, "temperature"),
    ("temperature", HUGE, "temperature"),
    ("top_p", -0.1, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_p", NAN, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("seed", "x", "seed"),
    ("seed", 1.5, "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 2001, "max_tokens"),
    ("max_tokens", HUGE, "max_tokens"),
    ("max_tokens", "9", "max_tokens"),
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", True, "n"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop"),
    ("stop", [str(i) for i in range(17)], "stop"),
    ("stop", [1], "stop.0"),
    ("stop", {}, "stop"),
    ("stream", "yes", "stream"),
    ("stream", 1, "stream"),
    ("stream_options", {"x": 1}, "stream_options.x"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", NAN, "frequency_penalty"),
    ("frequency_penalty", -2.1, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("min_p", 1.5, "min_p"),
    ("min_tokens", 3000, "min_tokens"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("logit_bias", {"5": 101.0}, "logit_bias.5"),
    ("logit_bias", {"x": 1.0}, "logit_bias.x"),
    ("logit_bias", {"99999999": 1.0}, "logit_bias"),
    ("ignore_eos", "no", "ignore_eos"),
    ("priority", 1.5, "priority"),
    ("metadata", {"a": NAN}, "metadata.a"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("priority", HUGE, "priority"),
    ("filter", 3, "filter"),
    ("filter", [], "filter"),
    ("filter", "snip", "filter"),
    ("filter", {"kep": 64}, "filter.kep"),
    ("filter", {"method": "snip"}, "filter.method"),
    ("filter", {"pooling": "min"}, "filter.pooling"),
    ("filter", {"return_selection": 1}, "filter.return_selection"),
    ("filter", {"return_scores": "all"}, "filter.return_scores"),
    ("filter", {"layer": 99}, "filter.layer"),
    ("filter", {"layer": FILTER_LAYER + 1}, "filter.layer"),
    ("filter", {"layer": -1}, "filter.layer"),
    ("filter", {"layer": 1.5}, "filter.layer"),
    ("filter", {"layer": True}, "filter.layer"),
    ("filter", {"layer": "last"}, "filter.layer"),
    *(("filter", {"keep": keep}, "filter.keep") for keep in KEEPS),
    ("filter", {"keep": HUGE}, "filter.keep"),
]
ONLY: dict[str, list[tuple[str, Any, str]]] = {
    COMPLETIONS: [
        *(("prompt", prompt, "prompt") for prompt in PROMPTS),
        ("echo", 1, "echo"),
        ("best_of", 2, "best_of"),
        ("logprobs", True, "logprobs"),
        ("logprobs", 21, "logprobs"),
        ("suffix", "x", "suffix"),
        ("messages", [], "messages"),
    ],
    CHAT: [
        ("messages", [], "messages"),
        ("messages", "Hi", "messages"),
        ("messages", [{"role": "user", "content": " "}], "messages"),
        ("messages", [{"role": "narrator", "content": "x"}], "messages.0.role"),
        ("messages", [{"role": "user"}], "messages.0.content"),
        ("messages", [{"role": "user", "content": None}], "messages.0.content"),
        ("messages", [{"role": "user", "content": "x", "y": 1}], "messages.0.y"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("max_completion_tokens", 2001, "max_completion_tokens"),
        ("logprobs", 1, "logprobs"),
        ("top_logprobs", 2, "top_logprobs"),
        ("top_logprobs", 21, "top_logprobs"),
        ("tools", [{"type": "function"}], "tools.0.function"),
        ("prompt", "x", "prompt"),
    ],
}


def case(path: str, field: str, value: Any, param: str) -> Any:
    return pytest.param(path, field, value, param, id=f"{path}-{field}-{value}"[:60])


CASES = [case(path, *rest) for path in (COMPLETIONS, CHAT) for rest in (*COMMON, *ONLY[path])]


@pytest.mark.parametrize(("path", "field", "value", "param"), CASES)
async def test_a_wrong_field_is_named(
    api: Api, path: str, field: str, value: Any, param: str
) -> None:
    for stream in (False, True):
        reply = await api.post(path, **{"stream": stream, field: value})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert param.split(".")[-1] in error["message"]
        assert reply.headers["x-request-id"]
        assert len(reply.content) < 2048
    assert api.core.requests == []
    await api.assert_alive()


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


A, FUNCTION = {"type": "text", "text": "a"}, {"type": "function", "function": {"name": "f"}}
WITH_TOOLS: dict[str, Any] = {"tools": [FUNCTION]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content=3: must be a text or"),
        (said(A, {"type": "text"}), "messages.0.content.1.text: required"),
        (said(A, {"type": "text", "text": 4}), "messages.0.content.1.text=4: "),
        (said(A, {**A, "txt": 1}), "messages.0.content.1.txt: unknown field"),
        (said("a"), "messages.0.content.0='a': "),
        ({"stop": 3}, "stop=3: must be a text or a list"),
        ({"stop": ["a", 1]}, "stop.1=1: "),
        *(
            ({**WITH_TOOLS, "tool_choice": choice}, f"tool_choice{message}")
            for choice, message in (
                ("any", "='any': Input should be 'none', 'auto' or 'required'"),
                (3, "=3: must be a text or an object"),
                ({}, ".type: required; must be one of function, allowed_tools"),
                ({"type": "tool", "name": "f"}, ".type='tool': must be one of function, "),
                ({"type": "function"}, ".function: required"),
                ({"type": "function", "name": "f"}, ".function: required"),
                ({"type": "function", "function": {}}, ".function.name: required"),
                ({"type": "function", "function": {"name": 3}}, ".function.name=3: "),
                ({**FUNCTION, "function": 1}, ".function=1: "),
                ({**FUNCTION, "strict": 1}, ".strict: unknown field"),
                ({"type": "allowed_tools"}, ".allowed_tools: required"),
                (
                    {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [FUNCTION]}},
                    ".allowed_tools.mode='x': ",
                ),
            )
        ),
        ({"guided_json": 3}, "guided_json=3: must be a text or an object"),
        ({"filter": {"library": [3]}}, "filter.library.0=3: "),
        (
            {"filter": {"layer": "x"}},
            "filter.layer='x': Input should be a valid integer, or 'auto'",
        ),
        ({"filter": {"return_scores": "x"}}, "filter.return_scores='x': Input should be a valid b"),
        (
            {"prediction": {"type": "content", "content": [{"type": "text"}]}},
            "prediction.content.0.text: ",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_an_error_in_a_union_names_the_client_s_field(
    api: Api, fields: dict[str, Any], message: str
) -> None:
    """Each named the union, or what only the server calls so: `tool_choice` for a name missing."""
    error = (await api.post(CHAT, **fields)).json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == re.split("[=:]", message)[0]


async def test_only_the_first_message_that_is_wrong_is_named(api: Api) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": 1}]
    reply = await api.post(CHAT, messages=messages)
    assert reply.json()["error"]["param"] == "messages.1.content"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"\xff\xfe", b"model=x", b'{"model": "\\ud8"}', b"[" * 100_000),
        b'{"seed": ' + b"1" * 5000 + b"}",
        *(b"null", b"[]", b'"text"', b"3"),
    ],
    ids=lambda raw: repr(raw[:16]),
)
async def test_what_is_no_json_object_is_a_400(api: Api, path: str, raw: bytes) -> None:
    reply = await api.client.post(path, content=raw)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] is None
    assert "None" not in error["message"]
    assert len(reply.content) < 2048
    await api.assert_alive()


@pytest.mark.parametrize(("path", "missing"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
async def test_a_missing_field_is_named(api: Api, path: str, missing: str) -> None:
    for body, param in (({"model": "fake"}, missing), ({missing: None}, "model")):
        reply = await api.client.post(path, content=json.dumps(body))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", ["other", "", ":fake", "../fake", "é🌍\n", "x" * 100_000])
async def test_another_model_is_a_404(api: Api, path: str, name: str) -> None:
    reply = await api.post(path, model=name)
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert len(reply.content) < 2048
    await api.assert_alive()


async def test_a_message_names_the_limit(api: Api) -> None:
    reply = await api.post(COMPLETIONS, filter={"keep": 3})
    assert "16" in reply.json()["error"]["message"]
    reply = await api.post(COMPLETIONS, prompt=[5, 4096])
    assert "4095" in reply.json()["error"]["message"]
