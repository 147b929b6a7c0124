"""DSPy."""

import asyncio
from typing import Literal

import dspy
import litellm
from dspy.utils.exceptions import LMInvalidRequestError

ENVIRONMENT = "litellm"
APIS = ("chat", "responses")
ANSWERS = {
    "stream": ["[[ ## answer ## ]]\nHéllo 🌍!\n\n[[ ## completed ## ]]"],
    "typed_given_chat_adapter": [
        "[[ ## city ## ]]\nParis\n\n[[ ## degrees ## ]]\n21\n\n[[ ## completed ## ]]"
    ],
    "tools": [
        '{"next_thought": "Look.", "next_tool_name": "weather",'
        ' "next_tool_args": {"city": "Paris"}}',
        '{"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": {}}',
        '{"reasoning": "It was said.", "answer": "Héllo 🌍!"}',
    ],
    "tools_and_schema": [
        '{"next_thought": "Look.", "next_tool_name": "weather",'
        ' "next_tool_args": {"city": "Paris"}}',
        '{"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": {}}',
        '{"reasoning": "It was said.", "city": "Paris", "degrees": 21}',
    ],
}


# What it does not know to take schemas is asked without them.
litellm.register_model(
    {
        "openai/builtin": {
            "litellm_provider": "openai",
            "mode": "chat",
            "supports_function_calling": True,
            "supports_response_schema": True,
        }
    }
)


class Ask(dspy.Signature):
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Forecast(dspy.Signature):
    question: str = dspy.InputField()
    city: Literal["Paris", "London"] = dspy.OutputField()
    is_dry: bool = dspy.OutputField()


class Degrees(dspy.Signature):
    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    degrees: int = dspy.OutputField()


def model(server, **options):
    kind = "responses" if server.api == "responses" else "chat"
    return dspy.LM(
        "openai/builtin",
        model_type=kind,
        api_base=server.url,
        api_key="none",
        cache=False,
        num_retries=0,
        **options,
    )


def chat(server):
    [answer] = model(server, max_tokens=7)("Hi")
    assert (answer["text"] if isinstance(answer, dict) else answer) == server.text


def stream(server):
    """Its streams show one field of the answer, without the marks between fields."""

    async def read():
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        asker = dspy.streamify(dspy.Predict(Ask), stream_listeners=[listener])
        with dspy.context(lm=model(server, max_tokens=7)):
            return [part async for part in asker(question="Hi")]

    *parts, prediction = asyncio.run(read())
    assert "".join(part.chunk for part in parts) == server.text == prediction.answer
    assert len(parts) > 1


def typed_json_adapter(server):
    lm = model(server, max_tokens=300, engine="litellm")
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Forecast)(question="What is the weather in Paris?")
    assert found.city in ("Paris", "London")
    assert found.is_dry in (True, False)


def typed_given_chat_adapter(server):
    with dspy.context(lm=model(server)):
        assert dspy.Predict(Degrees)(question="What is the weather in Paris?").degrees == 21


def weather_of(server):
    def weather(city: str) -> str:
        """Tell the weather in a city."""
        return server.weather

    return weather


def tools(server):
    """Its agent asks for typed answers that name the tool."""
    with dspy.context(lm=model(server), adapter=dspy.JSONAdapter()):
        agent = dspy.ReAct(Ask, tools=[weather_of(server)], max_iters=3)
        found = agent(question="What is the weather in Paris?")
    assert found.answer == server.text


def tools_and_schema(server):
    with dspy.context(lm=model(server), adapter=dspy.JSONAdapter()):
        agent = dspy.ReAct(Degrees, tools=[weather_of(server)], max_iters=3)
        found = agent(question="What is the weather in Paris?")
    assert found.degrees == 21


def errors(server):
    try:
        model(server, extra_body={"filter": {"keep": 3}})("Hi")
    except LMInvalidRequestError as error:
        assert "filter.keep=3" in str(error)
    else:
        raise AssertionError


def cancel(server):
    async def leave():
        try:
            await asyncio.wait_for(model(server).acall("Hi"), 2)
        except TimeoutError:
            return
        raise AssertionError

    asyncio.run(leave())


def filter(server):
    lm = model(server, extra_body={"filter": {"method": "sieve", "keep": 512}})
    lm(server.document)
    report = lm.history[-1]["response"].filter
    kept = report
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
