"""Pydantic AI."""

import asyncio
import contextlib
from typing import Literal

from pydantic import BaseModel, Field, TypeAdapter
from pydantic_ai import (
    Agent,
    ModelHTTPError,
    ModelRequest,
    NativeOutput,
    PromptedOutput,
    ToolCallPart,
    ToolOutput,
)
from pydantic_ai.direct import model_request_sync
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

ENVIRONMENT = "agents"
APIS = ("chat", "responses")


class Place(BaseModel):
    city: Literal["Paris", "London"]


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server):
    kind = OpenAIResponsesModel if server.api == "responses" else OpenAIChatModel
    return kind("builtin", provider=OpenAIProvider(base_url=server.url, api_key="none"))


def agent(server, **options):
    return Agent(model(server), retries=0, **options)


def with_tool(server, **options):
    asker = agent(server, **options)

    @asker.tool_plain
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        assert city == "Paris"
        return server.weather

    return asker


def chat(server):
    result = agent(server, instructions="Be brief.").run_sync(
        "Hi", model_settings={"max_tokens": 7}
    )
    assert result.output == server.text
    assert result.usage.output_tokens == 4


def chat_history(server):
    asker = agent(server)
    first = asker.run_sync("Hi", model_settings={"max_tokens": 7})
    second = asker.run_sync("And now?", message_history=first.all_messages())
    assert second.output == server.text


def stream(server):
    async def read():
        async with agent(server).run_stream("Hi", model_settings={"max_tokens": 7}) as result:
            parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
            assert "".join(parts) == server.text
            assert len(parts) > 1
            assert result.usage.output_tokens == 4

    asyncio.run(read())


def typed(server):
    answer = agent(server, output_type=ToolOutput(Forecast)).run_sync("Paris?").output
    assert isinstance(answer, Forecast)


def typed_native(server):
    answer = agent(server, output_type=NativeOutput(Forecast)).run_sync("Paris?").output
    assert isinstance(answer, Forecast)


def typed_given_prompted(server):
    """The schema stands in the prompt, and the format is any JSON object."""
    answer = agent(server, output_type=PromptedOutput(Forecast)).run_sync("Paris?").output
    assert answer.degrees == 21


def typed_stream(server):
    async def read():
        async with agent(server, output_type=NativeOutput(Forecast)).run_stream("Paris?") as result:
            assert isinstance(await result.get_output(), Forecast)

    asyncio.run(read())


def forced_call(server):
    parameters = TypeAdapter(Place).json_schema()
    tool = ToolDefinition(
        name="weather", description="Tells it.", parameters_json_schema=parameters
    )
    reply = model_request_sync(
        model(server),
        [ModelRequest.user_text_prompt("Paris?")],
        model_settings={"tool_choice": ["weather"]},
        model_request_parameters=ModelRequestParameters(function_tools=[tool]),
    )
    [call] = [part for part in reply.parts if isinstance(part, ToolCallPart)]
    assert call.tool_name == "weather"
    assert Place(**call.args_as_dict())


def tools(server):
    result = with_tool(server).run_sync("What is the weather in Paris?")
    assert result.output == server.text


def tools_stream(server):
    async def read():
        async with with_tool(server).run_stream("What is the weather in Paris?") as result:
            assert await result.get_output() == server.text

    asyncio.run(read())


def tools_and_schema(server):
    asker = with_tool(server, output_type=NativeOutput(Forecast))
    assert asker.run_sync("What is the weather in Paris?").output.degrees == 21


def errors(server):
    settings = {"extra_body": {"filter": {"keep": 3}}}
    try:
        agent(server).run_sync("Hi", model_settings=settings)
    except ModelHTTPError as error:
        assert error.status_code == 400
        assert error.body["param"] == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        async with agent(server).run_stream("Hi") as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                break

    async def run():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leave(), 5)

    asyncio.run(run())


def filter(server):
    settings = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    result = agent(server).run_sync(server.document, model_settings=settings)
    assert result.output == server.text
