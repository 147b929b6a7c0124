"""openai, Python."""

import json
from typing import Literal

import openai
from pydantic import BaseModel, Field

ENVIRONMENT = "agents"
APIS = ("chat", "responses")


class Place(BaseModel):
    city: Literal["Paris", "London"]


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def client(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def ask(server, asked, **options):
    """A reply of either interface."""
    if server.api == "responses":
        return client(server).responses.create(model="builtin", input=asked, **options)
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return client(server).chat.completions.create(model="builtin", messages=messages, **options)


def text_of(server, reply):
    return reply.output_text if server.api == "responses" else reply.choices[0].message.content


def limit(server, tokens=7):
    return {"max_output_tokens" if server.api == "responses" else "max_tokens": tokens}


def tool(server, kind=Place):
    made = openai.pydantic_function_tool(kind, name="weather", description="Tell the weather.")
    if server.api == "responses":
        return {"type": "function", **made["function"]}
    return made


def chat(server):
    assert text_of(server, ask(server, "Hi", **limit(server))) == server.text


def stream(server):
    chunks = list(ask(server, "Hi", stream=True, **limit(server)))
    if server.api == "responses":
        parts = [each.delta for each in chunks if each.type == "response.output_text.delta"]
        assert chunks[-1].type == "response.completed"
    else:
        parts = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(parts) == server.text
    assert len(parts) > 1


def typed(server):
    if server.api == "responses":
        reply = client(server).responses.parse(
            model="builtin", input="Paris?", text_format=Forecast
        )
        assert isinstance(reply.output_parsed, Forecast)
    else:
        messages = [{"role": "user", "content": "Paris?"}]
        reply = client(server).chat.completions.parse(
            model="builtin", messages=messages, response_format=Forecast
        )
        assert isinstance(reply.choices[0].message.parsed, Forecast)


def typed_stream(server):
    if server.api == "responses":
        with client(server).responses.stream(
            model="builtin", input="Paris?", text_format=Forecast
        ) as events:
            assert isinstance(events.get_final_response().output_parsed, Forecast)
    else:
        messages = [{"role": "user", "content": "Paris?"}]
        with client(server).chat.completions.stream(
            model="builtin", messages=messages, response_format=Forecast
        ) as events:
            parsed = events.get_final_completion().choices[0].message.parsed
            assert isinstance(parsed, Forecast)


def forced_call(server):
    reply = ask(server, "Paris?", tools=[tool(server)], tool_choice="required")
    if server.api == "responses":
        [call] = [item for item in reply.output if item.type == "function_call"]
    else:
        call = reply.choices[0].message.tool_calls[0].function
    assert call.name == "weather"
    assert Place.model_validate_json(call.arguments)


def converse(server, **options):
    """The last reply of a conversation with one call."""
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    options["tools"] = [tool(server)]
    reply = ask(server, asked, **options)
    if server.api == "responses":
        [call] = [item for item in reply.output if item.type == "function_call"]
        asked += reply.output
        asked.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": server.weather}
        )
    else:
        message = reply.choices[0].message
        [call] = message.tool_calls
        asked.append(message)
        asked.append({"role": "tool", "tool_call_id": call.id, "content": server.weather})
    return text_of(server, ask(server, asked, **options))


def tools(server):
    assert converse(server) == server.text


def tools_and_schema(server):
    schema = {"name": "forecast", "strict": True, "schema": Forecast.model_json_schema()}
    if server.api == "responses":
        text = converse(server, text={"format": {"type": "json_schema", **schema}})
    else:
        response_format = {"type": "json_schema", "json_schema": schema}
        text = converse(server, response_format=response_format)
    assert json.loads(text)["degrees"] == 21


def errors(server):
    try:
        ask(server, "Hi", extra_body={"filter": {"keep": 3}})
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    with ask(server, "Hi", stream=True) as chunks:
        next(iter(chunks))


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    reply = ask(server, server.document, **options)
    kept = reply.model_extra["filter"]
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
