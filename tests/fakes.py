"""A scripted core under the real engine, and the application around it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from gemserve.calibration.files import Calibration
from gemserve.config import ServerConfig
from gemserve.contract.events import (
    Event,
    Filtered,
    Finished,
    LentGroups,
    PromptScored,
    SegmentsRead,
    TextDelta,
)
from gemserve.contract.filter_plan import FilterReason, SummaryArrays
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.cost import ModelShape
from gemserve.engine.cache.state import CacheState, StoredDocument
from gemserve.engine.sequence.progress import Progress
from gemserve.engine.worker import Engine
from gemserve.filtering.message_report import report_messages
from gemserve.filtering.protected_budget import always_read
from gemserve.ranges import as_ranges

# Processes that tests start import the fake core alone, without torch and transformers: what the
# application needs is imported where it is used.
if TYPE_CHECKING:
    from gemserve.adapters.adapter_store import AdapterStore
    from gemserve.api.serving import Serving

MODEL = "fake"
CONTEXT = 2000
MIN_TOKENS = 32
FILTER_LAYER = 2
CALIBRATION = Calibration(layer=FILTER_LAYER)
SHAPE = ModelShape(
    num_layers=16,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=128,
    vocab_size=1000,
    layer_params=200_000,
    qkv_params=25_000,
    element_bytes=4,
)
EOS = 2  # the built-in tokenizer's
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "Hello there"},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}]},
}
FILTERED = object()  # script step: report the filter

# str: one token of text; number: pause in seconds; Event: wait for it; exception: raise it;
# Filtered, PromptScored, Finished or TextDelta: emit it as it is; Progress: what the job's is from
# then on.
Step = Any


@dataclass(eq=False)
class FakeJob:
    tenant: bytes
    events: Iterator[Event | None]
    num_tokens: int = 0
    progress: Progress | None = None


class FakeCore:
    """Plays `script` for every request, one request at a time, a moment of it each step."""

    kv_usage_ratio = 0.0
    cache_usage_ratio = 0.0
    cache_state = CacheState()
    internal_errors: Mapping[str, int] = {}

    def __init__(self, *script: Step) -> None:
        self.script: Sequence[Step] = script or (FILTERED, "Hé", "llo ", "🌍", "!")
        self.requests: list[Request] = []
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.forgotten: set[str] = set()
        self._jobs: list[FakeJob] = []

    @property
    def num_running(self) -> int:
        return min(1, len(self._jobs))

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._jobs) - 1)

    @property
    def waiting_of(self) -> dict[bytes, int]:
        return Counter(job.tenant for job in self._jobs[1:])

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def check(self, request: Request) -> None:
        pass

    def add(self, request: Request) -> FakeJob:
        job = FakeJob(
            request.tenant, iter(()), progress=Progress(phase="queue", tokens=0, total=100)
        )
        job.events = self._play(request, job)
        self._jobs.append(job)
        return job

    def cancel(self, job: FakeJob) -> list[tuple[FakeJob, Event]]:
        if job not in self._jobs:
            return []
        is_begun = job is self._jobs[0]
        if is_begun:
            self.cancelled.set()
        self._end(job)
        end = Finished(reason="abort", completion_tokens=job.num_tokens, is_unread=not is_begun)
        return [(job, end)]

    @property
    def stored_documents(self) -> dict[str, StoredDocument]:
        """As if every request had been cached, and as if nothing were ever evicted."""
        return {
            name: StoredDocument(0, len(request.prompt_ids), request.pin)
            for request in self.requests
            for name in request.documents
            if name not in self.forgotten and report_for(request).applied
        }

    def close(self) -> None:
        pass

    def forget_documents(self, ids: Collection[str]) -> None:
        self.forgotten.update(ids)

    def lent_groups(self, job: FakeJob) -> LentGroups:
        return LentGroups()

    def take_group(self, job: FakeJob, group: int, read: SegmentsRead | None) -> None:
        pass

    def progress(self, job: FakeJob) -> Progress | None:
        return job.progress

    def step(self) -> list[tuple[FakeJob, Event]]:
        job = self._jobs[0]
        event: Event | None
        try:
            event = next(job.events)
        except Exception as error:  # a request that fails ends alone, as in the real core
            message = f"{type(error).__name__}: {error}"
            event = Finished(reason="error", completion_tokens=job.num_tokens, error=message)
        if event is None:
            return []
        if isinstance(event, TextDelta):
            job.num_tokens += len(event.token_ids)
            job.progress = None
        if isinstance(event, Finished):
            self._end(job)
        return [(job, event)]

    def _end(self, job: FakeJob) -> None:
        self._jobs.remove(job)
        job.events = iter(())  # which holds the job, and with it the request

    def _play(self, request: Request, job: FakeJob) -> Iterator[Event | None]:
        """The script as events; None while it pauses."""
        self.requests.append(request)
        self.started.set()
        num_tokens = 0
        for step in self.script:
            if step is FILTERED and request.summarizes_only:
                continue  # the segments come with the end, and no choice before it
            if step is FILTERED:
                now = time.monotonic()
                ids = request.prompt_ids if request.selects_only else None
                yield Filtered(report=report_for(request), started_s=now, filtered_s=now, ids=ids)
            elif isinstance(step, BaseException):
                raise step
            elif isinstance(step, Progress):
                job.progress = step
            elif isinstance(step, (int, float, threading.Event)):
                yield from self._pause(step)
            elif isinstance(step, (Filtered, Finished, PromptScored, TextDelta)):
                yield step
            elif not request.summarizes_only:
                num_tokens += 1
                yield TextDelta(text=step, token_ids=(num_tokens,), drawn_s=time.monotonic())
        read = read_for(request) if request.summarizes_only else None
        yield Finished(reason="stop", completion_tokens=num_tokens, segments_read=read)

    def _pause(self, until: float | threading.Event) -> Iterator[None]:
        is_event = isinstance(until, threading.Event)
        event = until if isinstance(until, threading.Event) else threading.Event()
        deadline = time.monotonic() + (30.0 if is_event else float(until))  # type: ignore[arg-type]
        while (left := deadline - time.monotonic()) > 0 and not event.wait(min(left, 0.005)):
            yield None


def read_for(request: Request) -> SegmentsRead:
    """Segments that get as much attention as they share tokens with what is asked.

    Of each row of one head it goes to one token. The first segment counts as cached.
    """
    assert request.plan is not None
    assert request.plan.segments is not None
    plan, rows = request.plan.segments, 12
    summaries = []
    for segment in plan.segments:
        text = request.tokens[segment.start : segment.stop]
        share = np.float32(np.isin(text, plan.asked).mean() * 0.98 + 0.01)
        keys = np.full(rows, np.log(share / (1 - share)), dtype=np.float32)
        summaries.append(
            SummaryArrays(
                sinks=np.zeros(rows, dtype=np.float32),
                keys=keys,
                best=keys[:, None],
                places=(np.arange(rows, dtype=np.int32) % len(text))[:, None],
                shares=np.full((2, len(text)), share, dtype=np.float32),
            )
        )
    cached = plan.segments[0].num_tokens
    return SegmentsRead(summaries=tuple(summaries), num_cached=1, cached_tokens=cached)


def report_for(request: Request) -> FilterReport:
    """What a real core would report, had it kept what is always read, and then the first tokens."""
    n, params, plan = len(request.prompt_ids), request.filter, request.plan
    if plan is None:  # a test's own request, which no planner has seen
        reason: FilterReason | None = "disabled" if params.method == "none" else "short_prompt"
        protected, num_kept = 0, params.kept_count(n)
        reason = None if params.method != "none" and n > max(MIN_TOKENS, num_kept) else reason
    else:
        reason, protected, num_kept = plan.reason, plan.budget.protected, plan.num_kept
    applied = reason is None
    first = dict.fromkeys(always_read(request.protected, n) if protected else ())
    first |= dict.fromkeys(range(n))
    kept = sorted(list(first)[: num_kept if applied else n])
    return FilterReport(
        first_difference=request.first_difference,
        method=params.method,
        applied=applied,
        reason=reason,
        layer=params.layer if applied else None,
        prompt_tokens=n,
        kept_tokens=len(kept),
        protected_tokens=protected,
        cached_tokens=0,
        filter_ms=1.5 if applied else 0.0,
        selection=as_ranges(kept) if params.return_selection else None,
        messages=report_messages(request, kept),
    )


class Clock:
    """Stands still until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def replace_file(path: Path, *lines: str) -> str:
    """Replace a key file in one step, as an operator should; its name."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines), encoding="utf-8")
    new.replace(path)
    return str(path)


class CountingTokenizer:
    """Counts how often a prompt is rendered or tokenized."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += name in ("backend_tokenizer", "get_chat_template")
        return getattr(self._tokenizer, name)


