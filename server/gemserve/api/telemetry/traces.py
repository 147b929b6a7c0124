"""OpenTelemetry traces of requests: one span for each, and in it `queue` to `decode` as children.

The attributes follow the semantic conventions for generative AI. No span has text of a prompt or of
an answer. OpenTelemetry is imported only if traces are wanted.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gemserve
from gemserve.config import Switch
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.requests import Request
from gemserve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = logging.getLogger("gemserve.api")
# any of these says that traces are wanted
VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
# of OpenTelemetry and what it sends with: they show addresses, and headers that they cannot read
_EXPORTING_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.util.re",
    "urllib3.connectionpool",
)
_SHORTEST_SECRET = 6  # characters
_ERROR_TYPES = {"not_begun": "wait_too_long", "not_done": "timeout"}
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/filter": "filter",
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}  # every other path that reaches the engine is a chat


def open_traces(otel: Switch, environment: Mapping[str, str] = os.environ) -> Traces | None:
    """Traces that go where `environment` says. None: none are wanted.

    Raises `ConfigError` if they are wanted and the packages are not installed, or if they are to
    leave in another way than by OTLP over HTTP.
    """
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if otel == "off" or is_disabled or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if otel == "auto" and not any(environment.get(name) for name in VARIABLES):
        return None
    _check_way_out(environment)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"otel={otel}: traces need the packages of gemserve[otel]: {error}"
        if otel == "on":
            raise ConfigError(message) from error
        log.warning("%s; none are exported", message)
        return None
    hidden = HideSecrets(environment)
    for name in _EXPORTING_LOGGERS:
        exporting = logging.getLogger(name)
        exporting.filters[:] = [f for f in exporting.filters if not isinstance(f, HideSecrets)]
        exporting.addFilter(hidden)
    attributes = {"service.version": gemserve.__version__}
    if not environment.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = "gemserve"
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)


def _check_way_out(environment: Mapping[str, str]) -> None:
    """Refuse what would silently be something else: the only exporter here is OTLP over HTTP."""
    if (exporter := environment.get("OTEL_TRACES_EXPORTER") or "otlp") != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter}: must be otlp or none")
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environment.get(name):
            if protocol != "http/protobuf":
                raise ConfigError(
                    f"{name}={protocol}: must be http/protobuf (collectors have port 4318 for it)"
                )
            return  # the first one counts


class HideSecrets(logging.Filter):
    """Replaces in log lines what may be secret of how traces are sent, as `environment` says it.

    These are the headers, and in addresses user, password and query.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        # the longest first: one may be part of another; short ones are parts of other words
        found = {text for text in _secrets_of(environment) if len(text) >= _SHORTEST_SECRET}
        self._secrets = sorted(found, key=len, reverse=True)

    def filter(self, record: logging.LogRecord) -> bool:
        text = shown = record.getMessage()
        for secret in self._secrets:
            shown = shown.replace(secret, "…")
        if shown != text:
            record.msg, record.args = shown, ()
        return True


