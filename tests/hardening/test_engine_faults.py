"""Faults inside of the engine that took other servers down: one request fails, the others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from gemserve.engine.core import Core
from tests.fakes import CHAT, COMPLETIONS, FILTERED, FakeCore, data_of, serving_over, wait_for
from tests.served import PATIENCE_S, Served, served

VICTIM = "victim"
NUM_OTHERS = 3


def body_of(index: int) -> dict[str, Any]:
    ids = [400 + 7 * index + i % 50 for i in range(60)]
    return {"prompt": ids, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def is_victim(runner: Any, number: int) -> bool:
    return VICTIM in runner._states[number].request.request_id


@contextmanager
def failing(core: Core, name: str, fail: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of the runner by `fail`, which gets the runner and the original first."""
    runner = core._runner
    original = getattr(runner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, name, lambda *given, **named: fail(runner, original, *given, **named))
        yield


def ask_all(builtin: Served) -> tuple[httpx.Response, list[str]]:
    """The reply to the victim, and the texts of those that run beside it."""
    replies: dict[int, httpx.Response] = {}

    def post(index: int) -> None:
        headers = {"X-Request-Id": VICTIM if index == 0 else f"other-{index}"}
        replies[index] = builtin.post(COMPLETIONS, headers=headers, **body_of(index))

    threads = [threading.Thread(target=post, args=(i,)) for i in range(NUM_OTHERS + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    others = [replies[i] for i in range(1, NUM_OTHERS + 1)]
    assert [reply.status_code for reply in others] == [200] * NUM_OTHERS
    return replies[0], [reply.json()["choices"][0]["text"] for reply in others]


def poisoned(runner: Any, original: Any, rows: Any, *rest: Any) -> Any:
    logits = original(rows, *rest).clone()
    numbers = [row.sequence for row in rows for _ in (row, *row.proposed)]
    for index, number in enumerate(numbers):
        if is_victim(runner, number):
            logits[index] = torch.nan
    return logits


def out_of_memory(runner: Any, original: Any, rows: Any, *rest: Any) -> Any:
    if any(is_victim(runner, row.sequence) for row in rows):
        raise torch.OutOfMemoryError("out of memory")
    return original(rows, *rest)


def out_of_memory_while_reading(runner: Any, original: Any, chunk: Any, *rest: Any) -> Any:
    if is_victim(runner, chunk.sequence):
        raise torch.OutOfMemoryError("out of memory")
    return original(chunk, *rest)


@pytest.mark.parametrize(
    ("name", "fail", "said"),
    [
        ("_decode_rows", poisoned, "not finite"),
        ("_decode_rows", out_of_memory, "out of memory"),
        ("_read", out_of_memory_while_reading, "out of memory"),
    ],
    ids=["NaN logits", "memory while decoding", "memory while reading"],
)
def test_one_request_fails_and_the_others_are_answered(
    builtin: Served, builtin_core: Core, name: str, fail: Callable[..., Any], said: str
) -> None:
    """The whole batch failed with it, or the engine died."""
    alone = [builtin.ask(COMPLETIONS, **body_of(i)) for i in range(1, NUM_OTHERS + 1)]
    with failing(builtin_core, name, fail):
        reply, texts = ask_all(builtin)
    assert reply.status_code == 500
    assert said in reply.json()["error"]["message"]
    assert texts == [each["choices"][0]["text"] for each in alone]
    assert builtin.get("/health").status_code == 200
    wait_for(lambda: builtin.metrics()["num_requests_running"] == 0, PATIENCE_S)
    builtin_core.check_integrity()
    assert builtin.ask(COMPLETIONS, **body_of(0))["choices"]


def test_a_dead_engine_is_seen_and_nothing_hangs(tokenizer: Any) -> None:
    """Clients waited for ever, while the health probe said that all was well."""
    gate = threading.Event()
    core = FakeCore(FILTERED, "a", gate, SystemExit("device lost"))
    replies: dict[int, httpx.Response] = {}
    with served(serving_over(core, tokenizer)) as server:
        user = [{"role": "user", "content": "Hi"}]

        def post(index: int) -> None:
            fields = {"messages": user, "stream": index == 0}
            replies[index] = server.post(CHAT, **fields)

        threads = [threading.Thread(target=post, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        engine = server.serving.engine
        wait_for(lambda: engine.num_running + engine.num_waiting == 3, PATIENCE_S)
        assert server.get("/health").status_code == 200
        gate.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(replies) == [0, 1, 2]
        streamed = replies[0]  # its head may have been sent before
        last = data_of(streamed)[-1] if streamed.status_code == 200 else streamed.json()
        assert "device lost" in last["error"]["message"]
        assert [replies[i].status_code for i in (1, 2)] == [500, 500]
        for probe in ("/health", "/ready"):
            answer = server.get(probe)
            assert answer.status_code == 503
            assert "device lost" in answer.text
        again = server.post(CHAT, messages=user)
        assert (again.status_code, again.json()["error"]["code"]) == (503, "engine_dead")
