"""An answer is the same streamed, whole, beside others, alone, and after a restart.

Requests of all endpoints are drawn. One server answers all of them at once, each both ways; a
second one, started on the folder that the first one's document cache has left, answers them one
by one; so does a third one that has no cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.anthropic_requests import put_together
from tests.described import events_of
from tests.fakes import CHAT, COMPLETIONS
from tests.fuzz.cases import bounded, cases
from tests.fuzz.tiny import ADAPTER, MODEL, tiny_core, tiny_server

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CONTEXT = 900
LENGTHS = {RESPONSES: "max_output_tokens"}
Asked = tuple[str, dict[str, Any]]
DOCUMENTS = (
    "The river runs past the houses and the mill. " * 45,
    "The river runs past the houses and the mill. " * 30 + "Nobody lives there. " * 20,
    "A short note.",
)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def cold(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    core = tiny_core(tokenizer, CONTEXT, cache_memory=0.0)
    with tiny_server(core, tmp_path_factory.mktemp("cold")) as client:
        yield client


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    path = draw(st.sampled_from((COMPLETIONS, CHAT, RESPONSES, MESSAGES)))
    prompt = draw(st.sampled_from(DOCUMENTS)) + draw(st.sampled_from((" Where?", " Who?\n", "")))
    body: dict[str, Any] = {
        "model": MODEL,
        LENGTHS.get(path, "max_tokens"): draw(st.integers(1, 12)),
    }
    field = {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path)
    body |= {field: prompt} if field else {"messages": [{"role": "user", "content": prompt}]}
    body["temperature"] = 0
    if path in (COMPLETIONS, CHAT):  # the others have no seed
        body["temperature"] = draw(st.sampled_from((0, 0.7, 1)))
        body["seed"] = draw(st.integers(0, 9))
    if draw(st.booleans()):
        body["filter"] = draw(
            st.sampled_from(
                ("none", {"method": "sieve", "keep": 32}, {"method": "gemfilter", "keep": 0.1},
                 {"method": "snapkv", "keep": 40}, {"keep": "auto", "fallback": True})
            )
        )  # fmt: skip
    if draw(st.booleans()):
        body["adapter"] = ADAPTER
    if path in (COMPLETIONS, CHAT):
        body |= draw(
            st.sampled_from(({}, {"n": 2}, {"stop": ["e", "th"]}, {"logit_bias": {"70": 9}}))
        )
        body |= draw(st.sampled_from(({}, {"frequency_penalty": 1.5}, {"top_k": 5, "top_p": 0.8})))
    if path == CHAT and draw(st.booleans()):
        schema = {"name": "s", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return path, body


def ask(client: httpx.Client, asked: Asked, *, is_streamed: bool) -> Any:
    path, body = asked
    if is_streamed:
        body = {**body, "stream": True}
        if path in (COMPLETIONS, CHAT):
            body["stream_options"] = {"include_usage": True}
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    whole = from_stream(path, reply.text) if is_streamed else reply.json()
    return answer_of(path, whole)


def from_stream(path: str, text: str) -> dict[str, Any]:
    """What a client puts together from the events."""
    data = [json.loads(e["data"]) for e in events_of(text) if e["data"] != "[DONE]"]
    if path == RESPONSES:
        response: dict[str, Any] = data[-1]["response"]
        return response
    if path == MESSAGES:
        return put_together(data)
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in data:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "text": ""})
            piece = part["text"] if path == COMPLETIONS else part["delta"].get("content")
            choice["text"] += piece or ""
            choice["finish_reason"] = part["finish_reason"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def answer_of(path: str, whole: dict[str, Any]) -> Any:
    """What must not depend on how and when it was asked."""
    if path == MESSAGES:
        usage = whole["usage"]
        return whole["content"], whole["stop_reason"], usage["output_tokens"]
    if path == RESPONSES:
        parts = [[part["text"] for part in item["content"]] for item in whole["output"]]
        usage = whole["usage"]
        return parts, whole["status"], usage["input_tokens"], usage["output_tokens"]
    texts = [c["text"] if "text" in c else c["message"]["content"] or "" for c in whole["choices"]]
    reasons = [choice["finish_reason"] for choice in whole["choices"]]
    usage = whole["usage"]
    return texts, reasons, usage["prompt_tokens"], usage["completion_tokens"]


@given(st.lists(requests(), min_size=1, max_size=4))
@cases(2, many_times=0.2)
def test_answers_do_not_depend_on_how_they_are_asked(
    cold: httpx.Client, tokenizer: Any, tmp_path_factory: Any, drawn: list[Asked]
) -> None:
    folder: Path = tmp_path_factory.mktemp("server")
    # a prompt that is cached whole is read whole by default, so that others change its answer
    settings = {"cache_dir": str(folder / "cache"), "cache_memory": 0.5, "when_cached": "filter"}
    with bounded("answers", cpu_s=120):
        expected = [ask(cold, asked, is_streamed=False) for asked in drawn]
        core = tiny_core(tokenizer, CONTEXT, **settings)
        with tiny_server(core, folder) as client, ThreadPoolExecutor(8) as threads:
            ways = [(asked, streamed) for asked in drawn for streamed in (True, False)]
            found = list(threads.map(lambda way: ask(client, way[0], is_streamed=way[1]), ways))
        for (asked, is_streamed), answer in zip(ways, found, strict=True):
            assert answer == expected[drawn.index(asked)], (asked, is_streamed)
        restarted = tiny_core(tokenizer, CONTEXT, **settings)
        with tiny_server(restarted, folder) as client:
            for asked, answer in zip(drawn, expected, strict=True):
                assert ask(client, asked, is_streamed=False) == answer, (asked, "restarted")
