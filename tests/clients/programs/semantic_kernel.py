"""Semantic Kernel."""

import asyncio
import json
from typing import Annotated, Literal

import openai
from pydantic import BaseModel, Field
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import KernelArguments, kernel_function

ENVIRONMENT = "semantic-kernel"
APIS = ("chat",)
ANSWERS = {
    "tools": ['{"name": "Weather-weather", "arguments": {"city": "Paris"}}', "Héllo 🌍!"],
    "tools_stream": ['{"name": "Weather-weather", "arguments": {"city": "Paris"}}', "Héllo 🌍!"],
    "tools_and_schema": [
        '{"name": "Weather-weather", "arguments": {"city": "Paris"}}',
        '{"city": "Paris", "degrees": 21}',
    ],
}
QUESTION = "What is the weather in Paris?"


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def service(server, **options):
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", **options)
    return OpenAIChatCompletion(ai_model_id="builtin", async_client=client)


def agent(server, plugins=(), **settings):
    return ChatCompletionAgent(
        service=service(server),
        name="asker",
        instructions="Be brief.",
        plugins=list(plugins),
        arguments=KernelArguments(settings=OpenAIChatPromptExecutionSettings(**settings)),
    )


def ask(server, text, kernel=None, options=None, **settings):
    return asyncio.run(
        service(server, **(options or {})).get_chat_message_content(
            ChatHistory(messages=[{"role": "user", "content": text}]),
            OpenAIChatPromptExecutionSettings(**settings),
            kernel=kernel,
        )
    )


class Weather:
    """A plugin, whose functions are tools."""

    def __init__(self, server):
        self._server = server

    @kernel_function(description="Tell the weather.")
    def weather(self, city: Annotated[str, "The city's name."]) -> str:
        assert city == "Paris"
        return self._server.weather


class Lamp:
    """Its schemas of texts have no bounds, and a text of a small model need not end."""

    @kernel_function(description="Switch the lamp.")
    def switch(self, on: bool) -> str:
        return "done"


def chat(server):
    reply = ask(server, "Hi", max_tokens=7)
    assert reply.content == server.text
    assert reply.metadata["usage"].completion_tokens == 4


def chat_history(server):
    async def talk():
        asker = agent(server, max_tokens=7)
        first = await asker.get_response("Hi")
        second = await asker.get_response("And now?", thread=first.thread)
        return second.message.content

    assert asyncio.run(talk()) == server.text


def parts_of(asker, text):
    async def read():
        return [str(part.message) async for part in asker.invoke_stream(text)]

    return asyncio.run(read())


def stream(server):
    parts = parts_of(agent(server, max_tokens=7), "Hi")
    assert "".join(parts) == server.text
    assert len(parts) > 1


def typed(server):
    reply = ask(server, "Paris?", response_format=Forecast)
    assert Forecast.model_validate_json(reply.content)


def forced_call(server):
    kernel = Kernel()
    kernel.add_plugin(Lamp(), "lamp")
    choice = FunctionChoiceBehavior.Required(auto_invoke=False)
    reply = ask(server, "Light!", kernel, function_choice_behavior=choice)
    [call] = [item for item in reply.items if isinstance(item, FunctionCallContent)]
    assert call.name == "lamp-switch"
    assert json.loads(call.arguments)["on"] in (True, False)


def tools(server):
    reply = asyncio.run(agent(server, [Weather(server)]).get_response(QUESTION))
    assert reply.message.content == server.text


def tools_stream(server):
    assert "".join(parts_of(agent(server, [Weather(server)]), QUESTION)) == server.text


def tools_and_schema(server):
    asker = agent(server, [Weather(server)], response_format=Forecast)
    reply = asyncio.run(asker.get_response(QUESTION))
    assert json.loads(reply.message.content)["degrees"] == 21


def errors(server):
    try:
        ask(server, "Hi", extra_body={"filter": {"keep": 3}})
    except ServiceResponseException as error:
        assert error.__cause__.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def leave(started):
        async for part in agent(server).invoke_stream("Hi"):
            if str(part.message):
                started.set()

    async def run():
        started = asyncio.Event()
        left = asyncio.create_task(leave(started))
        await asyncio.wait_for(started.wait(), 20)
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run())


def cancel_by_timeout(server):
    try:
        ask(server, "Hi", options={"timeout": 2, "max_retries": 0})
    except ServiceResponseException as error:
        assert isinstance(error.__cause__, openai.APITimeoutError)
    else:
        raise AssertionError


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    reply = ask(server, server.document, extra_body=extra_body)
    assert reply.content == server.text
    kept = reply.inner_content.model_extra["filter"]
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
