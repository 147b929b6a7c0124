"""Load test of any OpenAI-compatible server, over its streaming HTTP interface.

TTFT is the time from the first byte sent to the first chunk with text. ITL is the time from one
such chunk to the next, and E2E the time to `[DONE]`. TPOT = (E2E − TTFT) / (output tokens − 1),
with tokens as the server counts them.

A gemserve server sends a `filter` object in its first chunk. From it come the number of kept tokens
and the share of the requests that were filtered.

Before the first point, one request measures how many characters the server takes for a token.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from gemserve_client.address import redact
from gemserve_client.load_test import result_line
from gemserve_client.load_test.metrics import error_lines, point_name, summarize, table
from gemserve_client.load_test.options import Options, command_line, read_options
from gemserve_client.load_test.point import Limits, Point, Progress
from gemserve_client.load_test.result_files import (
    Saved,
    UnreadableResult,
    saved_point,
    write_csv,
    write_json,
)
from gemserve_client.load_test.streamed_request import Client, Record
from gemserve_client.load_test.text_table import aligned
from gemserve_client.load_test.traffic import Job, Prompts, arrivals, jobs

MAX_WARM_UP_TOKENS = 2048
WARM_UP_ANSWER_TOKENS = 4
LATE_MS = 50  # above this delay the client itself is the bottleneck
CACHED_SHARE = 0.1  # a chat template in front of all prompts is less


class Unusable(Exception):
    """The server cannot be tested; the message says why on one line."""


@dataclass(slots=True)
class Outcome:
    """What a run measured. `signal_number`: of the signal that has cut it short, if one has."""

    model: str
    server_version: str | None
    points: list[Saved] = field(default_factory=list)
    signal_number: int | None = None


def run(words: Sequence[str], program: str) -> int:
    """Return the exit status: 0, 1 if nothing was completed, 2 for bad arguments, 130 after Ctrl-C,
    143 after SIGTERM.

    `program` is what the user typed before `words`. Its last part begins every message.
    """
    options = read_options(words, program)
    command = command_line(program, words)
    try:
        if not isinstance(options, Options):
            from gemserve_client.load_test.compare import compare

            print(result_line.line(compare(options, command)))
            return 0
        if options.out is not None:
            # fails now, and not after the measurement, if the library is missing
            from gemserve_client.load_test import html_report  # noqa: F401

            options.out.mkdir(parents=True, exist_ok=True)
        started_at = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        outcome = asyncio.run(measure(options))
        return _finish(options, outcome, command, started_at)
    except (Unusable, UnreadableResult, OSError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnreadableResult) else 1


async def measure(options: Options) -> Outcome:
    """Run every point in turn until all requests are sent, the time is over, or a signal comes."""
    limits = Limits(ends_s=time.perf_counter() + options.max_seconds)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connections = httpx.Limits(
        max_connections=None,
        max_keepalive_connections=None,
        # shorter than servers wait: a request must not meet a socket that is being closed
        keepalive_expiry=2.0,
    )
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, limits=connections, timeout=None
    ) as http:
        with limits.watching_signals():
            preparing = asyncio.create_task(_prepare(http, options, limits))
            interrupted = asyncio.create_task(limits.interrupted.wait())
            await asyncio.wait(
                {preparing, interrupted},
                timeout=limits.left_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            interrupted.cancel()
            if not preparing.done():
                preparing.cancel()
                await asyncio.wait({preparing})
                raise Unusable("ended before the warm-up request did")
            client, prompts, outcome = await preparing
            await _run_points(options, client, prompts, limits, outcome)
    return outcome


async def _prepare(
    http: httpx.AsyncClient, options: Options, limits: Limits
) -> tuple[Client, Prompts, Outcome]:
    """Find the model and how many characters make a token. Raises Unusable."""
    timeout_s = min(options.timeout_s, limits.left_s)
    model = options.model or await _first_model(http, timeout_s)
    fields = {
        "model": model,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.ignore_eos else {}),
        **options.extra_body,
    }
    is_chat = options.endpoint == "chat"
    client = Client(http, chat=is_chat, timeout_s=timeout_s, fields=fields)
    prompts = Prompts(options.words, seed=options.seed)
    await _calibrate(client, options, prompts)
    client.timeout_s = options.timeout_s
    return client, prompts, Outcome(model, await _version(http, timeout_s))


async def _first_model(http: httpx.AsyncClient, timeout_s: float) -> str:
    try:
        response = await http.get("/v1/models", timeout=timeout_s)
        if response.status_code == 200:
            return str(response.json()["data"][0]["id"])
        reason = f"status {response.status_code}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        reason = str(error) or type(error).__name__
    address = redact(str(http.base_url)).rstrip("/") + "/v1/models"
    raise Unusable(f"{address} names no model ({reason}); --model NAME skips this")


async def _version(http: httpx.AsyncClient, timeout_s: float) -> str | None:
    """The version that the server reports at /version, as several engines do."""
    try:
        return str((await http.get("/version", timeout=min(5.0, timeout_s))).json()["version"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


async def _calibrate(client: Client, options: Options, prompts: Prompts) -> None:
    """Set `prompts.chars_per_token` by one request of the usual length, at most 2,048 tokens."""
    num_tokens = min(round(options.prompt_tokens.mean), MAX_WARM_UP_TOKENS)
    prompt = prompts.make(num_tokens, random.Random(f"{options.seed}/warm-up"))
    record = Record(index=-1)
    job = Job(index=-1, prompt=prompt, max_tokens=WARM_UP_ANSWER_TOKENS)
    await client.send(job, record, time.perf_counter())
    if record.error not in (None, "empty"):
        raise Unusable(f"the warm-up request failed: {record.error}: {record.message}")
    if record.prompt_tokens:
        prompts.chars_per_token = len(prompt) / record.prompt_tokens
    else:
        print(
            f"{options.name}: the server counts no prompt tokens; {prompts.chars_per_token:g} "
            "characters are taken for one",
            file=sys.stderr,
        )


async def _run_points(
    options: Options, client: Client, prompts: Prompts, limits: Limits, outcome: Outcome
) -> None:
    began_s = time.perf_counter()
    settings: list[tuple[float | None, int | None]] = [
        *((rate, None) for rate in options.rates),
        *((None, concurrency) for concurrency in options.concurrencies),
    ]
    for number, (rate, concurrency) in enumerate(settings):
        if limits.is_over:
            names = (point_name({"rate": r, "concurrency": c}) for r, c in settings[number:])
            print(f"{options.name}: not measured: {', '.join(names)}", file=sys.stderr)
            break
        due_s = None
        if rate is not None:
            due_s = arrivals(options.requests, rate, options.arrivals, options.seed)
        work = jobs(
            options.requests,
            options.prompt_tokens,
            options.max_tokens,
            prompts,
            seed=options.seed,
            point=number,
            due_s=due_s,
        )
        name = point_name({"rate": rate, "concurrency": concurrency})
        point = Point(client, Progress(name, options.requests))
        await point.run(work, limits, concurrency=concurrency, ramp_s=options.ramp_s)
        row = {"label": options.label, "concurrency": concurrency, "rate": rate}
        row |= summarize(point.records, point.duration_s, options.slo)
        outcome.points.append(saved_point(row, point.records, point.origin_s - began_s))
    outcome.signal_number = limits.signal_number


def _finish(options: Options, outcome: Outcome, command: str, started_at: str) -> int:
    rows = [point["row"] for point in outcome.points]
    versions = {**result_line.versions("httpx", "numpy"), "server": outcome.server_version}
    result = result_line.result("load", options.device, versions, rows)
    if not options.json_only and rows:
        print(aligned(table([point_name(row) for row in rows], rows)))
        for place, kind, count, message in error_lines(outcome.points)[1:]:
            print(f"{place}: {count} × {kind}, first: {message}")
    for row in rows:
        _warn(options.name, row)
    if options.out is not None:
        from gemserve_client.load_test.html_report import (
            write_report,
        )  # only --out needs matplotlib

        saved = {
            **{key: value for key, value in result.items() if key != "rows"},
            "label": options.label,
            "started_at": started_at,
            "command": command,
            "settings": _settings(options, outcome.model),
            "points": outcome.points,
        }
        write_json(options.out, saved)
        write_csv(options.out, outcome.points)
        write_report(options.out, saved, command)
    print(result_line.line(result))
    if outcome.signal_number is not None:
        return 128 + outcome.signal_number
    return 0 if any(row["completed"] for row in rows) else 1


def _warn(name: str, row: dict[str, Any]) -> None:
    """Print a warning for each reason that makes a row's figures misleading."""
    notes: list[str] = []
    late_ms = row["sent_late_p99_ms"]
    if late_ms is not None and late_ms > LATE_MS:
        notes.append(f"sent up to {late_ms:.0f} ms late: this client could not keep the rate")
    if row["without_text"]:
        notes.append(f"answers without text, and so without TTFT: {row['without_text']}")
    if row["filtered_share"] == 0:
        notes.append("no prompt was filtered: were they too short, or is the filter off?")
    if row["cached_tokens"] and row["cached_tokens"] > CACHED_SHARE * row["prompt_tokens"]:
        share = row["cached_tokens"] / row["prompt_tokens"]
        notes.append(
            f"{share:.0%} of the prompts' tokens were in the server's cache: were they sent "
            "before? Without --seed each run sends others"
        )
    for note in notes:
        print(f"{name}: {point_name(row)}: {note}", file=sys.stderr)


def _settings(options: Options, model: str) -> dict[str, Any]:
    """The settings that a reader needs to repeat the run. They hold no secrets."""
    return {
        "url": redact(options.url),
        "model": model,
        "endpoint": options.endpoint,
        "requests": options.requests,
        "arrivals": options.arrivals if options.rates else None,
        "ramp_s": options.ramp_s if options.concurrencies else None,
        "prompt_tokens": options.prompt_tokens.text,
        "prompt_words": "file" if options.words else "common words",
        "max_tokens": options.max_tokens.text,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "extra_body": json.dumps(options.extra_body),
        "seed": options.seed,
        "slo_ttft_ms": options.slo.ttft_ms,
        "slo_tpot_ms": options.slo.tpot_ms,
        "timeout_s": options.timeout_s,
        "max_seconds": options.max_seconds,
    }
