"""Sends one streamed request to an OpenAI-compatible server and records its timing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from gemserve_client.load_test.traffic import Job

MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE_CHARS = 300
MOST_TOKENS = 1 << 53  # beyond which a float is not exact
CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)
class Record:
    """What happened to one request. Times are seconds on the clock of its point.

    `error` is None or one of these: connect, disconnect, timeout, http_STATUS, server_error (an
    error in the stream), truncated (no [DONE]), malformed, empty (no output at all), cancelled (the
    run ended first). A complete answer whose tokens show no text, such as special tokens, has no
    TTFT.

    `cached_tokens`: of the prompt, those that the server had computed before, if it says so. Only
    gemserve reports `kept_tokens` (the prompt tokens that the answer was generated from),
    `is_filtered` (whether a filter chose them) and `filter_reason` (why it chose none, or kept
    more).
    """

    index: int
    due_s: float | None = None
    started_s: float = 0.0
    ended_s: float | None = None
    ttft_s: float | None = None
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    kept_tokens: int | None = None
    is_filtered: bool | None = None
    filter_reason: str | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.ended_s is not None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first. None if there is only one."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Refused(Exception):
    """A request failed. `kind` is the value for `Record.error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventDecoder:
    """Decodes the `data` of server-sent events from any pieces of bytes. It skips comments."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._ended_on_return = False

    def feed(self, chunk: bytes) -> Iterator[str]:
        if self._ended_on_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a line end that was split between two pieces
            self._ended_on_return = False
        if not chunk:
            return
        self._ended_on_return = chunk.endswith(b"\r")
        *lines, self._rest = re.split(rb"\r\n|\r|\n", self._rest + chunk)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Refused("malformed", f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode(errors="replace")
                self._data = []

    def close(self) -> Iterator[str]:
        """The last event of a stream that ended without a blank line."""
        self._ended_on_return = False
        yield from self.feed(b"\n\n")


class Client:
    """Sends jobs to one endpoint. `fields` are added to each request, and override its own."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        chat: bool,
        timeout_s: float,
        fields: dict[str, Any],
    ) -> None:
        self.http = http
        self.chat = chat
        self.timeout_s = timeout_s
        self.fields = fields

    async def send(self, job: Job, record: Record, origin_s: float) -> None:
        """Send `job` and fill in `record`. Raises only CancelledError."""
        request = self.http.build_request("POST", self._path, json=self._body(job))

        async def trace(event: str, _: object) -> None:
            # A busy client may wait for its turn to connect. That time must not count against the
            # server.
            if event == "http11.send_request_headers.started":
                record.started_s = time.perf_counter() - origin_s

        request.extensions["trace"] = trace
        record.started_s = time.perf_counter() - origin_s
        ended_s: float | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                ended_s = await self._exchange(request, record, origin_s)
        except Refused as refused:
            _fail(record, refused.kind, str(refused))
        except TimeoutError:
            _fail(record, "timeout", f"no end within {self.timeout_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            _fail(record, "connect", str(error))
        except httpx.HTTPError as error:
            _fail(record, "disconnect", str(error) or type(error).__name__)
        except asyncio.CancelledError:
            _fail(record, CANCELLED, "the run ended first")
            raise
        finally:
            record.ended_s = (time.perf_counter() if ended_s is None else ended_s) - origin_s

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def _body(self, job: Job) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": job.prompt}
        if self.chat:
            prompt = {"messages": [{"role": "user", "content": job.prompt}]}
        return {**prompt, "max_tokens": job.max_tokens, **self.fields}

    async def _exchange(self, request: httpx.Request, record: Record, origin_s: float) -> float:
        """Read the answer. Return the time at which `[DONE]` arrived (`perf_counter`)."""
        response = await self.http.send(request, stream=True)
        try:
            if response.status_code != 200:
                await response.aread()
                message = _error_text(response.content)
                raise Refused(f"http_{response.status_code}", message)
            return await self._read(response, record, origin_s + record.started_s)
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response, record: Record, began_s: float) -> float:
        last_s = began_s
        chunks = 0
        counted: int | None = None
        done_s: float | None = None
        async for at_s, data in _events(response):
            if done_s is not None:
                continue  # read the body to its end, so that the connection can be used again
            if data == "[DONE]":
                done_s = at_s
                continue
            event = _parse(data)
            try:
                if usage := event.get("usage"):
                    record.prompt_tokens = _count(usage.get("prompt_tokens"))
                    counted = _count(usage.get("completion_tokens"))
                    if details := usage.get("prompt_tokens_details"):
                        record.cached_tokens = _count(details.get("cached_tokens"))
                if report := event.get("filter"):
                    record.kept_tokens = _count(report.get("kept_tokens"))
                    record.is_filtered = bool(report.get("applied"))
                    record.filter_reason = _word(report.get("reason"))
                if not self._has_content(event, record):
                    continue
            except (AttributeError, TypeError):
                raise Refused("malformed", f"not a chunk of an answer: {data[:80]}") from None
            if chunks == 0:
                record.ttft_s = at_s - began_s
            else:
                record.gaps_s.append(at_s - last_s)
            last_s = at_s
            chunks += 1
            record.output_tokens = chunks
        record.output_tokens = chunks if counted is None else counted
        if done_s is None:
            raise Refused("truncated", "the stream ended without [DONE]")
        if chunks == 0 and not counted:
            raise Refused("empty", "no text, and no output token counted")
        return done_s

    def _has_content(self, event: dict[str, Any], record: Record) -> bool:
        found = False
        for choice in event.get("choices") or ():
            record.finish_reason = _word(choice.get("finish_reason")) or record.finish_reason
            if not self.chat:
                found = found or bool(choice.get("text"))
                continue
            delta = choice.get("delta") or {}
            kinds = ("content", "reasoning_content", "reasoning", "tool_calls")
            found = found or any(delta.get(kind) for kind in kinds)
        return found


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, str]]:
    """The data of each event, and the time at which its last bytes arrived."""
    decoder = EventDecoder()
    at_s = time.perf_counter()
    async for chunk in response.aiter_bytes():
        at_s = time.perf_counter()
        for data in decoder.feed(chunk):
            yield at_s, data
    for data in decoder.close():
        yield at_s, data


def _parse(data: str) -> dict[str, Any]:
    """Parse one event. Raises `Refused` for an error, and for anything but a JSON object."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise Refused("malformed", f"not a JSON object: {data[:80]}")
    if event.get("error") or event.get("object") == "error":
        raise Refused("server_error", _error_text(data.encode()))
    return event


def _count(value: object) -> int | None:
    """A number of tokens. Raises `TypeError` for anything else, such as one of 400 digits."""
    if value is None or (type(value) is int and 0 <= value <= MOST_TOKENS):
        return value
    raise TypeError(value)


def _word(value: object) -> str | None:
    """A reason. Raises `TypeError` for anything else."""
    if value is None or isinstance(value, str):
        return value and value[:MAX_MESSAGE_CHARS]
    raise TypeError(value)


def _error_text(body: bytes) -> str:
    """The message of an error body, or the body itself, on one line."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        parsed = json.loads(body)
        error = parsed.get("error") or parsed
        text = error if isinstance(error, str) else str(error.get("message") or text)
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]


def _fail(record: Record, kind: str, message: str) -> None:
    record.error = kind
    record.message = " ".join(message.split())[:MAX_MESSAGE_CHARS]
