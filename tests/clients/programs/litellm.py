"""LiteLLM."""

import asyncio
import json
from typing import Literal

import litellm
from pydantic import BaseModel, Field

ENVIRONMENT = "litellm"
APIS = ("chat",)
WEATHER = {
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


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def place(server):
    return {"model": "openai/builtin", "api_base": server.url, "api_key": "none"}


def ask(server, asked, **options):
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return litellm.completion(**place(server), messages=messages, **options)


def chat(server):
    assert ask(server, "Hi", max_tokens=7).choices[0].message.content == server.text


def stream(server):
    chunks = list(ask(server, "Hi", max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == server.text


def typed(server):
    reply = ask(server, "Paris?", response_format=Forecast)
    assert Forecast.model_validate_json(reply.choices[0].message.content)


def forced_call(server):
    reply = ask(server, "Paris?", tools=[WEATHER], tool_choice="required", max_tokens=300)
    [call] = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "London")


def converse(server, **options):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = ask(server, asked, tools=[WEATHER], **options).choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": server.weather}
    asked += [message.model_dump(), result]
    return ask(server, asked, tools=[WEATHER], **options).choices[0].message.content


def tools(server):
    assert converse(server) == server.text


def tools_and_schema(server):
    found = converse(server, response_format=Forecast)
    assert Forecast.model_validate_json(found).degrees == 21


def errors(server):
    try:
        ask(server, "Hi", extra_body={"filter": {"keep": 3}})
    except litellm.BadRequestError as error:
        assert "filter.keep=3" in str(error)
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        messages = [{"role": "user", "content": "Hi"}]
        stream = await litellm.acompletion(**place(server), messages=messages, stream=True)
        async for _ in stream:
            asyncio.current_task().cancel()

    async def run():
        left = asyncio.create_task(leave())
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run())


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    reply = ask(server, server.document, extra_body=extra_body)
    kept = reply.filter
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
