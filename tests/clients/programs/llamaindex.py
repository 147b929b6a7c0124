"""LlamaIndex."""

import asyncio
from typing import Literal

import openai
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

ENVIRONMENT = "llamaindex"
APIS = ("chat",)


class Forecast(BaseModel):
    """The weather."""

    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def model(server, **options):
    return OpenAILike(
        api_base=server.url,
        api_key="none",
        model="builtin",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        **options,
    )


def chat(server):
    reply = model(server, max_tokens=7).chat([ChatMessage(role="user", content="Hi")])
    assert reply.message.content == server.text


def stream(server):
    parts = list(model(server, max_tokens=7).stream_chat([ChatMessage(role="user", content="Hi")]))
    assert "".join(part.delta or "" for part in parts) == server.text
    assert len(parts) > 1


def typed_call(server):
    asker = model(server, max_tokens=300).as_structured_llm(Forecast)
    assert isinstance(asker.complete("Paris?").raw, Forecast)


def typed_json_schema(server):
    asker = model(server, max_tokens=300, should_use_structured_outputs=True)
    assert isinstance(asker.as_structured_llm(Forecast).complete("Paris?").raw, Forecast)


def forced_call(server):
    program = FunctionCallingProgram.from_defaults(
        output_cls=Forecast, llm=model(server, max_tokens=300), prompt_template_str="Paris?"
    )
    assert isinstance(program(), Forecast)


def tools(server):
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        return server.weather

    async def ask():
        agent = FunctionAgent(tools=[weather], llm=model(server), streaming=False)
        return await agent.run("What is the weather in Paris?")

    assert asyncio.run(ask()).response.content == server.text


def tools_stream(server):
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        return server.weather

    async def ask():
        agent = FunctionAgent(tools=[weather], llm=model(server))
        return await agent.run("What is the weather in Paris?")

    assert asyncio.run(ask()).response.content == server.text


def errors(server):
    try:
        model(server).complete("Hi", extra_body={"filter": {"keep": 3}})
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        parts = await model(server).astream_complete("Hi")
        async for part in parts:
            if part.delta:
                asyncio.current_task().cancel()

    async def run():
        left = asyncio.create_task(leave())
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run())


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    reply = model(server, additional_kwargs=options).complete(server.document)
    kept = reply.raw.model_extra["filter"]
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
