"""smolagents."""

import gc
import json

import openai
from smolagents import ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import CODEAGENT_RESPONSE_FORMAT

ENVIRONMENT = "agents"
APIS = ("chat",)
ANSWERS = {
    "tools": [
        '{"name": "weather", "arguments": {"city": "Paris"}}',
        '{"name": "final_answer", "arguments": {"answer": "Héllo 🌍!"}}',
    ],
    "tools_stream": [
        '{"name": "weather", "arguments": {"city": "Paris"}}',
        '{"name": "final_answer", "arguments": {"answer": "Héllo 🌍!"}}',
    ],
    "tools_and_schema": [
        '{"thought": "Look.", "code": "print(weather(city=\'Paris\'))"}',
        '{"thought": "Said.", "code": "final_answer(weather(city=\'Paris\'))"}',
    ],
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "London"]},
        "degrees": {"type": "integer", "minimum": -20, "maximum": 40},
    },
    "required": ["city", "degrees"],
}


def model(server, **options):
    return OpenAIModel(
        "builtin", server.url, "none", client_kwargs={"max_retries": 0}, retry=False, **options
    )


def said(text):
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


def weather_tool(server):
    @tool
    def weather(city: str) -> str:
        """Tell the weather in a city.

        Args:
            city: the city's name
        """
        return server.weather

    return weather


def chat(server):
    reply = model(server, max_tokens=7).generate(said("Hi"))
    assert reply.content == server.text
    assert reply.token_usage.output_tokens == 4


def stream(server):
    parts = list(model(server, max_tokens=7).generate_stream(said("Hi")))
    assert "".join(part.content or "" for part in parts) == server.text
    assert [part.token_usage.output_tokens for part in parts if part.token_usage] == [4]


def typed(server):
    shape = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}
    reply = model(server, max_tokens=300).generate(said("Paris?"), response_format=shape)
    assert set(json.loads(reply.content)) == {"city", "degrees"}


def typed_code_agent(server):
    """Its own schema has two texts, which the built-in model never ends."""
    reply = model(server, max_tokens=60).generate(
        said("Paris?"), response_format=CODEAGENT_RESPONSE_FORMAT
    )
    assert reply.content.startswith('{"thought"')


def forced_call(server):
    reply = model(server, max_tokens=300).generate(
        said("Paris?"), tools_to_call_from=[weather_tool(server)]
    )
    assert reply.tool_calls[0].function.name == "weather"


def tools(server):
    """Every turn must call: the last call is `final_answer`."""
    agent = ToolCallingAgent(
        tools=[weather_tool(server)], model=model(server), max_steps=3, verbosity_level=0
    )
    assert agent.run("What is the weather in Paris?") == server.text


def tools_stream(server):
    agent = ToolCallingAgent(
        tools=[weather_tool(server)],
        model=model(server),
        max_steps=3,
        verbosity_level=0,
        stream_outputs=True,
    )
    assert agent.run("What is the weather in Paris?") == server.text


def tools_and_schema(server):
    """The code agent calls tools from code that stands in a typed answer."""
    agent = CodeAgent(
        tools=[weather_tool(server)],
        model=model(server),
        max_steps=3,
        verbosity_level=0,
        use_structured_outputs_internally=True,
    )
    assert agent.run("What is the weather in Paris?") == server.weather


def errors(server):
    try:
        model(server, extra_body={"filter": {"keep": 3}}).generate(said("Hi"))
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError


def cancel(server):
    parts = model(server).generate_stream(said("Hi"))
    next(parts)
    parts.close()
    gc.collect()  # it has no way to end a stream but to forget it


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    reply = model(server, **options).generate(said(server.document))
    assert reply.content == server.text
    kept = reply.raw.model_extra["filter"]
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
