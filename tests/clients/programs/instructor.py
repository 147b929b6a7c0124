"""Instructor."""

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field

ENVIRONMENT = "litellm"
APIS = ("chat",)
ANSWERS = {
    "typed_given_md_json": ['```json\n{"city": "Paris", "degrees": 21}\n```'],
    "typed_given_parallel_tools": [
        '<tool_call>{"name": "Forecast", "arguments": {"city": "Paris", "degrees": 21}}'
        '</tool_call>\n<tool_call>{"name": "Forecast", "arguments": {"city": "London", '
        '"degrees": 15}}</tool_call>'
    ],
}


class Forecast(BaseModel):
    city: Literal["Paris", "London"]
    degrees: int = Field(ge=-20, le=40)


def ask(server, mode, kind=Forecast, text="Paris?", **options):
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode).create(
        model="builtin",
        messages=[{"role": "user", "content": text}],
        response_model=kind,
        max_retries=0,
        **options,
    )


def chat(server):
    """Without a response model it hands the SDK's reply through."""
    reply = ask(server, Mode.TOOLS, kind=None, text="Hi", max_tokens=7)
    assert reply.choices[0].message.content == server.text


def typed_tools(server):
    assert isinstance(ask(server, Mode.TOOLS, max_tokens=300), Forecast)


def typed_tools_strict(server):
    assert isinstance(ask(server, Mode.TOOLS_STRICT, max_tokens=300), Forecast)


def typed_functions(server):
    assert isinstance(ask(server, Mode.FUNCTIONS, max_tokens=300), Forecast)


def typed_json_schema(server):
    assert isinstance(ask(server, Mode.JSON_SCHEMA, max_tokens=300), Forecast)


def typed_json_o1(server):
    assert isinstance(ask(server, Mode.JSON_O1, max_tokens=300), Forecast)


def typed_given_json(server):
    """The schema stands in the prompt, and the format is any JSON object."""
    assert ask(server, Mode.JSON).degrees == 21


def typed_given_md_json(server):
    assert ask(server, Mode.MD_JSON).degrees == 21


def typed_given_parallel_tools(server):
    found = list(ask(server, Mode.PARALLEL_TOOLS, kind=Iterable[Forecast]))
    assert [each.city for each in found] == ["Paris", "London"]


def typed_responses_tools(server):
    assert isinstance(ask(server, Mode.RESPONSES_TOOLS), Forecast)


def typed_responses_tools_with_inbuilt(server):
    assert isinstance(ask(server, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS), Forecast)


def typed_stream(server):
    """Parts of the answer, each with what has come so far."""
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    parts = list(
        instructor.from_openai(client).create_partial(
            model="builtin",
            messages=[{"role": "user", "content": "Paris?"}],
            response_model=Forecast,
            max_tokens=300,
        )
    )
    assert Forecast(**parts[-1].model_dump())


def forced_call(server):
    _, reply = instructor.from_openai(
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    ).create_with_completion(
        model="builtin",
        messages=[{"role": "user", "content": "Paris?"}],
        response_model=Forecast,
        max_tokens=300,
    )
    assert reply.choices[0].message.tool_calls[0].function.name == "Forecast"


def errors(server):
    try:
        ask(server, Mode.TOOLS, extra_body={"filter": {"keep": 3}})
    except Exception as error:
        cause = error
        while not isinstance(cause, openai.BadRequestError):
            cause = cause.__cause__ or cause.__context__
        assert cause.param == "filter.keep"
    else:
        raise AssertionError


def filter(server):
    options = {"extra_body": {"filter": {"method": "sieve", "keep": 512}}}
    reply = ask(server, Mode.TOOLS, kind=None, text=server.document, **options)
    kept = reply.model_extra["filter"]
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
