"""OpenAI Agents SDK."""

import asyncio
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIProvider,
    RunConfig,
    Runner,
    function_tool,
)
from pydantic import BaseModel, Field

ENVIRONMENT = "agents"
APIS = ("chat", "responses")


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def config(server, **settings):
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client, use_responses=server.api == "responses")
    return RunConfig(
        model="builtin",
        model_provider=provider,
        model_settings=ModelSettings(**settings),
        tracing_disabled=True,
    )


def agent(**options):
    return Agent(name="Asker", instructions="Be brief.", **options)


def run(server, text, asker, **settings):
    return Runner.run_sync(asker, text, run_config=config(server, **settings), max_turns=3)


def weather_tool(server):
    @function_tool
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        assert city == "Paris"
        return server.weather

    return weather


def chat(server):
    result = run(server, "Hi", agent(), max_tokens=7)
    assert result.final_output == server.text
    assert result.raw_responses[0].usage.output_tokens == 4


def chat_history(server):
    first = run(server, "Hi", agent(), max_tokens=7)
    history = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
    assert run(server, history, agent()).final_output == server.text


def read_stream(server, asker, **settings):
    async def read():
        result = Runner.run_streamed(asker, "Hi", run_config=config(server, **settings))
        kinds = []
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                kinds.append(event.data.type)
                if event.data.type == "response.output_text.delta":
                    text += event.data.delta
        return text, kinds, result

    return asyncio.run(read())


def stream(server):
    text, kinds, result = read_stream(server, agent(), max_tokens=7)
    assert text == server.text == result.final_output
    assert kinds.count("response.output_text.delta") > 1
    assert kinds[-1] == "response.completed"


def typed(server):
    result = run(server, "Paris?", agent(output_type=Forecast))
    assert isinstance(result.final_output, Forecast)


def typed_stream(server):
    _, _, result = read_stream(server, agent(output_type=Forecast))
    assert isinstance(result.final_output, Forecast)


def forced_call(server):
    called = []

    @function_tool
    def weather(city: Literal["Paris", "London"]) -> str:
        """Tell the weather in a city."""
        called.append(city)
        return server.weather

    asker = agent(tools=[weather], tool_use_behavior="stop_on_first_tool")
    result = run(server, "Paris?", asker, tool_choice="required")
    assert result.final_output == server.weather
    assert called[0] in ("Paris", "London")


def tools(server):
    asker = agent(tools=[weather_tool(server)])
    assert run(server, "What is the weather in Paris?", asker).final_output == server.text


def tools_stream(server):
    _, kinds, result = read_stream(server, agent(tools=[weather_tool(server)]))
    assert result.final_output == server.text
    assert "response.function_call_arguments.done" in kinds or server.api == "chat"


def tools_and_schema(server):
    asker = agent(tools=[weather_tool(server)], output_type=Forecast)
    assert run(server, "What is the weather in Paris?", asker).final_output.degrees == 21


def errors(server):
    try:
        run(server, "Hi", agent(), extra_body={"filter": {"keep": 3}})
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def read():
        result = Runner.run_streamed(agent(), "Hi", run_config=config(server))
        async for event in result.stream_events():
            data = getattr(event, "data", None)
            if getattr(data, "type", "") == "response.output_text.delta":
                result.cancel()

    asyncio.run(read())


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    result = run(server, server.document, agent(), extra_body=extra_body)
    assert result.final_output == server.text
