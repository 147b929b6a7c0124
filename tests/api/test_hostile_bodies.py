"""Bodies made to provoke: each gets a small 400, whatever it carries."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gemserve.api.requests import engine_requests
from gemserve.api.requests.chat_body import ChatBody
from gemserve.api.requests.json_body import parse_body
from gemserve.errors import RequestError
from tests.fakes import BODIES, CHAT, COMPLETIONS, Api
from tests.refusals import check_count, check_longest_stop

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "How warm is it?"}
LONG = "x" * 20_000
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [{}] * 5000}),
    (COMPLETIONS, {"prompt": ["a"] * 5000}),
    (CHAT, {"messages": [{}] * 5000}),
    (CHAT, {"messages": [{"role": LONG, "content": LONG}]}),
    (CHAT, {f"field{i}": i for i in range(5000)}),
    (CHAT, {LONG: 1}),
    (CHAT, {"messages": [{"role": "user", "content": "x", LONG: 1}]}),
    (CHAT, {"stop": [LONG] * 17}),
    (CHAT, {"temperature": LONG}),
    (CHAT, {"filter": LONG}),
    (CHAT, {"metadata": {LONG: 1}, "user": 3}),
    (CHAT, {"user": LONG}),
    (CHAT, {"metadata": {"a": LONG}}),
    (CHAT, {"metadata": {f"a{i}": "" for i in range(200)}}),
]
ECHOING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"filter": {"keep": LONG}}),
    (CHAT, {"filter": {"keep": [{}] * 5000}}),
    (CHAT, {"filter": {"keep": 10**4000}}),
    (CHAT, {"filter": {"layer": 10**4000}}),
    (CHAT, {"logit_bias": {LONG: "x"}}),
    (CHAT, {"max_tokens": 10**4000}),
    (COMPLETIONS, {"prompt": [10**4000]}),
]
CASES = [*HOSTILE, *ECHOING]


@pytest.mark.parametrize(("path", "fields"), CASES, ids=lambda v: str(v)[:40])
async def test_a_hostile_body_gets_a_small_reply(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    reply = await api.post(path, **fields)
    assert reply.status_code == 400
    assert len(reply.content) < 2048
    await api.assert_alive()


async def test_thousands_of_empty_messages_are_refused_by_their_tokens(api: Api) -> None:
    """The template's own text counts; looking for each message in all of it was quadratic."""
    messages = [{"role": "user", "content": ""}] * 9_999 + [{"role": "user", "content": "x"}]
    started_s = time.monotonic()
    reply = await api.post(CHAT, messages=messages)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - started_s < 10


@pytest.mark.parametrize("key", ["9" * 5000, "٣", "0500", "-1", "1.0", ""])
async def test_a_bias_for_no_token_id_is_a_400(api: Api, key: str) -> None:
    reply = await api.post(CHAT, logit_bias={key: 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"stop": "x" * 1001}, "stop"),
        (COMPLETIONS, {"stop": ["y", "x" * 1001]}, "stop"),
    ],
)
async def test_a_stop_string_has_a_longest_length(
    api: Api, path: str, fields: dict[str, Any], param: str
) -> None:
    await check_longest_stop(api, path, {**BODIES[path], **fields}, param)


PART = {"type": "text", "text": ""}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"messages": [USER] * 10_001}, "messages: has 10001 messages, the limit is 10000"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [PART] * 20_001}]},
            "messages: has 20001 parts, the limit is 20000",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 20_001}]},
            "messages: has 20001 parts, the limit is 20000",
        ),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt: has 129 prompts, the limit is 128"),
        (COMPLETIONS, {"prompt": [[1]] * 129}, "prompt: has 129 prompts, the limit is 128"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_too_many_of_something_is_refused_by_its_count(
    api: Api, path: str, fields: dict[str, Any], message: str
) -> None:
    await check_count(api, path, {"model": "fake", "max_tokens": 9, **fields}, message)


def test_counting_comes_before_checking(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: object) -> None:
        raise AssertionError("the messages were checked")

    monkeypatch.setattr(ChatBody, "model_validate", never)
    raw = json.dumps({"model": "fake", "messages": [USER] * 10_001}).encode()
    with pytest.raises(RequestError, match="has 10001 messages"):
        parse_body(raw, ChatBody)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            COMPLETIONS,
            {"prompt": None},
            "prompt=null: must be a text, token ids, or a list of up to",
        ),
        (COMPLETIONS, {"prompt": ["a", None]}, "prompt=['a', None]: must be a text, token ids, or"),
        (COMPLETIONS, {"model": None}, "model=null: Input should be a valid string"),
        (CHAT, {"messages": None}, "messages=null: Input should be a valid list"),
        (CHAT, {"messages": [None]}, "messages.0=null: Input should be a valid dictionary"),
    ],
)
async def test_null_in_the_wrong_place_says_what_would_be_right(
    api: Api, path: str, fields: dict[str, Any], message: str
) -> None:
    error = (await api.post(path, **fields)).json()["error"]
    assert error["message"].startswith(message)
    assert "instance of" not in error["message"]


@pytest.mark.parametrize("field", ["tools", "tool_calls"])
async def test_no_text_of_a_chat_is_tokenized_if_it_is_too_long(api: Api, field: str) -> None:
    """Only contents were counted: a tool's description of 60 MB was tokenized, in 10 GB."""
    long = "lamp " * 500_000
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    function = {"name": "f", "arguments": f'{{"a": "{long}"}}'}
    call = {"id": "1", "type": "function", "function": function}
    user = {"role": "user", "content": "Hi"}
    messages = [user, {"role": "assistant", "tool_calls": [call]}, user]
    fields = {"tools": {"tools": [tool]}, "tool_calls": {"messages": messages}}[field]
    reply = await api.client.post(CHAT, json={"model": "fake", "messages": [user], **fields})
    assert reply.status_code == 400, reply.text[:300]
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("fields", [{"prompt": ["a"] * 64, "n": 2}, {"prompt": "a", "n": 128}])
async def test_log_probabilities_have_a_limit(
    api: Api, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """128 echoed prompts with 20 alternatives for each token took 10 KB a token, 40 GB in all."""
    monkeypatch.setattr(engine_requests, "MAX_SCORES", 1 << 20)
    body = {"model": "fake", "max_tokens": 900, "logprobs": 20, **fields}
    reply = await api.client.post(COMPLETIONS, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs"), reply.text
    assert f"{128 * 21 * 900} log-probabilities" in reply.text
    assert api.core.requests == []
