"""Agno."""

import gc
from typing import Literal

from agno.agent import Agent, RunEvent
from agno.exceptions import ModelProviderError
from agno.models.message import Message
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.run.base import RunStatus
from agno.tools import tool
from pydantic import BaseModel, Field

ENVIRONMENT = "agents"
APIS = ("chat", "responses")


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server, tokens=None, **options):
    place = {"id": "builtin", "base_url": server.url, "api_key": "none"}
    if server.api == "responses":
        return OpenAIResponses(**place, max_output_tokens=tokens, **options)
    return OpenAILike(**place, max_tokens=tokens, **options)


def agent(server, tokens=None, **options):
    return Agent(model=model(server, tokens), **options)


def weather_tool(server):
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        assert city == "Paris"
        return server.weather

    return weather


def chat(server):
    reply = agent(server, 7, instructions="Be brief.").run("Hi")
    assert reply.content == server.text
    assert reply.metrics.output_tokens == 4


def chat_history(server):
    """Messages that it was given, and messages that it got from the server."""
    asker = agent(server, 7)
    first = asker.run("Hi")
    assert asker.run([*first.messages, Message(role="user", content="And?")]).content == server.text


def read_stream(asker, text):
    events = asker.run(text, stream=True)
    return [event.content or "" for event in events if event.event == RunEvent.run_content]


def stream(server):
    parts = read_stream(agent(server, 7), "Hi")
    assert "".join(parts) == server.text
    assert len(parts) > 1


def typed(server):
    assert isinstance(agent(server, output_schema=Forecast).run("Paris?").content, Forecast)


def typed_given_json_mode(server):
    """The schema stands in the prompt, and the format is any JSON object."""
    asker = agent(server, output_schema=Forecast, use_json_mode=True)
    assert asker.run("Paris?").content.degrees == 21


def forced_call(server):
    called = []

    @tool(stop_after_tool_call=True)
    def weather(city: Literal["Paris", "London"]) -> str:
        """Tell the weather in a city."""
        called.append(city)
        return server.weather

    named = {"type": "function", "name": "weather"}
    if server.api == "chat":
        named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        agent(server, tools=[weather], tool_choice=choice).run("Paris?")
    assert len(called) == 2
    assert set(called) <= {"Paris", "London"}


def tools(server):
    asker = agent(server, tools=[weather_tool(server)])
    assert asker.run("What is the weather in Paris?").content == server.text


def tools_stream(server):
    asker = agent(server, tools=[weather_tool(server)])
    assert "".join(read_stream(asker, "What is the weather in Paris?")) == server.text


def tools_and_schema(server):
    asker = agent(server, tools=[weather_tool(server)], output_schema=Forecast)
    assert asker.run("What is the weather in Paris?").content.degrees == 21


def errors(server):
    """An agent says so in its result; the model raises."""
    wrong = model(server, extra_body={"filter": {"keep": 3}})
    result = Agent(model=wrong).run("Hi")
    assert result.status == RunStatus.error
    assert "filter.keep=3" in result.content
    try:
        wrong.response([Message(role="user", content="Hi")])
    except ModelProviderError as error:
        assert error.status_code == 400
        assert "filter.keep=3" in error.message
    else:
        raise AssertionError


def cancel(server):
    """It notices when the next part comes, or the end."""
    kinds = []
    for event in agent(server).run("Hi", stream=True):
        kinds.append(event.event)
        if event.event == RunEvent.run_content:
            Agent.cancel_run(event.run_id)
    assert RunEvent.run_cancelled in kinds
    gc.collect()  # the stream stays open until it is forgotten


def cancel_by_timeout(server):
    result = Agent(model=model(server, timeout=2, max_retries=0)).run("Hi")
    assert result.status == RunStatus.error


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    asker = Agent(model=model(server, extra_body=extra_body))
    assert asker.run(server.document).content == server.text
