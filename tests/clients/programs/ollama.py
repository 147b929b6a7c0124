"""ollama, Python."""

import asyncio
from typing import Literal

import ollama
from pydantic import BaseModel, Field

ENVIRONMENT = "ollama"
APIS = ("chat",)


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The name of a city.
    """
    return f"The weather in {city}."


def ask(server, asked, **options):
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return ollama.Client(host=server.root).chat("builtin", messages, **options)


def chat(server):
    reply = ask(server, "Hi", options={"num_predict": 7})
    assert reply.message.content == server.text
    assert (reply.done, reply.done_reason) == (True, "stop")
    assert reply.prompt_eval_count > 0
    assert 0 < reply.eval_count <= 7
    assert 0 <= reply.eval_duration <= reply.total_duration


def chat_generate(server):
    client = ollama.Client(host=server.root)
    options = ollama.Options(num_predict=7, num_ctx=4096, temperature=0.5, stop=["x"])
    reply = client.generate("builtin", "Hi", system="Be brief.", options=options, keep_alive="5m")
    assert reply.response == server.text


def chat_models(server):
    client = ollama.Client(host=server.root)
    assert [model.model for model in client.list().models] == ["builtin"]
    shown = client.show("builtin")
    assert "tools" in shown.capabilities
    assert any(name.endswith(".context_length") for name in shown.modelinfo)
    client.chat("builtin", [{"role": "user", "content": "Hi"}], options={"num_predict": 7})


def stream(server):
    parts = list(ask(server, "Hi", stream=True, options={"num_predict": 7}, think=False))
    assert "".join(part.message.content for part in parts) == server.text
    assert len([part for part in parts if part.message.content]) > 1
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def stream_generate(server):
    client = ollama.Client(host=server.root)
    parts = client.generate("builtin", "Hi", stream=True, options={"num_predict": 7})
    assert "".join(part.response for part in parts) == server.text


def typed(server):
    for form in (Forecast.model_json_schema(), "json"):
        reply = ask(server, "Paris?", format=form, options={"num_predict": 300})
        if form != "json":
            assert Forecast.model_validate_json(reply.message.content)
        else:
            assert reply.message.content.startswith("{")


def converse(server, **options):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = ask(server, asked, tools=[weather], **options).message
    [call] = message.tool_calls
    assert call.function.name == "weather"
    assert call.function.arguments == {"city": "Paris"}
    asked += [message, {"role": "tool", "content": server.weather, "tool_name": "weather"}]
    return ask(server, asked, tools=[weather], **options).message.content


def tools(server):
    assert converse(server) == server.text


def tools_stream(server):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    parts = list(ask(server, asked, tools=[weather], stream=True))
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.arguments == {"city": "Paris"}
    made = ollama.Message(role="assistant", content="", tool_calls=[call])
    asked += [made, {"role": "tool", "content": server.weather}]
    parts = list(ask(server, asked, tools=[weather], stream=True))
    assert "".join(part.message.content for part in parts) == server.text


def tools_and_schema(server):
    found = converse(server, format=Forecast.model_json_schema())
    assert Forecast.model_validate_json(found).degrees == 21


def errors(server):
    for options, status, said in (
        ({"options": {"temperature": 9}}, 400, "options.temperature=9"),
        ({"format": {"type": "wrong"}}, 400, "format"),
    ):
        for is_streamed in (False, True):
            try:
                list(ask(server, "Hi", stream=is_streamed, **options))
            except ollama.ResponseError as error:
                assert error.status_code == status
                assert said in error.error
            else:
                raise AssertionError(options)
    client = ollama.Client(host=server.root)
    for call, said in ((client.pull, "other models"), (client.show, "other")):
        try:
            call("other")
        except ollama.ResponseError as error:
            assert error.status_code == 404
            assert said in error.error
        else:
            raise AssertionError(said)


def cancel(server):
    async def leave():
        client = ollama.AsyncClient(host=server.root)
        messages = [{"role": "user", "content": "Hi"}]
        async for part in await client.chat("builtin", messages, stream=True):
            if part.message.content:
                asyncio.current_task().cancel()

    async def run():
        left = asyncio.create_task(leave())
        await asyncio.wait([left])
        assert left.cancelled()

    asyncio.run(run())
