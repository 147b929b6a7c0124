"""Requests with long texts are worked on a few at a time, and keys take turns."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from anyio import to_thread
from starlette.exceptions import HTTPException

from gemserve.api.requests.long_texts import (
    AT_ONCE,
    BYTES_PER_TOKEN,
    LONG_BYTES,
    LongTexts,
    count_chars,
    count_chat_bytes,
    count_chat_chars,
)
from gemserve.prompting.stopping import check_stopped

pytestmark = pytest.mark.anyio
LONG = LONG_BYTES + 1


class Client:
    """Stands for a request whose body has come; its client leaves when `leaves` is set."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.charges: list[int] = []
        self.scope: Any = {"state": {"place": self}}

    def charge(self, tokens: int) -> None:
        self.charges.append(tokens)

    async def receive(self) -> dict[str, str]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


async def run(texts: LongTexts, tenant: bytes, work: Any, size: int = LONG) -> Any:
    client: Any = Client()
    return await texts.run(client, tenant, size, work)


async def nothing() -> None:
    pass


async def assert_all_free(texts: LongTexts) -> None:
    async def outer() -> None:
        await run(texts, b"b", nothing)

    async with asyncio.timeout(5):
        await run(texts, b"a", outer)


async def test_keys_take_turns_and_short_texts_pass() -> None:
    """Ten texts of 13 MB at once took 9 GB, and every thread in which requests are parsed."""
    texts, order, gate = LongTexts(), [], asyncio.Event()
    most = running = 0

    async def work(tenant: bytes) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        order.append(tenant)
        await gate.wait()
        await asyncio.sleep(0)
        running -= 1

    tenants = [*[b"greedy"] * 6, b"modest", b"late"]
    tasks = [asyncio.ensure_future(run(texts, t, partial(work, t))) for t in tenants]
    while len(order) < AT_ONCE:
        await asyncio.sleep(0.001)
    assert order == [b"greedy", b"modest"], "a key has one turn at a time"
    async with asyncio.timeout(5):
        await run(texts, b"modest", nothing, LONG_BYTES)
    tasks[3].cancel()  # who waits may leave
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == AT_ONCE
    assert len(order) == 7
    await assert_all_free(texts)


async def test_who_leaves_as_the_turn_comes_gives_it_back() -> None:
    texts = LongTexts()
    work = partial(asyncio.sleep, 0.01)
    tasks = [asyncio.ensure_future(run(texts, b"", work)) for _ in range(2 * AT_ONCE)]
    await asyncio.sleep(0)
    await asyncio.wait(tasks[:AT_ONCE])
    for task in tasks[AT_ONCE:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await assert_all_free(texts)


async def test_a_turn_ends_when_its_client_leaves() -> None:
    """Text of clients that had left was tokenized to its end, while others waited."""
    texts, begun = LongTexts(), threading.Event()

    def work() -> None:
        begun.set()
        while True:
            check_stopped()

    clients: list[Any] = [Client(), Client()]
    tasks = [
        asyncio.ensure_future(texts.run(client, b"a", LONG, partial(to_thread.run_sync, work)))
        for client in clients
    ]
    await to_thread.run_sync(begun.wait)
    for client, task in zip(reversed(clients), reversed(tasks), strict=True):
        client.leaves.set()  # first who waits, then who works
        with pytest.raises(HTTPException):
            await task
    assert [client.charges for client in clients] == [[LONG // BYTES_PER_TOKEN], []]
    await assert_all_free(texts)


def test_all_texts_of_a_chat_count() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "y" * 100}}}
    message = {"role": "assistant", "content": "z" * 50, "tool_calls": [call]}
    assert count_chat_chars([message]) == 150 + 5 * 16
    assert count_chat_chars([], [{"a" * 20: ["b" * 30, 1, None]}], {"c" * 40: True}) == 90
    assert count_chars(["", "x"]) == 16


def test_bytes_count_and_not_characters() -> None:
    assert count_chat_bytes([{"content": "😀" * 50}]) == 200
