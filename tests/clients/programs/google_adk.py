"""Google ADK."""

import asyncio
import json
from typing import Literal

import litellm
from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel, Field

ENVIRONMENT = "litellm"
APIS = ("chat",)
QUESTION = "What is the weather in Paris?"


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server, **options):
    return LiteLlm(model="openai/builtin", api_base=server.url, api_key="none", **options)


def agent(server, *, tokens=None, settings=None, options=None, **more):
    config = types.GenerateContentConfig(max_output_tokens=tokens, **(settings or {}))
    asker = model(server, **(options or {}))
    return LlmAgent(
        name="asker",
        model=asker,
        instruction="Be brief.",
        generate_content_config=config,
        **more,
    )


def weather_tool(server):
    def weather(city: str) -> dict:
        """Tell the weather in a city."""
        assert city == "Paris"
        return {"weather": server.weather}

    return weather


async def events_of(asker, text, *, streams=False):
    runner = InMemoryRunner(agent=asker, app_name="asking")
    session = await runner.session_service.create_session(app_name="asking", user_id="user")
    mode = StreamingMode.SSE if streams else StreamingMode.NONE
    async for event in runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=types.UserContent(text),
        run_config=RunConfig(streaming_mode=mode),
    ):
        yield event


def run(asker, text, **options):
    async def read():
        return [event async for event in events_of(asker, text, **options)]

    return asyncio.run(read())


def text_of(event):
    parts = event.content.parts if event.content else []
    return "".join(part.text or "" for part in parts)


def chat(server):
    [event] = run(agent(server, tokens=7), "Hi")
    assert text_of(event) == server.text
    assert event.usage_metadata.candidates_token_count == 4


def stream(server):
    *parts, last = run(agent(server, tokens=7), "Hi", streams=True)
    assert "".join(map(text_of, parts)) == server.text == text_of(last)
    assert len(parts) > 1


def typed(server):
    [event] = run(agent(server, output_schema=Forecast), "Paris?")
    assert Forecast.model_validate_json(text_of(event))


def forced_call(server):
    called = []

    def weather(city: Literal["Paris", "London"]) -> dict:
        """Tell the weather in a city."""
        called.append(city)
        return {"weather": server.weather}

    mode = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["weather"])
    settings = {"tool_config": types.ToolConfig(function_calling_config=mode)}
    asker = agent(server, settings=settings, tools=[weather])

    async def first_call():
        async for event in events_of(asker, "Paris?"):
            if event.get_function_responses():
                return

    asyncio.run(first_call())
    assert called[0] in ("Paris", "London")


def tools(server):
    events = run(agent(server, tools=[weather_tool(server)]), QUESTION)
    assert [len(event.get_function_calls()) for event in events] == [1, 0, 0]
    assert text_of(events[-1]) == server.text


def tools_stream(server):
    events = run(agent(server, tools=[weather_tool(server)]), QUESTION, streams=True)
    assert text_of(events[-1]) == server.text


def tools_and_schema(server):
    asker = agent(server, tools=[weather_tool(server)], output_schema=Forecast)
    assert json.loads(text_of(run(asker, QUESTION)[-1]))["degrees"] == 21


def errors(server):
    try:
        run(agent(server, options={"extra_body": {"filter": {"keep": 3}}}), "Hi")
    except litellm.BadRequestError as error:
        assert "filter.keep=3" in str(error)
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        async for event in events_of(agent(server), "Hi", streams=True):
            if text_of(event):
                asyncio.current_task().cancel()

    async def run_it():
        left = asyncio.create_task(leave())
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run_it())


def cancel_by_timeout(server):
    try:
        run(agent(server, options={"timeout": 2, "max_retries": 0}), "Hi")
    except litellm.Timeout:
        return
    raise AssertionError


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    assert text_of(run(agent(server, options=options), server.document)[-1]) == server.text
