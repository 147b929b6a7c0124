"""`/v1/filter`: what would be kept, without an answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gemserve.contract.filter_options import FilterParams
from tests.fakes import CONTEXT, FILTER_LAYER, MODEL, Api

pytestmark = pytest.mark.anyio
PATH = "/v1/filter"


async def post(api: Api, **body: Any) -> httpx.Response:
    return await api.client.post(PATH, json={"model": MODEL, **body})


@pytest.mark.parametrize("is_chat", [False, True])
async def test_the_reply_has_report_text_and_usage(api: Api, is_chat: bool) -> None:
    said = "The river runs past the houses. " * 40
    prompt = {"messages": [{"role": "user", "content": said}]} if is_chat else {"prompt": said}
    reply = await post(api, **prompt, filter={"keep": 32})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert set(body) == {"filter", "text", "usage"}
    (request,) = api.core.requests
    assert request.selects_only
    n = len(request.prompt_ids)
    assert body["usage"] == {
        "prompt_tokens": n,
        "completion_tokens": 0,
        "total_tokens": n,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "kept_tokens": body["filter"]["kept_tokens"],
            "protected_tokens": body["filter"]["protected_tokens"],
        },
    }
    always = body["filter"]["protected_tokens"]
    assert always > 0
    assert body["filter"]["kept_tokens"] == always + 32 < n
    assert body["filter"]["selection"] is None
    assert body["text"].startswith("The river runs")
    assert "<|" not in body["text"]
    assert reply.headers["x-gemserve-kept-tokens"] == str(always + 32)


async def test_the_selection_is_shown_if_asked_for(api: Api) -> None:
    ids = list(range(10, 510))
    asked = {"method": "sieve", "keep": 32, "return_selection": True}
    body = (await post(api, prompt=ids, filter=asked)).json()
    always = body["filter"]["protected_tokens"]
    first, *others = body["filter"]["selection"]
    assert first == [0, 32]
    assert sum(stop - start for start, stop in others) == always > 0
    expected = FilterParams(
        method="sieve", keep=32, layer=FILTER_LAYER, lexical="auto", return_selection=True
    )
    assert api.core.requests[0].filter == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "max_tokens": 5}, "max_tokens"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"prompt": "a", "filter": {"keep": 3}}, "filter.keep"),
        ({"prompt": "a", "filter": "snapkv"}, "filter.method"),
        ({"prompt": [1] * CONTEXT}, "prompt"),
    ],
)
async def test_what_cannot_be_filtered_is_named(api: Api, body: dict[str, Any], param: str) -> None:
    reply = await post(api, **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not api.core.requests
