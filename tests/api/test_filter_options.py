"""The `filter` object reaches the engine unchanged, whichever way a request comes in."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.filtering.methods import METHODS, SERVED_METHODS
from tests.fakes import CHAT, COMPLETIONS, FILTER_LAYER, Api, data_of

pytestmark = pytest.mark.anyio
DEFAULT = {"method": "sieve", "keep": 64, "layer": FILTER_LAYER, "lexical": "auto"}
OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    ({}, {}),
    ("none", {"method": "none", "lexical": "off"}),
    ("gemfilter", {"method": "gemfilter", "lexical": "off"}),
    (
        {"method": "gemfilter", "pooling": "max"},
        {"method": "gemfilter", "pooling": "max", "lexical": "off"},
    ),
    ({"keep": 16}, {"keep": 16}),
    ({"keep": 512.0}, {"keep": 512}),
    ({"keep": 0.25}, {"keep": 0.25}),
    ({"keep": None}, {}),
    ({"layer": 0}, {"layer": 0}),
    ({"layer": "auto"}, {}),
    ({"heads": [[2, 7], [0, 0.0]]}, {"heads": ((2, 7), (0, 0))}),
    ({"heads": [[1, 7]], "layer": 1}, {"heads": ((1, 7),), "layer": 1}),
    ({"method": "gemfilter", "heads": None}, {"method": "gemfilter", "lexical": "off"}),
    ({"window": 1024}, {"window": 1024}),
    ({"window": 256.0, "keep": 32}, {"window": 256, "keep": 32}),
    ({"window": "auto"}, {}),
    ({"window": "off"}, {"window": "off"}),
    ({"method": "gemfilter", "window": None}, {"method": "gemfilter", "lexical": "off"}),
    ({"lexical": "auto"}, {}),
    ({"lexical": "off"}, {"lexical": "off"}),
    ({"reader": "self"}, {}),
    ({"reader": None}, {}),
    ({"method": "gemfilter", "lexical": None}, {"method": "gemfilter", "lexical": "off"}),
    ({"method": "snapkv", "layer": "auto"}, {"method": "snapkv", "lexical": "off"}),
    ({"return_selection": True}, {"return_selection": True}),
    ({"keep": "auto"}, {"keep": "auto", "fallback": True}),
    ({"keep": "auto", "fallback": False}, {"keep": "auto"}),
    ({"keep": 32, "fallback": True}, {"keep": 32, "fallback": True}),
    ({"fallback": None}, {}),
    (
        {"method": "sieve", "keep": 100, "layer": 1, "return_selection": True},
        {"keep": 100, "layer": 1, "return_selection": True},
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("given", "expected"), OPTIONS)
async def test_options_reach_the_engine(
    api: Api, path: str, stream: bool, given: Any, expected: dict[str, Any]
) -> None:
    reply = await api.post(path, stream=stream, filter=given)
    assert reply.status_code == 200
    params = api.core.requests[0].filter
    assert replace(params, may_read_whole=False) == FilterParams(**{**DEFAULT, **expected})
    assert type(params.keep) is type(expected.get("keep", 64))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("keep", "kept"), [(32, 32), (33.0, 33), (0.1, 50), (0.101, 51)])
async def test_keep_is_exact(api: Api, stream: bool, keep: float, kept: int) -> None:
    """A fraction is one of the documents: of 500 tokens beside those that are always read."""
    always = 64  # of a prompt without breaks: the tokens at its end
    prompt = list(range(10, 510 + always))
    reply = await api.post(COMPLETIONS, stream=stream, prompt=prompt, filter={"keep": keep})
    report = data_of(reply)[0]["filter"] if stream else reply.json()["filter"]
    assert (report["prompt_tokens"], report["protected_tokens"]) == (500 + always, always)
    assert report["kept_tokens"] == kept + always
    assert report["applied"]


@pytest.mark.parametrize("method", [m for m in SERVED_METHODS if METHODS[m].selector is None])
async def test_a_layer_is_refused_where_none_chooses(api: Api, method: str) -> None:
    """It was accepted without effect. The server's own layer is no reason to refuse a method."""
    assert (await api.post(COMPLETIONS, filter=method)).status_code == 200
    reply = await api.post(COMPLETIONS, filter={"method": method, "layer": 1})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "filter.layer"
    said = re.fullmatch(
        rf"filter\.layer=1: only methods (.*) have a filter layer, not {method}", error["message"]
    )
    assert said is not None
    others = [m for m in SERVED_METHODS if METHODS[m].selector is not None and m != "sieve"]
    assert re.split(", | and ", said[1]) == ["sieve", *others]  # the server's own comes first
    assert "gemfilter" in others


