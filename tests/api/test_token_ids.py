"""`return_token_ids`: the ids of prompts and answers, where vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import CHAT, COMPLETIONS, FILTERED, Api, FakeCore, data_of

pytestmark = pytest.mark.anyio
TOOLS = [{"type": "function", "function": {"name": "find"}}]
ENDED = ""  # a token that ends an answer has no text


def chunks_of(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]


def ids_in(parts: list[dict[str, Any]]) -> Iterator[int]:
    for part in parts:
        yield from part.get("token_ids", [])


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=str)
async def test_ids_of_a_chat(api: Api, fields: dict[str, Any]) -> None:
    api.core.script = (FILTERED, "a", "b", ENDED)
    reply = (await api.post(CHAT, return_token_ids=True, **fields)).json()
    prompt = list(api.core.requests[0].prompt_ids)
    assert reply["prompt_token_ids"] == prompt
    assert len(prompt) == reply["usage"]["prompt_tokens"]
    assert reply["choices"][0]["token_ids"] == [1, 2, 3]
    streamed = data_of(await api.post(CHAT, return_token_ids=True, stream=True, n=2, **fields))
    for index in (0, 1):
        mine = [c for c in streamed if c["choices"] and c["choices"][0]["index"] == index]
        assert [c.get("prompt_token_ids") for c in mine] == [prompt] + [None] * (len(mine) - 1)
        parts = chunks_of(mine, index)
        assert list(ids_in(parts)) == [1, 2, 3]


async def test_ids_of_completions_are_in_their_choices(api: Api) -> None:
    api.core.script = (FILTERED, "a", ENDED)
    fields = {"prompt": ["one", "two"], "n": 2, "return_token_ids": True}
    reply = (await api.post(COMPLETIONS, **fields)).json()
    prompts = [list(request.prompt_ids) for request in api.core.requests]
    assert prompts[0] == prompts[1] != prompts[2]
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == prompts
    assert [choice["token_ids"] for choice in reply["choices"]] == [[1, 2]] * 4
    assert "prompt_token_ids" not in reply
    streamed = data_of(await api.post(COMPLETIONS, stream=True, **fields))
    for index, prompt in enumerate(prompts):
        first, *rest = chunks_of(streamed, index)
        assert first["prompt_token_ids"] == prompt
        assert list(ids_in(rest)) == [1, 2]
        assert not any("prompt_token_ids" in part for part in rest)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_there_are_none_unless_they_are_asked_for(api: Api, path: str) -> None:
    for fields in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        for stream in (False, True):
            assert "token_ids" not in (await api.post(path, stream=stream, **fields)).text


async def test_answers_go_on_with_plain_prompts_and_begun_messages_alone(
    api: Api, core: FakeCore
) -> None:
    """Some tokenizers leave out the blank with which a text begins."""
    await api.post(COMPLETIONS)
    await api.post(CHAT)
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The city is"}]
    reply = await api.post(
        CHAT, messages=said, continue_final_message=True, add_generation_prompt=False
    )
    assert reply.status_code == 200, reply.text
    assert [request.goes_on for request in core.requests] == [True, False, True]
