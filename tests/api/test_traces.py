"""Traces: one span for each request, and in it what the engine did."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.api.telemetry.traces import Traces, open_traces
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.contract.events import Filtered, Finished
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import build_core
from gemserve.errors import ConfigError
from tests.fakes import CHAT, COMPLETIONS, FILTERED, FakeCore, data_of, serving_over

sdk = pytest.importorskip("opentelemetry.sdk.trace")
pytestmark = pytest.mark.anyio
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Spans = dict[str, list[Any]]
DOCUMENT = " ".join(
    f"The colour of box {n} is blue, and that of lid {n} is red." for n in range(90)
)


class Recorder:
    """A provider whose spans stay in this process."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self.provider = sdk.TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def take(self) -> Spans:
        """The finished spans by name, which is the kind of a request's own."""
        spans: Spans = {}
        for span in self._exporter.get_finished_spans():
            spans.setdefault(span.name, []).append(span)
        self._exporter.clear()
        return spans


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.provider.shutdown()


def client_of(serving: Any, recorder: Recorder) -> httpx.AsyncClient:
    app = create_app(serving, Traces(recorder.provider))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)


def seconds(span: Any) -> float:
    return (span.end_time - span.start_time) / 1e9


async def test_the_parts_of_a_filtered_and_cached_chat_add_up(recorder: Recorder) -> None:
    """With a real engine: otherwise a span could begin at any time that looks right."""
    core = build_core(
        ModelConfig(model="builtin", device="cpu"),
        EngineConfig(filter_min_tokens=64, filter_keep=128, kv_memory_bytes=128 << 20),
    )
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    found, reports = [], []
    try:
        async with client_of(serving, recorder) as client:
            for question in ("What is the colour of box 7?", "What is the colour of lid 30?"):
                message = {"role": "user", "content": f"{DOCUMENT}\n\n{question}"}
                body = {"model": "builtin", "messages": [message], "max_tokens": 16, "stream": True}
                body |= {"ignore_eos": True}
                body |= {"filter": {"method": "sieve", "fallback": False, "window": "off"}}
                reply = await client.post(
                    CHAT,
                    json=body,
                    headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "me"},
                )
                assert reply.status_code == 200
                found.append(recorder.take())
                reports.append(data_of(reply)[0]["filter"])
    finally:
        serving.engine.stop()
    for spans in found:
        assert set(spans) == {"chat builtin", "queue", "filter", "prefill", "decode"}
        (request,) = spans.pop("chat builtin")
        assert f"{request.context.trace_id:032x}" == TRACE_ID
        assert f"{request.parent.span_id:016x}" == PARENT_ID
        parts = [span for (span,) in spans.values()]
        for span in parts:
            assert span.parent.span_id == request.context.span_id
            assert request.start_time <= span.start_time <= span.end_time <= request.end_time
        whole = seconds(request)
        assert sum(map(seconds, parts)) == pytest.approx(whole, rel=0.05, abs=0.02)
        assert request.attributes["gen_ai.operation.name"] == "chat"
        assert request.attributes["gen_ai.usage.output_tokens"] == 16
        assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert request.attributes["gemserve.request_id"] == "me"
    first, second = (spans["filter"][0].attributes for spans in found)
    always = reports[0]["protected_tokens"]  # the template and the question
    assert 0 < always < 32
    # whole passages of at most 32 tokens, as many as fit
    assert 128 - 32 < first["gemserve.filter.kept_tokens"] - always <= 128
    for spans, report in zip(found, reports, strict=True):
        shown = spans["filter"][0].attributes
        assert shown["gemserve.filter.kept_tokens"] == report["kept_tokens"]
    assert first["gemserve.filter.cached_tokens"] == 0
    assert second["gemserve.filter.cached_tokens"] > 1000
    assert not any("window" in name for name in first)  # the prompt was read as one sequence
    texts = json.dumps(
        [span.to_json() for spans in found for some in spans.values() for span in some]
    )
    assert "colour" not in texts


async def test_segments_are_attributes_of_the_filter(recorder: Recorder, tokenizer: Any) -> None:
    report = FilterReport(
        method="sieve",
        applied=True,
        reason=None,
        layer=2,
        prompt_tokens=500,
        kept_tokens=64,
        cached_tokens=210,
        filter_ms=5.0,
        selection=None,
        window=512,
        windows=7,
        cached_windows=3,
    )
    now_s = time.monotonic()
    filtered = Filtered(report=report, started_s=now_s, filtered_s=now_s)
    serving = serving_over(FakeCore(filtered, "a"), tokenizer)
    try:
        async with client_of(serving, recorder) as client:
            await client.post(COMPLETIONS, json={"model": "fake", "prompt": "Hello there"})
    finally:
        serving.engine.stop()
    (span,) = recorder.take()["filter"]
    found = {k: v for k, v in span.attributes.items() if "window" in k}
    assert found == {
        "gemserve.filter.window": 512,
        "gemserve.filter.windows": 7,
        "gemserve.filter.cached_windows": 3,
    }


