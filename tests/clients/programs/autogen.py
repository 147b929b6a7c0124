"""AutoGen."""

import asyncio
import json
from typing import Literal

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel, Field

ENVIRONMENT = "agents"
APIS = ("chat",)


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def client(server, **options):
    """It must be told what a model can do whose name is not OpenAI's."""
    return OpenAIChatCompletionClient(
        model="builtin",
        base_url=server.url,
        api_key="none",
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
        **options,
    )


def asked(text):
    return [UserMessage(content=text, source="user")]


def agent(server, **options):
    return AssistantAgent("asker", model_client=client(server), **options)


def weather_tool(server):
    async def weather(city: str) -> str:
        """Tell the weather in a city."""
        assert city == "Paris"
        return server.weather

    return weather


def run(asker, text):
    return asyncio.run(asker.run(task=text)).messages[-1]


def chat(server):
    reply = asyncio.run(client(server, max_tokens=7).create(asked("Hi")))
    assert reply.content == server.text
    assert (reply.finish_reason, reply.usage.completion_tokens) == ("stop", 4)


def chat_history(server):
    """With the limit of tokens in the client, the agent's second question has its first answer."""

    async def talk():
        asker = AssistantAgent("asker", model_client=client(server, max_tokens=7))
        await asker.run(task="Hi")
        return (await asker.run(task="And now?")).messages[-1].content

    assert asyncio.run(talk()) == server.text


def stream(server):
    async def read():
        made = client(server, max_tokens=7).create_stream(asked("Hi"), include_usage=True)
        return [part async for part in made]

    *parts, last = asyncio.run(read())
    assert "".join(parts) == server.text == last.content
    assert len(parts) > 1
    assert last.usage.completion_tokens == 4


def typed(server):
    reply = asyncio.run(client(server).create(asked("Paris?"), json_output=Forecast))
    assert Forecast.model_validate_json(reply.content)


def typed_agent(server):
    message = run(agent(server, output_content_type=Forecast), "Paris?")
    assert isinstance(message.content, Forecast)


def typed_given_json_mode(server):
    reply = asyncio.run(client(server).create(asked("Paris?"), json_output=True))
    assert json.loads(reply.content)["degrees"] == 21


def forced_call(server):
    async def weather(city: Literal["Paris", "London"]) -> str:
        """Tell the weather in a city."""
        return city

    tool = FunctionTool(weather, description="Tell the weather.", strict=True)
    for choice in ("required", tool):
        made = client(server).create(asked("Paris?"), tools=[tool], tool_choice=choice)
        [call] = asyncio.run(made).content
        assert call.name == "weather"
        assert json.loads(call.arguments)["city"] in ("Paris", "London")


def tools(server):
    asker = agent(server, tools=[weather_tool(server)], reflect_on_tool_use=True)
    assert run(asker, "What is the weather in Paris?").content == server.text


def tools_stream(server):
    async def read():
        asker = agent(
            server,
            tools=[weather_tool(server)],
            reflect_on_tool_use=True,
            model_client_stream=True,
        )
        return [event async for event in asker.run_stream(task="What is the weather in Paris?")]

    events = asyncio.run(read())
    chunks = [e.content for e in events if isinstance(e, ModelClientStreamingChunkEvent)]
    assert "".join(chunks) == server.text


def tools_and_schema(server):
    """OpenAI's SDK, which it parses the answer with, wants strict tools."""
    tool = FunctionTool(weather_tool(server), description="Tell the weather.", strict=True)
    asker = agent(server, tools=[tool], output_content_type=Forecast)
    assert run(asker, "What is the weather in Paris?").content.degrees == 21


def errors(server):
    options = {"extra_body": {"filter": {"keep": 3}}}
    try:
        asyncio.run(client(server).create(asked("Hi"), extra_create_args=options))
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        token = CancellationToken()
        asker = agent(server, model_client_stream=True)
        try:
            async for event in asker.run_stream(task="Hi", cancellation_token=token):
                if isinstance(event, ModelClientStreamingChunkEvent):
                    token.cancel()
        except asyncio.CancelledError:
            return
        raise AssertionError

    asyncio.run(leave())


def cancel_by_timeout(server):
    try:
        asyncio.run(client(server, timeout=2, max_retries=0).create(asked("Hi")))
    except openai.APITimeoutError:
        return
    raise AssertionError


def filter(server):
    """The option of all requests, and that of one."""
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    asker = AssistantAgent("asker", model_client=client(server, **options))
    assert run(asker, server.document).content == server.text
    made = client(server).create(asked(server.document), extra_create_args=options)
    assert asyncio.run(made).content == server.text
