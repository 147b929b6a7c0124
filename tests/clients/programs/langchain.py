"""LangChain."""

import asyncio
from typing import Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

ENVIRONMENT = "langchain"
APIS = ("chat", "responses")


class Place(BaseModel):
    city: Literal["Paris", "London"]


class Forecast(BaseModel):
    """The weather."""

    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server, **options):
    return ChatOpenAI(
        base_url=server.url,
        api_key="none",
        model="builtin",
        max_retries=0,
        use_responses_api=server.api == "responses",
        **options,
    )


def weather_tool(server):
    @tool
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        return server.weather

    return weather


def chat(server):
    reply = model(server, max_tokens=7).invoke("Hi")
    assert reply.text == server.text
    assert reply.usage_metadata["output_tokens"] == 4


def stream(server):
    parts = list(model(server, max_tokens=7, stream_usage=True).stream("Hi"))
    assert "".join(part.text for part in parts) == server.text
    counts = [part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata]
    assert counts == [4]


def typed_json_schema(server):
    asker = model(server).with_structured_output(Forecast, method="json_schema")
    assert isinstance(asker.invoke("Paris?"), Forecast)


def typed_function_calling(server):
    asker = model(server, max_tokens=300)
    found = asker.with_structured_output(Forecast, method="function_calling").invoke("Paris?")
    assert isinstance(found, Forecast)


def typed_given_json_mode(server):
    asker = model(server).with_structured_output(Forecast, method="json_mode")
    assert asker.invoke("Answer in JSON. Paris?").degrees == 21


def forced_call(server):
    @tool(args_schema=Place)
    def weather(city):
        """Tell the weather in a city."""

    asker = model(server, max_tokens=300).bind_tools([weather], tool_choice="required")
    [call] = asker.invoke("Paris?").tool_calls
    assert call["name"] == "weather"
    assert Place(**call["args"])


def forced_call_stream(server):
    @tool(args_schema=Place)
    def weather(city):
        """Tell the weather in a city."""

    asker = model(server, max_tokens=300).bind_tools([weather], tool_choice="weather")
    whole = None
    for part in asker.stream("Paris?"):
        whole = part if whole is None else whole + part
    assert Place(**whole.tool_calls[0]["args"])


def converse(server, asker):
    messages = [HumanMessage("What is the weather in Paris?")]
    messages.append(asker.invoke(messages))
    [call] = messages[1].tool_calls
    assert call["args"] == {"city": "Paris"}
    messages.append(ToolMessage(server.weather, tool_call_id=call["id"]))
    return asker.invoke(messages)


def tools(server):
    reply = converse(server, model(server).bind_tools([weather_tool(server)]))
    assert reply.text == server.text


def tools_and_schema(server):
    asker = model(server).bind_tools([weather_tool(server)], response_format=Forecast, strict=True)
    assert converse(server, asker).additional_kwargs["parsed"].degrees == 21


def errors(server):
    try:
        model(server, extra_body={"filter": {"keep": 3}}).invoke("Hi")
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        async for part in model(server).astream("Hi"):
            if part.text:
                asyncio.current_task().cancel()

    async def run():
        left = asyncio.create_task(leave())
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run())


def filter(server):
    asker = model(server, extra_body={"filter": {"method": "sieve", "keep": 512}})
    assert asker.invoke(server.document).text == server.text