async def test_choices_share_one_request_span(recorder: Recorder, tokenizer: Any) -> None:
    """Each closed the span of the request, and the prompt counted once for each choice."""
    serving = serving_over(FakeCore(FILTERED, "a", "b"), tokenizer)
    try:
        async with client_of(serving, recorder) as client:
            await client.post(COMPLETIONS, json={"model": "fake", "prompt": "Hello there", "n": 3})
    finally:
        serving.engine.stop()
    spans = recorder.take()
    (request,) = spans["text_completion fake"]
    assert len(spans["queue"]) == len(spans["decode"]) == 3
    assert "filter" not in spans  # the prompt is short
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.usage.input_tokens"] < 6
    assert request.attributes["gen_ai.request.choice.count"] == 3
    assert request.parent is None


async def test_a_failed_request_is_an_error(recorder: Recorder, tokenizer: Any) -> None:
    serving = serving_over(FakeCore(FILTERED, "a", ValueError("secret")), tokenizer)
    try:
        async with client_of(serving, recorder) as client:
            await client.post(COMPLETIONS, json={"model": "fake", "prompt": "Hello there"})
    finally:
        serving.engine.stop()
    (request,) = recorder.take()["text_completion fake"]
    assert not request.status.is_ok
    assert request.attributes["error.type"] == "engine_error"
    assert "secret" not in request.to_json()


async def test_a_refusal_after_waiting_is_no_error(recorder: Recorder, tokenizer: Any) -> None:
    """Error rates that are made of traces rose with every overload."""
    late = Finished(reason="error", completion_tokens=0, error="it waited", late="not_begun")
    serving = serving_over(FakeCore(late), tokenizer)
    try:
        async with client_of(serving, recorder) as client:
            reply = await client.post(COMPLETIONS, json={"model": "fake", "prompt": "Hello there"})
            assert reply.status_code == 503
    finally:
        serving.engine.stop()
    (request,) = recorder.take()["text_completion fake"]
    assert request.status.is_unset
    assert request.attributes["error.type"] == "wait_too_long"


def test_traces_are_wanted_by_the_setting_or_by_variables() -> None:
    assert open_traces("auto", {}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert open_traces("off", endpoint) is None
    assert open_traces("auto", {**endpoint, "OTEL_SDK_DISABLED": "true"}) is None
    assert open_traces("on", {"OTEL_TRACES_EXPORTER": "none"}) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
    ],
)
def test_another_way_out_is_refused(variables: dict[str, str]) -> None:
    """Spans left by OTLP over HTTP, whatever else was wanted."""
    name = [*variables][-1]
    with pytest.raises(ConfigError, match=f"{name}={variables[name]}: must be"):
        open_traces("auto", variables)


def test_spans_leave_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a collector's address, and with what was still to be sent when the server stops."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            received.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{collector.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
        traces = open_traces("auto")
        assert traces is not None
        scope = {"path": CHAT, "headers": [], "state": {"request_id": "me"}}
        request = Request(
            request_id="me",
            prompt_ids=[1],
            sampling=SamplingParams(max_tokens=1),
            filter=FilterParams(method="none", keep=16),
        )
        (observer,) = traces.begin(scope, [request], model="fake", arrived_s=time.monotonic())
        observer.close()
        traces.shut_down()
        collector.shutdown()
    ((path, content),) = received
    assert path == "/v1/traces"
    assert b"chat fake" in content
    assert b"gemserve" in content


@pytest.mark.parametrize("kind", ["", "TRACES_"])
def test_no_line_shows_how_spans_are_sent(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens there, of which the address is told; and a colon makes no header."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    address = "http://me:password-1@127.0.0.1:9/v1/traces?key=secret-2"
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT", address)
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{kind}HEADERS", "a=secret-3,b: Bearer secret-4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    with caplog.at_level("DEBUG"):
        traces = open_traces("auto")
        assert traces is not None
        scope = {"path": CHAT, "headers": [], "state": {"request_id": "me"}}
        params = FilterParams(method="none", keep=16)
        request = Request(
            request_id="me", prompt_ids=[1], sampling=SamplingParams(max_tokens=1), filter=params
        )
        (observer,) = traces.begin(scope, [request], model="fake", arrived_s=time.monotonic())
        observer.close()
        traces.shut_down()
    assert "Header format invalid" in caplog.text
    assert "127.0.0.1" in caplog.text
    assert "Failed to export" in caplog.text
    assert "secret" not in caplog.text
    assert "password" not in caplog.text


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp", None)
    with pytest.raises(ConfigError, match=r"gemserve\[otel\]"):
        open_traces("on", {})
    assert open_traces("auto", {"OTEL_TRACES_EXPORTER": "otlp"}) is None


async def test_without_traces_nothing_is_imported(tokenizer: Any) -> None:
    """A server without traces must not need the packages, nor pay for them."""
    import subprocess

    program = (
        "import sys, gemserve.api.app\n"
        "from gemserve.api.telemetry.traces import open_traces\n"
        "assert open_traces('auto', {}) is None\n"
        "assert not [n for n in sys.modules if n.startswith('opentelemetry.sdk')]\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr.decode()
