"""openai, Python, with OpenTelemetry."""

import gc

import openai
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ENVIRONMENT = "agents"
APIS = ("chat",)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SPANS = InMemorySpanExporter()
METRICS = InMemoryMetricReader()


def instrument():
    traces = TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(SPANS))
    metrics = MeterProvider(metric_readers=[METRICS])
    OpenAIInstrumentor().instrument(tracer_provider=traces, meter_provider=metrics)


instrument()


def create(server, asked, **options):
    SPANS.clear()
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    client = openai.OpenAI(base_url=server.url, api_key="none")
    return client.chat.completions.create(model="builtin", messages=messages, **options)


def span():
    """The attributes of the one span since the last request."""
    [found] = SPANS.get_finished_spans()
    assert found.name == "chat builtin"
    told = dict(found.attributes)
    assert told["gen_ai.request.model"] == "builtin"
    return told


def check_answer(told):
    assert told["gen_ai.response.model"] == "builtin"
    assert told["gen_ai.response.id"].startswith("chatcmpl-")
    assert told["gen_ai.request.max_tokens"] == 7


def chat(server):
    """The span has what the answer says of itself, and the metrics have its tokens."""
    reply = create(server, "Hi", max_tokens=7)
    assert reply.choices[0].message.content == server.text
    told = span()
    check_answer(told)
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.usage.input_tokens"] == reply.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == 4
    [resource] = METRICS.get_metrics_data().resource_metrics
    names = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    assert {"gen_ai.client.operation.duration", "gen_ai.client.token.usage"} <= names


def stream(server):
    """Spans of streams have no finish reasons: it does not collect them."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(server, "Hi", max_tokens=7, **options))
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == server.text
    told = span()
    check_answer(told)
    assert told["gen_ai.usage.output_tokens"] == 4


def tools(server):
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    message = create(server, asked, tools=[TOOL]).choices[0].message
    assert span()["gen_ai.response.finish_reasons"] == ("tool_calls",)
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": server.weather,
    }
    reply = create(server, [*asked, message, result], tools=[TOOL])
    assert reply.choices[0].message.content == server.text
    assert span()["gen_ai.response.finish_reasons"] == ("stop",)


def errors(server):
    try:
        create(server, "Hi", extra_body={"filter": {"keep": 3}})
    except openai.BadRequestError as error:
        assert error.param == "filter.keep"
    else:
        raise AssertionError
    assert "openai.BadRequestError" in span()["error.type"]


def cancel(server):
    with create(server, "Hi", stream=True) as chunks:
        next(iter(chunks))
    del chunks
    gc.collect()
    span()


def filter(server):
    extra_body = {"filter": {"method": "sieve", "keep": 512}}
    reply = create(server, server.document, extra_body=extra_body)
    kept = reply.model_extra["filter"]
    assert kept["kept_tokens"] - kept["protected_tokens"] == 512
    assert span()["gen_ai.usage.input_tokens"] == reply.usage.prompt_tokens
