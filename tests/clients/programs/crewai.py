"""CrewAI."""

import asyncio
import contextlib
from typing import Literal

import openai
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel, Field

ENVIRONMENT = "crewai"
APIS = ("chat", "responses")
# fault of the client: chat_forced_call: beside tools it always sends `tool_choice: "auto"`
QUESTION = "What is the weather in Paris?"


class Place(BaseModel):
    city: Literal["Paris", "London"]


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server, **options):
    api = "responses" if server.api == "responses" else "completions"
    return LLM(
        model="builtin",
        provider="openai",
        base_url=server.url,
        api_key="none",
        api=api,
        **options,
    )


def agent(asker, tools=()):
    return Agent(role="asker", goal="Answer.", backstory="Be brief.", llm=asker, tools=list(tools))


def weather_tool(server):
    @tool("weather")
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        assert city == "Paris"
        return server.weather

    return weather


def chat(server):
    assert model(server, max_tokens=7).call("Hi") == server.text


def chat_crew(server):
    asker = agent(model(server, max_tokens=7))
    task = Task(description="Say hi.", expected_output="A word.", agent=asker)
    result = Crew(agents=[asker], tasks=[task]).kickoff()
    assert result.raw == server.text
    assert result.token_usage.completion_tokens == 4


def stream(server):
    """Parts come to those who wait for a crew's result."""
    asker = agent(model(server, max_tokens=7, stream=True))
    task = Task(description="Say hi.", expected_output="A word.", agent=asker)
    streaming = Crew(agents=[asker], tasks=[task], stream=True).kickoff()
    parts = [chunk.content for chunk in streaming]
    assert "".join(parts) == server.text == streaming.result.raw
    assert len(parts) > 1


def typed(server):
    found = model(server).call("Paris?", response_model=Forecast)
    assert isinstance(found, Forecast) or Forecast.model_validate_json(found)


def forced_call(server):
    """It has no such option; further fields of the body are taken."""
    parameters = Place.model_json_schema()
    function = {"name": "weather", "description": "Tell it.", "parameters": parameters}
    asker = model(server, additional_params={"tool_choice": "required"})
    called = []

    def weather(city):
        called.append(city)
        return city

    asker.call(
        "Paris?",
        tools=[{"type": "function", "function": function}],
        available_functions={"weather": weather},
    )
    assert called[0] in ("Paris", "London")


def tools(server):
    asker = agent(model(server), [weather_tool(server)])
    assert asker.kickoff(QUESTION).raw == server.text


def tools_and_schema(server):
    asker = agent(model(server), [weather_tool(server)])
    result = asker.kickoff(QUESTION, response_format=Forecast)
    assert result.pydantic.degrees == 21


def errors(server):
    wrong = {"extra_body": {"filter": {"keep": 3}}}
    try:
        model(server, additional_params=wrong).call("Hi")
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def run():
        asking = asyncio.create_task(model(server).acall("Hi"))
        await asyncio.sleep(2)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert asking.cancelled()

    asyncio.run(run())


def cancel_by_timeout(server):
    try:
        model(server, timeout=2, max_retries=0).call("Hi")
    except (openai.APITimeoutError, ConnectionError):
        return
    raise AssertionError


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    assert model(server, additional_params=options).call(server.document) == server.text
