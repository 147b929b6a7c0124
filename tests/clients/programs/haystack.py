"""Haystack."""

import asyncio
from typing import Literal

import openai
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from pydantic import BaseModel, Field

ENVIRONMENT = "agents"
APIS = ("chat", "responses")


FORCED = {"tool_choice": "required"}


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def limit(server):
    return {"max_output_tokens" if server.api == "responses" else "max_completion_tokens": 7}


def generator(server, **options):
    kind = OpenAIResponsesChatGenerator if server.api == "responses" else OpenAIChatGenerator
    return kind(
        api_key=Secret.from_token("none"),
        model="builtin",
        api_base_url=server.url,
        max_retries=0,
        **options,
    )


def typed_option(server):
    return {"text_format" if server.api == "responses" else "response_format": Forecast}


def ask(server, text, **options):
    messages = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(text)]
    return generator(server, **options).run(messages)["replies"][0]


def weather_tool(server, annotation=str):
    def weather(city: annotation) -> str:
        """Tell the weather in a city."""
        return server.weather

    return create_tool_from_function(weather)


def chat(server):
    reply = ask(server, "Hi", generation_kwargs=limit(server))
    assert reply.text == server.text
    usage = reply.meta["usage"]
    assert usage["output_tokens" if server.api == "responses" else "completion_tokens"] == 4


def chat_asynchronous(server):
    messages = [ChatMessage.from_user("Hi")]
    made = generator(server, generation_kwargs=limit(server)).run_async(messages)
    assert asyncio.run(made)["replies"][0].text == server.text


def stream(server):
    parts = []
    reply = ask(
        server,
        "Hi",
        generation_kwargs=limit(server),
        streaming_callback=lambda chunk: parts.append(chunk.content),
    )
    assert "".join(parts) == server.text == reply.text
    assert len([part for part in parts if part]) > 1


def typed(server):
    reply = ask(server, "Paris?", generation_kwargs=typed_option(server))
    assert Forecast.model_validate_json(reply.text)


def forced_call(server):
    tool = weather_tool(server, Literal["Paris", "London"])
    reply = ask(server, "Paris?", tools=[tool], generation_kwargs=FORCED)
    [call] = reply.tool_calls
    assert call.tool_name == "weather"
    assert call.arguments["city"] in ("Paris", "London")


def agent(server, **options):
    return Agent(
        chat_generator=generator(server, **options), tools=[weather_tool(server)], max_agent_steps=3
    )


def tools(server):
    messages = [ChatMessage.from_user("What is the weather in Paris?")]
    assert agent(server).run(messages)["last_message"].text == server.text


def tools_stream(server):
    messages = [ChatMessage.from_user("What is the weather in Paris?")]
    result = agent(server).run(messages, streaming_callback=lambda chunk: None)
    assert result["last_message"].text == server.text


def tools_and_schema(server):
    messages = [ChatMessage.from_user("What is the weather in Paris?")]
    result = agent(server, generation_kwargs=typed_option(server), tools_strict=True).run(messages)
    assert Forecast.model_validate_json(result["last_message"].text).degrees == 21


def errors(server):
    try:
        ask(server, "Hi", generation_kwargs={"extra_body": {"filter": {"keep": 3}}})
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    parts = []

    async def note(chunk):
        parts.append(chunk)

    async def leave():
        messages = [ChatMessage.from_user("Hi")]
        asked = asyncio.create_task(generator(server).run_async(messages, streaming_callback=note))
        while not parts and not asked.done():
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()

    asyncio.run(leave())


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    reply = ask(server, server.document, generation_kwargs=options)
    assert reply.text == server.text
