"""LangGraph."""

import asyncio
import json
from typing import Literal

import openai
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel, Field

ENVIRONMENT = "langchain"
APIS = ("chat", "responses")
QUESTION = "What is the weather in Paris?"


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server, **options):
    return ChatOpenAI(
        base_url=server.url,
        api_key="none",
        model="builtin",
        use_responses_api=server.api == "responses",
        **options,
    )


def graph(asker, tools=()):
    """A model, and its tools for as long as it calls one."""

    async def call_model(state):
        return {"messages": [await asker.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", call_model)
    builder.add_edge(START, "model")
    if tools:
        builder.add_node("tools", ToolNode(tools))
        builder.add_conditional_edges("model", tools_condition)
        builder.add_edge("tools", "model")
    return builder.compile()


def asked(text):
    return {"messages": [("user", text)]}


def run(compiled, text):
    return asyncio.run(compiled.ainvoke(asked(text)))["messages"]


def weather_tool(server):
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        assert city == "Paris"
        return server.weather

    return weather


def chat(server):
    assert run(graph(model(server, max_tokens=7)), "Hi")[-1].text == server.text


async def tokens(compiled, text):
    async for part, _ in compiled.astream(asked(text), stream_mode="messages"):
        if part.type == "AIMessageChunk":
            yield part.text


def streamed(compiled, text):
    async def read():
        return [part async for part in tokens(compiled, text)]

    return asyncio.run(read())


def stream(server):
    parts = streamed(graph(model(server, max_tokens=7)), "Hi")
    assert "".join(parts) == server.text
    assert len(parts) > 1


def typed(server):
    asker = model(server).with_structured_output(Forecast)

    def call_model(state):
        found = asker.invoke(state["messages"])
        return {"messages": [("assistant", found.model_dump_json())]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", call_model)
    builder.add_edge(START, "model")
    last = builder.compile().invoke(asked("Paris?"))["messages"][-1]
    assert Forecast.model_validate_json(last.text)


def forced_call(server):
    called = []

    def weather(city: Literal["Paris", "London"]) -> str:
        """Tell the weather in a city."""
        called.append(city)
        return server.weather

    asker = model(server).bind_tools([weather], tool_choice="required")
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [asker.invoke(state["messages"])]})
    builder.add_node("tools", ToolNode([weather]))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    last = builder.compile().invoke(asked("Paris?"))["messages"][-1]
    assert last.text == server.weather
    assert called[0] in ("Paris", "London")


def tools(server):
    made = [weather_tool(server)]
    messages = run(graph(model(server).bind_tools(made), made), QUESTION)
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == server.text


def tools_stream(server):
    made = [weather_tool(server)]
    parts = streamed(graph(model(server).bind_tools(made), made), QUESTION)
    assert "".join(parts) == server.text


def tools_and_schema(server):
    made = [weather_tool(server)]
    asker = model(server).bind_tools(made, response_format=Forecast, strict=True)
    last = run(graph(asker, made), QUESTION)[-1]
    assert last.additional_kwargs["parsed"].degrees == 21


def errors(server):
    try:
        run(graph(model(server, extra_body={"filter": {"keep": 3}})), "Hi")
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def leave(started):
        async for part in tokens(graph(model(server)), "Hi"):
            if part:
                started.set()

    async def run_it():
        started = asyncio.Event()
        left = asyncio.create_task(leave(started))
        await asyncio.wait_for(started.wait(), 20)
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run_it())


def cancel_by_timeout(server):
    try:
        run(graph(model(server, timeout=2, max_retries=0)), "Hi")
    except openai.APITimeoutError:
        return
    raise AssertionError


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    asker = model(server, extra_body=extra_body, include_response_headers=True)
    last = run(graph(asker), server.document)[-1]
    assert last.text == server.text
    report = json.loads(last.response_metadata["headers"]["x-gemserve-filter"])
    assert report["kept_tokens"] - report["protected_tokens"] == 512
