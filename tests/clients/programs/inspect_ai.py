"""Inspect."""

import asyncio
import json
from typing import Literal

import openai
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

ENVIRONMENT = "agents"
APIS = ("chat", "responses")
# fault of the client: responses_filter: with `responses_api=True` it sends no `extra_body`


class Place(BaseModel):
    city: Literal["Paris", "London"]


class Forecast(Place):
    degrees: int


def model(server, **options):
    return get_model(
        "openai-api/gemserve/builtin",
        base_url=server.url,
        api_key="none",
        memoize=False,
        responses_api=server.api == "responses",
        config=GenerateConfig(**options),
    )


def ask(server, asked, tools=(), choice=None, **options):
    return asyncio.run(model(server, **options).generate(asked, tools, choice))


@tool(name="weather")
def weather_tool(server):
    async def execute(city: str) -> str:
        """Tell the weather in a city.

        Args:
            city: the city's name
        """
        assert city == "Paris"
        return server.weather

    return execute


@tool(name="weather")
def weather_of_two():
    async def execute(city: Literal["Paris", "London"]) -> str:
        """Tell the weather in a city.

        Args:
            city: the city's name
        """
        return city

    return execute


def chat(server):
    reply = ask(server, "Hi", max_tokens=7)
    assert reply.completion == server.text
    assert reply.usage.output_tokens == 4


def run(server, *, target, solver, **options):
    """The one sample of an evaluation, as `inspect eval` would run it."""
    sample = Sample("What is the weather in Paris?", target=target)
    task = Task(dataset=[sample], solver=solver, scorer=includes())
    [log] = eval(task, model=model(server, **options), display="none", log_level="error")
    assert log.status == "success", log.error
    [done] = log.samples
    assert done.scores["includes"].value == "C", done.output
    return done


def chat_evaluation(server):
    run(server, target=server.text, solver=[generate()], max_tokens=7)


def stream(server):
    """Parts go to a function; what it returns at the end is the whole reply."""
    parts = []

    async def note(event):
        parts.append(event.text)

    reply = asyncio.run(model(server, max_tokens=7).generate("Hi", on_stream=note))
    assert reply.completion == server.text
    assert "".join(parts) == server.text
    assert len(parts) > 1


def typed(server):
    """Its schemas have no bounds: a number of a small model need not end."""
    schema = ResponseSchema(name="place", json_schema=json_schema(Place))
    reply = ask(server, "Paris?", response_schema=schema)
    assert Place.model_validate_json(reply.completion)


def forced_call(server):
    for choice in ("any", ToolFunction(name="weather")):
        reply = ask(server, "Paris?", [weather_of_two()], choice)
        [call] = reply.message.tool_calls
        assert call.function == "weather"
        assert call.arguments["city"] in ("Paris", "London")


def tools(server):
    run(server, target=server.text, solver=[use_tools(weather_tool(server)), generate()])


def tools_and_schema(server):
    schema = ResponseSchema(name="forecast", json_schema=json_schema(Forecast), strict=True)
    asked = [ChatMessageUser(content="What is the weather in Paris?")]
    options = {"tools": [weather_tool(server)], "response_schema": schema}
    message = ask(server, asked, **options).message
    [call] = message.tool_calls
    result = ChatMessageTool(content=server.weather, tool_call_id=call.id, function=call.function)
    reply = ask(server, [*asked, message, result], **options)
    assert json.loads(reply.completion)["degrees"] == 21


def errors(server):
    try:
        ask(server, "Hi", temperature=3)
    except Exception as error:  # its own class is not public
        assert isinstance(error.__cause__, openai.BadRequestError)
        assert error.__cause__.param == "temperature"
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        started = asyncio.Event()

        async def note(_):
            started.set()

        asking = asyncio.create_task(model(server).generate("Hi", on_stream=note))
        await asyncio.wait_for(started.wait(), 20)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()

    asyncio.run(leave())


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    reply = ask(server, server.document, extra_body=extra_body)
    assert reply.completion == server.text
