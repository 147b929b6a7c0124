"""Which part of a chat differs first from what its key has sent before."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gemserve.api.requests.first_difference import EarlierPrompts, digests_of
from gemserve.contract.filter_options import FilterParams
from tests.fakes import CHAT, MODEL, Api

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
SYSTEM = {"role": "system", "content": "You are brief."}
FIRST = {"role": "user", "content": "Here is a long document."}
REPLY = {"role": "assistant", "content": "I have read it."}
SECOND = {"role": "user", "content": "What does it say?"}
TALK = [SYSTEM, FIRST, REPLY, SECOND]
PARAMS = FilterParams(method="sieve", keep=256)


def tool(name: str, description: str = "Does something.") -> Json:
    return {"type": "function", "function": {"name": name, "description": description}}


TOOLS = [tool("a"), tool("b")]


async def differences(api: Api, *chats: Json) -> list[str | None]:
    found = []
    for chat in chats:
        reply = await api.client.post(CHAT, json={"model": MODEL, **chat})
        assert reply.status_code == 200, reply.text
        said = reply.json()
        details = said["usage"]["prompt_tokens_details"]
        assert details.get("first_difference") == api.core.requests[-1].first_difference
        found.append(details.get("first_difference"))
    return found


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, None),
        ({"messages": [*TALK, REPLY, SECOND]}, None),
        ({"max_tokens": 3, "temperature": 0.5, "filter": {"keep": 100}}, None),
        ({"messages": [{**SYSTEM, "content": "You are long."}, *TALK[1:]]}, "system"),
        ({"messages": [SYSTEM, SYSTEM, *TALK[1:]]}, "system"),
        ({"messages": [SYSTEM, {**FIRST, "content": "Another one."}, REPLY, SECOND]}, "message 1"),
        ({"messages": [*TALK[:3], {**SECOND, "content": "And why?"}]}, "message 3"),
        ({"tools": TOOLS[::-1]}, "tools_order"),
        ({"tools": [*TOOLS, tool("c")]}, "tools"),
        ({"tools": [tool("a", "Does another thing."), TOOLS[1]]}, "tools"),
        ({"tools": None}, "tools"),
        ({"tools": [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}, TOOLS[1]]}, None),
        ({"cache_salt": "another"}, "cache_salt"),
        ({"filter": "none"}, "filter.method"),
        ({"filter": {"layer": 1}}, "filter.layer"),
        ({"filter": {"window": 512}}, "filter.window"),
        ({"chat_template_kwargs": {"today": "Friday"}}, "chat_template_kwargs"),
    ],
)
async def test_the_first_part_that_differs_is_named(api: Api, changes: Json, name: str) -> None:
    chat = {"messages": TALK, "tools": TOOLS}
    changed = {key: value for key, value in {**chat, **changes}.items() if value is not None}
    assert await differences(api, chat, changed) == [None, name]


async def test_the_most_similar_earlier_chat_counts(api: Api) -> None:
    other = {"messages": [{**SYSTEM, "content": "Another assistant."}, FIRST]}
    last = {"messages": [*TALK[:3], {**SECOND, "content": "And why?"}]}
    assert await differences(api, {"messages": TALK}, other, last) == [None, "system", "message 3"]


async def test_a_stream_says_it_too_and_so_does_the_log(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    await differences(api, {"messages": TALK})
    caplog.set_level(logging.INFO, logger="gemserve.access")
    chat = {"messages": [FIRST], "stream": True, "stream_options": {"include_usage": True}}
    reply = await api.client.post(CHAT, json={"model": MODEL, **chat})
    assert '"first_difference": "system"' in reply.text
    assert caplog.messages[-1].endswith("first difference: system")


async def test_a_plain_prompt_has_no_parts(api: Api) -> None:
    for text in ("a b c", "d e f"):
        body = {"model": MODEL, "prompt": text}
        reply = await api.client.post("/v1/completions", json=body)
        assert "first_difference" not in reply.json()["usage"]["prompt_tokens_details"]


def test_keys_are_not_compared_and_few_are_remembered() -> None:
    earlier = EarlierPrompts()

    def difference(tenant: bytes, *messages: Json) -> str | None:
        return earlier.difference(tenant, digests_of(messages, (), PARAMS, None, None))

    assert difference(b"alice", *TALK) is None
    assert difference(b"bob", SYSTEM, SECOND) is None
    assert difference(b"alice", SYSTEM, SECOND) == "message 1"
    assert difference(b"alice", *TALK[:3], REPLY) == "message 3"
    for number in range(5000):
        difference(str(number).encode(), FIRST)
    assert difference(b"bob", FIRST) is None, "it was forgotten"
    assert len(earlier._ends) <= 40_000


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[::-1]])
def test_the_other_order_of_tools_is_new_whichever_came_first(tools: list[Json]) -> None:
    earlier = EarlierPrompts()
    for given, name in ((tools, None), (tools[::-1], "tools_order"), (tools, None)):
        assert earlier.difference(b"", digests_of(TALK, given, PARAMS, None, None)) == name