def serving_over(
    core: FakeCore,
    tokenizer: Any,
    *,
    max_queue: int = 4,
    max_prompt_tokens: int = 1000,
    context_tokens: int = CONTEXT,
    adapters: AdapterStore | None = None,
    model_name: str = MODEL,
    filter_min_tokens: int = MIN_TOKENS,
    calibration: Calibration = CALIBRATION,
    **server: Any,
) -> Serving:
    """The real engine and prompt builder over a fake core."""
    import torch

    from gemserve.adapters.adapter_store import AdapterStore
    from gemserve.api.requests.request_builder import RequestBuilder
    from gemserve.api.serving import Serving, watchdog_of
    from gemserve.decoding.grammar import Grammars
    from gemserve.filtering.planner import FilterPlanner
    from gemserve_kernels import select_backend

    no_model: Any = None
    planner = FilterPlanner(
        method="sieve",
        keep=64,
        min_tokens=filter_min_tokens,
        segment_size="auto",
        reads_cached_whole=True,
        fails_open=False,
        calibration=calibration,
        sliding_windows=(None,) * 64,
        shape=SHAPE,
        context_tokens=context_tokens,
        longest_sequence=context_tokens,
        longest_prompt=max_prompt_tokens,
        longest_pass=context_tokens,
    )
    builder = RequestBuilder(
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, vocab_size=len(tokenizer.get_vocab()), end_ids=(EOS,)),
        context_tokens=context_tokens,
        vocab_size=len(tokenizer.get_vocab()),
        longest_token_chars=max(map(len, tokenizer.get_vocab())),
        current_planner=lambda: planner,
    )
    engine, config = Engine(core, max_queue=max_queue), ServerConfig(**server)
    return Serving(
        engine=engine,
        builder=builder,
        adapters=adapters or AdapterStore(no_model, None, 0),
        model_name=model_name,
        backend=select_backend(torch.device("cpu")),
        config=config,
        watchdog=watchdog_of(engine, config),
    )


