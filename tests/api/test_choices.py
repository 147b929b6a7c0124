"""Several choices in one reply: of several prompts, and several of each."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
TEXT = "Héllo 🌍!"


def text_by_index(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or "")
    return texts


@both
async def test_n_choices_count_the_prompt_once(api: Api, path: str) -> None:
    body = (await api.post(path, n=3, seed=7)).json()
    assert text_by_index([body]) == dict.fromkeys(range(3), TEXT)
    num_prompt = len(api.core.requests[0].prompt_ids)
    assert 0 < body["filter"]["protected_tokens"] <= num_prompt
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 12,
        "total_tokens": num_prompt + 12,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "kept_tokens": num_prompt,
            "protected_tokens": body["filter"]["protected_tokens"],
        },
    }
    assert body["filter"]["prompt_tokens"] == num_prompt
    assert [r.sampling.seed for r in api.core.requests] == [7, 8, 9]
    assert len({r.request_id for r in api.core.requests}) == 3


@both
async def test_n_choices_in_a_stream(api: Api, path: str) -> None:
    options = {"include_usage": True}
    chunks = data_of(await api.post(path, n=2, stream=True, stream_options=options))
    assert text_by_index(chunks) == {0: TEXT, 1: TEXT}
    reports = [c for c in chunks if "filter" in c]
    assert [c["choices"][0]["index"] for c in reports] == [0, 1]
    for index in (0, 1):
        own = [x for c in chunks for x in c["choices"] if x["index"] == index]
        assert [x["finish_reason"] for x in own] == [None] * (len(own) - 1) + ["stop"]
    assert [c["usage"] is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prompts", [["Hello", "there you are"], [[9, 10], [11, 12, 13]]])
async def test_several_prompts_have_a_report_each(api: Api, prompts: list[Any]) -> None:
    reply = await api.post(COMPLETIONS, prompt=prompts, n=2)
    body = reply.json()
    lengths = [len(r.prompt_ids) for r in api.core.requests]
    assert lengths[0] == lengths[1] != lengths[2] == lengths[3]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [f["prompt_tokens"] for f in body["filter"]] == lengths[::2]
    assert body["usage"]["prompt_tokens"] == sum(lengths[::2])
    assert reply.headers["X-Gemserve-Prompt-Tokens"] == str(sum(lengths[::2]))


async def test_a_list_of_one_prompt_is_one_prompt(api: Api) -> None:
    body = (await api.post(COMPLETIONS, prompt=["Hello there"])).json()
    assert isinstance(body["filter"], dict)
    listed = (await api.post(COMPLETIONS, prompt=[[7, 8]])).json()
    assert listed["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["Hello", ""]}, "prompt.1"),
        ({"prompt": [[1], [-1]]}, "prompt.1"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"n": 5}, "n"),  # more than the queue ever holds
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "filter": "sieve"}, "filter"),
    ],
)
async def test_what_cannot_be_chosen_is_named(api: Api, fields: dict[str, Any], param: str) -> None:
    reply = await api.post(COMPLETIONS, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert not api.core.requests


@pytest.mark.parametrize("filter_", [None, "none", {"method": "none"}])
async def test_scoring_may_say_that_it_filters_nothing(api: Api, filter_: Any) -> None:
    reply = await api.post(COMPLETIONS, echo=True, logprobs=1, filter=filter_)
    assert reply.status_code == 200


async def test_all_choices_are_queued_or_none(tokenizer: Any) -> None:
    gate = threading.Event()
    async with api_over(FakeCore(FILTERED, gate, "x"), tokenizer) as api:
        first = asyncio.create_task(api.post(COMPLETIONS, n=3))
        await wait_for_async(lambda: api.serving.engine.num_waiting == 2)
        full = await api.post(COMPLETIONS, n=3)
        assert full.status_code == 503
        assert full.json()["error"]["code"] == "queue_full"
        gate.set()
        assert (await first).status_code == 200
        assert len(api.core.requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_one_choice_that_fails_ends_the_reply(tokenizer: Any, stream: bool) -> None:
    core = FakeCore(FILTERED, "a", RuntimeError("no memory"))
    async with api_over(core, tokenizer) as api:
        reply = await api.post(COMPLETIONS, n=2, stream=stream)
        if stream:
            assert data_of(reply)[-1]["error"]["code"] == "engine_error"
        else:
            assert reply.status_code == 500
        await wait_for_async(lambda: core.is_idle)