def _secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    for kind in ("", "TRACES_"):
        headers = environment.get(f"OTEL_EXPORTER_OTLP_{kind}HEADERS", "")
        for header in headers.split(","):
            yield from (header.strip(), *re.split(r"[=\s]+", header.strip())[1:])
        try:
            address = urlsplit(environment.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT", ""))
        except ValueError:
            continue
        yield from (address.query, address.password or "", address.netloc.rpartition("@")[0])


class Traces:
    """Makes the traces of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("gemserve", gemserve.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self,
        scope: Mapping[str, Any],
        requests: Sequence[Request],
        n: int = 1,
        *,
        model: str,
        arrived_s: float,
    ) -> list[StreamTrace]:
        """Begin the trace of one HTTP request, which the client's `traceparent` may already name.

        Returns an observer for each of its engine requests, `n` of which have the same prompt.
        `arrived_s` is of `time.monotonic()`.
        """
        from opentelemetry.trace import SpanKind

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        operation = _OPERATIONS.get(scope["path"], "chat")
        to_epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            start_time=int(arrived_s * 1e9) + to_epoch_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "gemserve",
                "gen_ai.request.model": model,
                "gemserve.request_id": scope["state"]["request_id"],
                **_sampling_attributes(requests),
            },
        )
        trace = RequestTrace(self, span, len(requests), arrived_s, to_epoch_ns)
        return [
            StreamTrace(trace, request, counts_prompt=index % n == 0)
            for index, request in enumerate(requests)
        ]

    def add_child(
        self, parent: Span, name: str, start_ns: int, stop_ns: int, attributes: Mapping[str, Any]
    ) -> None:
        """A span within another one. Attributes that are None are left out."""
        from opentelemetry.trace import set_span_in_context

        known = {name: value for name, value in attributes.items() if value is not None}
        span = self._tracer.start_span(
            name, context=set_span_in_context(parent), start_time=start_ns, attributes=known
        )
        span.end(end_time=max(start_ns, stop_ns))

    def shut_down(self) -> None:
        """Export what is left, and stop."""
        self._provider.shutdown()


class RequestTrace:
    """The span of one HTTP request. It ends when its last stream is no longer read."""

    def __init__(
        self, traces: Traces, span: Span, num_streams: int, arrived_s: float, to_epoch_ns: int
    ) -> None:
        self._traces, self._span, self._to_epoch_ns = traces, span, to_epoch_ns
        self.arrived_s = arrived_s
        self._num_open = num_streams
        self._ends: list[Finished] = []
        self._num_cached: dict[str, int] = {}
        self._num_prompt: dict[str, int] = {}

    def add_child(
        self, name: str, start_s: float, stop_s: float, attributes: Mapping[str, Any]
    ) -> None:
        start_ns, stop_ns = (int(at * 1e9) + self._to_epoch_ns for at in (start_s, stop_s))
        self._traces.add_child(self._span, name, start_ns, stop_ns, attributes)

    def close(self, request: Request, filtered: Filtered | None, end: Finished) -> None:
        """One stream has ended."""
        from opentelemetry.trace import Status, StatusCode

        self._ends.append(end)
        self._num_open -= 1
        if filtered is not None:
            self._num_prompt[request.request_id] = filtered.report.prompt_tokens
            self._num_cached[request.request_id] = filtered.report.cached_tokens
        if end.reason == "error":
            if end.late != "not_begun":  # which is a refusal
                self._span.set_status(Status(StatusCode.ERROR))
            error_type = "engine_error" if end.late is None else _ERROR_TYPES[end.late]
            self._span.set_attribute("error.type", error_type)
        if self._num_open:
            return
        output = sum(end.completion_tokens for end in self._ends)
        self._span.set_attribute("gen_ai.usage.input_tokens", sum(self._num_prompt.values()))
        self._span.set_attribute("gen_ai.usage.output_tokens", output)
        self._span.set_attribute(
            "gen_ai.usage.cache_read.input_tokens", sum(self._num_cached.values())
        )
        self._span.set_attribute(
            "gen_ai.response.finish_reasons", [end.reason for end in self._ends]
        )
        self._span.end(end_time=time.monotonic_ns() + self._to_epoch_ns)


class StreamTrace:
    """Observes one stream, and makes its spans when it has ended.

    `counts_prompt`: the tokens of its prompt count, and not those of the prompt's other choices.
    """

    def __init__(self, trace: RequestTrace, request: Request, *, counts_prompt: bool) -> None:
        self._trace, self._request, self._counts_prompt = trace, request, counts_prompt
        self._filtered: Filtered | None = None
        self._first_s: float | None = None
        self._last_s = 0.0
        self._end = Finished(reason="abort", completion_tokens=0)
        self._is_closed = False

    def see(self, event: Event) -> None:
        if isinstance(event, Filtered):
            self._filtered = event
        elif isinstance(event, TextDelta) and event.token_ids:
            self._first_s = event.drawn_s if self._first_s is None else self._first_s
            self._last_s = event.drawn_s
        elif isinstance(event, Finished):
            self._end = event

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._filtered is not None:
            self._make_spans(self._filtered)
        self._trace.close(self._request, self._filtered if self._counts_prompt else None, self._end)

    def _make_spans(self, filtered: Filtered) -> None:
        trace, report = self._trace, filtered.report
        own: dict[str, Any] = {"gemserve.request_id": self._request.request_id}
        trace.add_child("queue", trace.arrived_s, filtered.started_s, own)
        if report.filter_ms:
            seen = own | {
                "gemserve.filter.method": report.method,
                "gemserve.filter.layer": report.layer,
                "gemserve.filter.applied": report.applied,
                "gemserve.filter.reason": report.reason,
                "gemserve.filter.coverage": report.coverage,
                "gemserve.filter.prompt_tokens": report.prompt_tokens,
                "gemserve.filter.kept_tokens": report.kept_tokens,
                "gemserve.filter.cached_tokens": report.cached_tokens,
                "gemserve.filter.window": report.window,
                "gemserve.filter.windows": report.windows,
                "gemserve.filter.cached_windows": report.cached_windows,
            }
            trace.add_child("filter", filtered.started_s, filtered.filtered_s, seen)
        if self._first_s is None:
            return
        read = own | {"gemserve.prefill.tokens": report.kept_tokens}
        trace.add_child("prefill", filtered.filtered_s, self._first_s, read)
        drawn = own | {"gen_ai.usage.output_tokens": self._end.completion_tokens}
        trace.add_child("decode", self._first_s, self._last_s, drawn)


def _sampling_attributes(requests: Sequence[Request]) -> dict[str, Any]:
    sampling = requests[0].sampling
    known: dict[str, Any] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if len(requests) > 1:
        known["gen_ai.request.choice.count"] = len(requests)
    return {name: value for name, value in known.items() if value is not None}
