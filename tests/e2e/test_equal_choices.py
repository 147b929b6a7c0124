"""Equal prompts make equal choices by every route, and the times that are told add up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from tests.served import Served, prose, served

Json = dict[str, Any]
FACT, QUESTION = "The code for the lantern is 48213.", "What is the code for the lantern?"
FILTER: Json = {"keep": 128, "return_selection": True}
CHATS = (
    *("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"),
    "/v1/filter",
)
ANSWER_TOKENS = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    config = EngineConfig(kv_memory_bytes=1 << 28, filter_min_tokens=256)
    core = build_core(ModelConfig(device="cpu", dtype="float32"), config)
    with served(build_serving(core, model_name="builtin", config=ServerConfig())) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> str:
    paragraphs = [prose(tokenizer, 100, seed) for seed in range(20)]
    paragraphs.insert(13, FACT)
    return "\n\n".join([*paragraphs, QUESTION])


def body_of(path: str, text: str) -> Json:
    message = {"role": "user", "content": text}
    fields: Json = {
        "/v1/chat/completions": {"messages": [message], "max_tokens": ANSWER_TOKENS},
        "/v1/responses": {"input": text, "max_output_tokens": ANSWER_TOKENS},
        "/v1/messages": {"messages": [message], "max_tokens": ANSWER_TOKENS},
        "/v1/completions": {"prompt": text, "max_tokens": ANSWER_TOKENS},
        "/api/chat": {"messages": [message]},
        "/api/generate": {"prompt": text},
        "/v1/filter": {"messages": [message]},
    }
    drawn: Json = {} if path == "/v1/filter" else {"temperature": 0}
    if path.startswith("/api"):
        drawn = {"options": {"temperature": 0, "num_predict": ANSWER_TOKENS}}
    return {**fields[path], **drawn, "filter": FILTER}


def reports_in(reply: str) -> Iterator[Json]:
    """The `filter` objects in a reply, whole or streamed, at whatever depth they are."""
    lines = [line.removeprefix("data: ") for line in reply.splitlines()]
    for line in lines:
        if line.startswith("{"):
            yield from _within(json.loads(line))


def _within(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        if "selection" in value and "kept_tokens" in value:
            yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _within(each)


def choice(server: Served, path: str, body: Json, **more: Any) -> Json:
    """What a reply says of the choice, without what depends on the cache and the clock."""
    reply = server.post(path, **body, **more)
    assert reply.status_code == 200, reply.text
    report, *others = reports_in(reply.text)
    assert all(other == report for other in others)
    told = ("selection", "kept_tokens", "protected_tokens", "prompt_tokens", "messages", "reason")
    return {name: report[name] for name in told} | {"coverage": round(report["coverage"], 4)}


def test_every_route_chooses_alike(server: Served, text: str) -> None:
    """Streamed or not, and whether or not the cache has the document."""
    first = choice(server, "/v1/filter", body_of("/v1/filter", text), cache_salt="first")
    assert first["reason"] is None
    for path in CHATS:
        streams = ({},) if path == "/v1/filter" else ({"stream": False}, {"stream": True})
        for stream in streams:
            salt = f"{path} {stream}"
            for _ in ("read", "cached"):
                body = body_of(path, text)
                assert choice(server, path, body, cache_salt=salt, **stream) == first


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_a_plain_prompt_is_chosen_from_alike(server: Served, text: str, kind: str) -> None:
    chat = {"messages": [{"role": "user", "content": text}], "return_offsets": True}
    told = server.ask("/tokenize", **chat)
    prompt = told["text"] if kind == "text" else told["tokens"]
    plain: Json = {"prompt": prompt, "filter": FILTER}
    first = choice(server, "/v1/filter", plain, cache_salt=kind)
    assert first["reason"] is None
    for stream in (False, True):
        for _ in ("read", "cached"):
            asked = {**plain, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": stream}
            salt = f"{kind} {stream}"
            assert choice(server, "/v1/completions", asked, cache_salt=salt) == first
    kept = {place for low, high in first["selection"] for place in range(low, high)}
    behind = told["text"].index(FACT)
    starts = told["offsets"]
    has_bos = first["prompt_tokens"] - len(told["tokens"])
    of_fact = [at for at, start in enumerate(starts) if 0 <= start - behind < len(FACT)]
    assert {at + has_bos for at in of_fact} <= kept


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_s_durations_add_up(server: Served, text: str, stream: bool) -> None:
    """The total began behind the tokenizer, and the time in the queue was the prompt's."""
    long = f"{text}\n\n" * 8 + text
    server.ask("/v1/filter", **body_of("/v1/filter", text))  # everything is loaded
    began_s = time.monotonic()
    reply = server.post("/api/generate", **body_of("/api/generate", long), stream=stream)
    wall_s = time.monotonic() - began_s
    told = json.loads(reply.text.splitlines()[-1])
    total_s = told["total_duration"] / 1e9
    parts = [told[f"{name}_duration"] / 1e9 for name in ("load", "prompt_eval", "eval")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(total_s, rel=0.05)
    assert 0 <= wall_s - total_s < 0.05 * wall_s + 0.15  # and a connection


def test_the_metrics_times_add_up(server: Served, text: str) -> None:
    def sums() -> dict[str, float]:
        found = server.metrics()
        names = (
            *("request_queue_time", "filter_time", "request_prefill_time", "request_decode_time"),
            *("e2e_request_latency", "request_inference_time", "time_to_first_token"),
        )
        return {name: found.get(f"{name}_seconds_sum", 0.0) for name in names}

    before = sums()
    began_s = time.monotonic()
    server.ask("/v1/chat/completions", **body_of("/v1/chat/completions", f"{text}\n\n" * 8 + text))
    wall_s = time.monotonic() - began_s
    took = {name: value - before[name] for name, value in sums().items()}
    whole = took["e2e_request_latency"]
    assert whole > 0
    queue, filtering = took["request_queue_time"], took["filter_time"]
    prefill, decode = took["request_prefill_time"], took["request_decode_time"]
    assert queue + filtering + prefill + decode == pytest.approx(whole, rel=0.01)
    assert queue + took["request_inference_time"] == pytest.approx(whole, rel=0.01)
    assert took["time_to_first_token"] + decode == pytest.approx(whole, rel=0.01)
    assert 0 <= wall_s - whole < 0.05 * wall_s + 0.15