@pytest.mark.parametrize("path", ["/v1/filter", COMPLETIONS])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 1], [2, 8]], "filter.heads: head 8 of layer 2 must be from 0 to 7"),
        ([[3, 0]], "filter.heads: layer 3 must be from 0 to the request's filter layer, 2"),
        ([[0, i] for i in range(33)], "filter.heads: has 33 pairs, the limit is 32"),
        ([[0, 1], [0, 1.0]], "filter.heads: [0, 1] is there more than once; the limit is once"),
        *(
            (value, "must be a list of 1 to 32 pairs [layer, head] of whole numbers from 0")
            for value in (
                *([], [0, 1], [[0]], [[0, 1, 2]], [[0, -1]], [[0, 1.5]], [[0, True]], [[0, None]]),
                *("0.1", 3, True, {}, [{}], [["0", "1"]], [[1e400, 0]]),
            )
        ),
        ([[10**400, 0]], "an integer of 1329 bits must be from 0 to the request's filter layer"),
    ],
)
async def test_wrong_heads_are_refused(api: Api, path: str, given: Any, message: str) -> None:
    """The field, its value and the limit are named."""
    body = {"model": "fake", "prompt": list(range(10, 510)), "filter": {"heads": given}}
    reply = await api.client.post(path, content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["message"].startswith("filter.heads")
    assert (error["param"], error["code"]) == ("filter.heads", "invalid_value")


@pytest.mark.parametrize("path", ["/v1/filter", COMPLETIONS])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            (
                {"window": value},
                'must be a count of tokens from 256 to 1048576, "auto" or "off"',
            )
            for value in (255, 0, -1, 300.5, 1 << 21, True, "most", "1024", [], {}, 1e400)
        ),
        ({"window": 1 << 20}, "must be at most 1744, 256 less than the model's context"),
        ({"window": 512, "method": "none"}, "only method sieve has it, not none"),
        ({"window": "off", "method": "gemfilter"}, "only method sieve has it, not gemfilter"),
    ],
)
async def test_wrong_windows_are_refused(api: Api, path: str, given: Any, message: str) -> None:
    """The field, its value and the limit are named."""
    body = {"model": "fake", "prompt": list(range(10, 510)), "filter": given}
    reply = await api.client.post(path, content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith("filter.window=")
    assert message in error["message"]
    assert (error["param"], error["code"]) == ("filter.window", "invalid_value")


@pytest.mark.parametrize("path", ["/v1/filter", COMPLETIONS])
@pytest.mark.parametrize("given", ["auto", "off"])
@pytest.mark.parametrize("method", [m for m in SERVED_METHODS if not METHODS[m].has_words])
async def test_words_are_refused_where_none_count(
    api: Api, path: str, method: str, given: str
) -> None:
    """`none` and `gemfilter` would take the option without effect."""
    body = {"model": "fake", "prompt": list(range(10, 510)), "filter": {"method": method}}
    assert method == "snapkv" or (await api.client.post(path, json=body)).status_code == 200
    body["filter"] = {"method": method, "lexical": given}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"] == f"filter.lexical={given}: only method sieve has it, not {method}"
    assert (error["param"], error["code"]) == ("filter.lexical", "invalid_value")


@pytest.mark.parametrize("path", ["/v1/filter", COMPLETIONS, CHAT])
@pytest.mark.parametrize("given", ["on", "", "Off", True, 0, 1.5, [], {}])
async def test_lexical_is_auto_or_off(api: Api, path: str, given: Any) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    body = {"model": "fake", **said, "filter": {"lexical": given}}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith("filter.lexical=")
    assert error["message"].endswith(": Input should be 'auto' or 'off'")
    assert (error["param"], error["code"]) == ("filter.lexical", "invalid_value")
    assert not api.core.requests


@pytest.mark.parametrize("path", ["/v1/filter", COMPLETIONS])
async def test_a_reader_is_refused_where_there_is_none(api: Api, path: str) -> None:
    body = {"model": "fake", "prompt": list(range(10, 510)), "filter": {"reader": "reader"}}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    message = "filter.reader=reader: this server has no reader; --reader names its model"
    assert error["message"] == message
    assert (error["param"], error["code"]) == ("filter.reader", "invalid_value")
    assert not api.core.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("method", ["best", "fastkv", "claa"])
async def test_other_methods_are_refused(api: Api, path: str, method: str) -> None:
    """Those that only evaluations may name, too."""
    names = ", ".join(SERVED_METHODS)
    error = (await api.post(path, filter=method)).json()["error"]
    assert error["message"] == f"filter='{method}': must be an object or one of {names}"
    assert (error["param"], error["code"]) == ("filter", "invalid_value")
    reply = await api.post(path, filter={"method": method})
    assert reply.status_code == 400
    error = reply.json()["error"]
    quoted = ", ".join(map(repr, SERVED_METHODS[:-1])) + f" or {SERVED_METHODS[-1]!r}"
    assert error["message"] == f"filter.method='{method}': Input should be {quoted}"
    assert (error["param"], error["code"]) == ("filter.method", "invalid_value")


async def test_ids_reach_the_engine_unaltered(api: Api) -> None:
    """No BOS is added to token ids, and none is taken away."""
    prompt = [7, 7, 1, 4095, 0]
    await api.post(COMPLETIONS, prompt=prompt)
    assert list(api.core.requests[0].prompt_ids) == prompt


async def test_protected_spans_reach_the_engine_from_both_endpoints(api: Api) -> None:
    await api.post(COMPLETIONS, prompt="word " * 300)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    await api.post(CHAT, messages=messages)
    for request in api.core.requests:
        assert request.protected
        assert max(s.stop for s in request.protected) == len(request.prompt_ids)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("specprefill", "filter.reader"),
        ("specprefill_keep_pct", "filter.keep, a share or a count"),
        ("max_new_tokens", "max_tokens"),
    ],
)
async def test_fields_of_other_servers_are_told_their_names_here(
    api: Api, name: str, here: str
) -> None:
    body = {"model": "fake", "prompt": "Hi", name: 0.2}
    reply = await api.client.post(COMPLETIONS, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"] == f"{name}: unknown field; here it is {here}"
    assert (error["param"], error["code"]) == (name, "unknown_field")


async def test_a_name_is_told_only_where_there_is_such_a_field(api: Api) -> None:
    reply = await api.post(CHAT, enable_thinking=False)
    here = "enable_thinking: unknown field; here it is chat_template_kwargs.enable_thinking"
    assert reply.json()["error"]["message"] == here
    reply = await api.post(COMPLETIONS, enable_thinking=False)
    assert reply.json()["error"]["message"] == "enable_thinking: unknown field"