def kept_of(request: Request) -> int:
    """How many tokens a filter keeps of a long prompt: its budget, and what is always read."""
    assert isinstance(request.filter.keep, int)
    return request.filter.keep + len(always_read(request.protected, len(request.prompt_ids)))


@dataclass(frozen=True, slots=True)
class Api:
    """An in-process client of one application."""

    core: FakeCore
    serving: Serving
    client: httpx.AsyncClient

    async def post(
        self, path: str, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """A good body for `path`, changed by `fields`."""
        body = json.dumps({**BODIES[path], **fields})
        return await self.client.post(path, content=body, headers=headers)

    async def assert_alive(self) -> None:
        assert (await self.post(COMPLETIONS)).status_code == 200

    async def metrics(self) -> dict[str, float]:
        return parse_metrics((await self.client.get("/metrics")).text)


@asynccontextmanager
async def api_over(core: FakeCore, tokenizer: Any, **settings: Any) -> AsyncIterator[Api]:
    from gemserve.api.app import create_app

    serving = serving_over(core, tokenizer, **settings)
    transport = httpx.ASGITransport(create_app(serving), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=20
        ) as client:
            yield Api(core, serving, client)
    finally:
        serving.engine.stop()


@contextmanager
def live_server(serving: Serving, around: Callable[[Any], Any] | None = None) -> Iterator[str]:
    """The application on a free port of 127.0.0.1; yields its URL.

    `around` returns the application to serve instead, for example one that records requests.
    """
    import uvicorn

    from gemserve.api.app import create_app

    app = create_app(serving)
    config = uvicorn.Config(
        around(app) if around else app,
        port=0,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, 60)  # a busy machine is no fault
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        serving.engine.stop()  # ends what still runs, which shutting down would wait for
        server.should_exit = True
        thread.join(10)


def data_of(reply: httpx.Response, *, has_idle: bool = False) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end in its one `[DONE]`.

    `has_idle`: with those that say nothing, which come when a second has passed without a word.
    """
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [x.removeprefix("data: ") for x in reply.text.split("\n") if x.startswith("data: ")]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    return [chunk for chunk in chunks if has_idle or not _is_idle(chunk)]


def _is_idle(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices") or [{}]
    said = {key: value for key, value in choices[0].items() if key != "index" and value}
    is_choice = len(choices) == 1 and "index" in choices[0]
    return is_choice and not said and "token_ids" not in choices[0] and not chunk.get("filter")


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    """Generated text of a stream's chunks, or of one whole reply, of either endpoint."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    parts = [c.get("delta") or c.get("message") or {"content": c.get("text")} for c in choices]
    return "".join(part.get("content") or "" for part in parts)


def parse_metrics(text: str) -> dict[str, float]:
    """`name{labels}` to value, the prefix dropped."""
    lines = re.findall(r"^gemserve_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


async def wait_for_async(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
