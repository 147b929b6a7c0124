"""LiteLLM's proxy between OpenAI's SDK and this server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.clients import servers
from tests.clients.litellm_proxy import KEY, proxy
from tests.clients.servers import CALL, DOCUMENT, FORECAST, TEXT, Answers, texts
from tests.fakes import FILTERED

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "London"]}},
            "required": ["city"],
        },
    },
}
HI: Any = [{"role": "user", "content": "Hi"}]
PARIS: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Forecast(BaseModel):
    city: str = Field(pattern="^(Paris|London)$")
    degrees: int = Field(ge=-20, le=40)


def proxied(*capabilities: str) -> Any:
    return pytest.mark.capability("LiteLLM proxy", *capabilities)


@pytest.fixture(scope="module")
def known() -> Answers:
    """The core behind the proxy's model `known`; a test says what it answers."""
    return texts(TEXT)


@pytest.fixture(scope="module")
def address(
    known: Answers, tokenizer: Any, builtin_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("proxy")
    with servers.scripted(known, tokenizer) as url:
        models = {"known": f"{url}/v1", "real": f"{builtin_url}/v1"}
        with proxy(folder, models) as started:
            yield started


@pytest.fixture
def client(address: str, known: Answers) -> Iterator[openai.OpenAI]:
    known.requests.clear()
    known.answer(TEXT)
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as opened:
        yield opened


@proxied("chat")
def test_chat(client: openai.OpenAI, known: Answers) -> None:
    reply = client.chat.completions.create(model="known", messages=HI, max_tokens=7, seed=3)
    assert reply.choices[0].message.content == TEXT
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2
    assert (known.requests[0].sampling.max_tokens, known.requests[0].sampling.seed) == (7, 3)


@proxied("stream")
def test_stream(client: openai.OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="known", messages=HI, **options))
    said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(said) == TEXT
    assert chunks[-1].usage.completion_tokens == 2


@proxied("chat")
def test_responses(client: openai.OpenAI) -> None:
    """The proxy serves `/v1/responses` and passes it on."""
    assert client.responses.create(model="known", input="Hi").output_text == TEXT


@proxied("typed")
def test_typed(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model="real", messages=PARIS, response_format=Forecast)
    assert reply.choices[0].message.parsed is not None


@proxied("forced_call")
def test_forced_call(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="real", messages=PARIS, tools=[WEATHER], tool_choice="required", max_tokens=300
    )
    calls: Any = reply.choices[0].message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "London")


@proxied("tools")
def test_tools(client: openai.OpenAI, known: Answers) -> None:
    known.answer(CALL, TEXT)
    asked: Any = {"model": "known", "tools": [WEATHER]}
    message = client.chat.completions.create(messages=PARIS, **asked).choices[0].message
    [call] = message.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
    history = [*PARIS, message.model_dump(exclude_none=True), result]
    reply = client.chat.completions.create(messages=history, **asked)
    assert reply.choices[0].message.content == TEXT


@proxied("tools_and_schema")
def test_tools_and_schema(client: openai.OpenAI, known: Answers) -> None:
    known.answer(FORECAST)
    schema = {"name": "forecast", "strict": True, "schema": Forecast.model_json_schema()}
    reply = client.chat.completions.create(
        model="known",
        messages=PARIS,
        tools=[WEATHER],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert Forecast.model_validate_json(reply.choices[0].message.content or "").degrees == 21


@proxied("chat")
@pytest.mark.parametrize("streams", [False, True])
def test_the_bridge_from_anthropic(address: str, known: Answers, streams: bool) -> None:
    """The proxy translates Anthropic's messages, and sends fields of its own with them."""
    known.answer(TEXT)
    body = {"model": "known", "max_tokens": 7, "messages": HI, "stream": streams}
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{address}/v1/messages", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    if streams:
        data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line).get("delta", {}).get("text", "") for line in data]
        assert "".join(deltas) == TEXT
    else:
        assert reply.json()["content"][0]["text"] == TEXT


@proxied("errors")
def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"filter\.keep=3"):
        client.chat.completions.create(
            model="known", messages=HI, extra_body={"filter": {"keep": 3}}
        )


@proxied("cancel")
def test_cancel(client: openai.OpenAI, known: Answers) -> None:
    known.play([FILTERED, "Hé", "llo", 60.0])
    known.cancelled.clear()
    with client.chat.completions.create(model="known", messages=HI, stream=True) as chunks:
        next(iter(chunks))
    assert known.cancelled.wait(10)


@proxied("filter")
def test_filter(client: openai.OpenAI, known: Answers) -> None:
    messages: Any = [{"role": "user", "content": DOCUMENT}]
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    reply = client.chat.completions.create(model="known", messages=messages, extra_body=extra_body)
    assert (known.requests[0].filter.method, known.requests[0].filter.keep) == ("sieve", 512)
    assert reply.model_extra is not None
    report = reply.model_extra["filter"]
    assert report["kept_tokens"] == 512 + report["protected_tokens"]
