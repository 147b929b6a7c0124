"""What was kept of each of thousands of messages is written beside the event loop, not on it."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from typing import Any

import pytest

from gemserve.api.replies import token_counts
from gemserve.api.replies.large_replies import MAX_ON_LOOP
from gemserve.contract.events import Filtered
from gemserve.contract.reports import FilterReport, MessageReport, SearchReport
from tests.fakes import CHAT, COMPLETIONS, FakeCore, api_over

MESSAGE = MessageReport(index=0, role="user", tokens=1, kept_tokens=1, protected_tokens=0)
REPORT = FilterReport(
    method="sieve",
    applied=True,
    reason=None,
    layer=2,
    prompt_tokens=10,
    kept_tokens=5,
    cached_tokens=0,
    filter_ms=1.0,
    selection=None,
)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
async def test_the_event_loop_writes_no_report_of_thousands_of_messages(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Each choice of a stream held it for 66 ms."""
    threads: list[str] = []
    written = token_counts._flat

    def writing(report: Any) -> Any:
        if report is MESSAGE:
            threads.append(threading.current_thread().name)
        return written(report)

    monkeypatch.setattr(token_counts, "_flat", writing)
    report = replace(REPORT, messages=(MESSAGE,) * (MAX_ON_LOOP + 1))
    core = FakeCore(Filtered(report=report, started_s=0.0, filtered_s=0.0, ids=None), "a")
    messages = [{"role": "user", "content": "Hi"}]
    body = {
        COMPLETIONS: {"prompt": "Hi", "n": 2},
        CHAT: {"messages": messages, "n": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 5},
        "/v1/responses": {"input": "Hi"},
    }.get(path, {"messages": messages})
    async with api_over(core, tokenizer) as api:
        reply = await api.client.post(path, json={"model": "fake", "stream": stream, **body})
        assert reply.status_code == 200, reply.text
        assert '"protected_tokens"' in reply.text
    assert threads
    assert threading.current_thread().name not in threads


def test_the_filter_object_has_every_field_of_the_report() -> None:
    searched = SearchReport(libraries=("a",), windows=0, tokens=0, candidates=0, read=0, ms=1.0)
    report = replace(REPORT, messages=(MESSAGE,), searched=searched, sources=())
    assert token_counts.filter_object(report) == {**asdict(report), "messages": [asdict(MESSAGE)]}
