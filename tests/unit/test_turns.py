"""Threads work on a few texts at a time, and keys take turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from anyio import to_thread
from starlette.exceptions import HTTPException

from gemserve.api.requests.long_texts import BYTES_PER_TOKEN
from gemserve.api.requests.turns import (
    LONG_AT_ONCE,
    LONG_BYTES,
    TenantTurns,
    TextTurns,
    TextWait,
)
from gemserve.errors import WaitedTooLong
from gemserve.prompting.stopping import check_stopped

pytestmark = pytest.mark.anyio
LONG = LONG_BYTES + 1
PATIENCE_S = 10


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


class Work:
    """Notes who works. One of them ends whenever `gate` is released."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.gate = threading.Semaphore(0)
        self.most = self._now = 0

    def __call__(self, tenant: bytes) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        self.order.append(tenant)
        assert self.gate.acquire(timeout=PATIENCE_S)
        self._now -= 1

    async def has_begun(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.order) < count:
                await asyncio.sleep(0.001)


async def run(texts: TextTurns, tenant: bytes, work: Callable[[], None], size: int = LONG) -> None:
    client: Any = Client()
    await texts.run(client, tenant, size, work)


def nothing() -> None:
    pass


async def assert_all_free(texts: TextTurns) -> None:
    """Two keys find a turn each, at the same time."""
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def meet() -> None:
        both.wait()

    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(*(run(texts, tenant, meet) for tenant in (b"a", b"b")))


@pytest.mark.parametrize("size", [LONG, LONG_BYTES])
async def test_keys_take_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten texts of 13 MB at once took 9 GB. Short ones of one key took all threads, and another
    key's waited behind hundreds of them: 10 s."""
    monkeypatch.setattr("gemserve.api.requests.turns._short_at_once", lambda: LONG_AT_ONCE)
    texts, work = TextTurns(), Work()
    tenants = [*[b"greedy"] * 6, b"modest", b"late"]
    tasks = [asyncio.ensure_future(run(texts, t, partial(work, t), size)) for t in tenants]
    await work.has_begun(LONG_AT_ONCE)
    assert sorted(work.order) == [b"greedy", b"modest"], "a key leaves a turn to others"
    other = LONG_BYTES if size > LONG_BYTES else LONG
    async with asyncio.timeout(PATIENCE_S):
        await run(texts, b"modest", nothing, other)  # they have turns of their own
    tasks[3].cancel()  # who waits may leave
    while b"late" not in work.order:  # one ends, and the next one begins
        begun = len(work.order)
        work.gate.release()
        await work.has_begun(begun + 1)
    assert len(work.order) <= 4, "whichever of the first two ended first"
    work.gate.release(len(tenants))
    await asyncio.gather(*tasks, return_exceptions=True)
    assert work.most == LONG_AT_ONCE
    assert len(work.order) == 7
    await assert_all_free(texts)


async def test_a_key_that_is_alone_leaves_one_turn() -> None:
    turns = TenantTurns(4)
    waiting = [asyncio.ensure_future(turns.take(b"a")) for _ in range(5)]
    await asyncio.wait(waiting, timeout=0.01)
    assert [task.done() for task in waiting] == [True] * 3 + [False] * 2
    await turns.take(b"b")
    turns.give_back(b"a")
    await asyncio.sleep(0.01)
    assert not waiting[3].done(), "now two keys have some, and one is free"
    turns.give_back(b"b")
    await asyncio.sleep(0.01)
    assert waiting[3].done()
    waiting[4].cancel()


async def test_without_keys_all_turns_are_everybody_s() -> None:
    turns = TenantTurns(2)
    async with asyncio.timeout(PATIENCE_S):
        await turns.take(b"")
        await turns.take(b"")


async def test_who_leaves_as_the_turn_comes_gives_it_back() -> None:
    turns = TenantTurns(2)
    tasks = [asyncio.ensure_future(turns.take(b"")) for _ in range(4)]
    await asyncio.wait(tasks[:2])
    for _ in range(2):
        turns.give_back(b"")  # whoever is next has it from here on, and has not run yet
    for task in tasks[2:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        await turns.take(b"a")
        await turns.take(b"b")


@pytest.mark.parametrize("size", [LONG, LONG_BYTES])
async def test_a_turn_ends_when_its_client_leaves(size: int) -> None:
    """Text of clients that had left was tokenized to its end, while others waited."""
    texts, begun = TextTurns(), threading.Event()

    def work() -> None:
        begun.set()
        while True:
            check_stopped()

    clients: list[Any] = [Client() for _ in range(5)]
    tasks = [asyncio.ensure_future(texts.run(client, b"a", size, work)) for client in clients]
    await to_thread.run_sync(begun.wait)
    for client, task in zip(reversed(clients), reversed(tasks), strict=True):
        client.leaves.set()  # first who waits, then who works
        with pytest.raises(HTTPException):
            await task
    assert clients[0].charges == [size // BYTES_PER_TOKEN]
    assert clients[-1].charges == []
    await assert_all_free(texts)


async def test_a_text_waits_no_longer_than_it_may() -> None:
    """It was told only when its turn came, and further turns of one request had no limit."""
    texts, work = TextTurns(), Work()
    tasks = [asyncio.ensure_future(run(texts, b"", partial(work, b""))) for _ in range(4)]
    await work.has_begun(LONG_AT_ONCE)
    asked: Any = Client()
    wait = TextWait(0.3, "--max-wait", waited_s=0.1)
    began_s = time.monotonic()
    with pytest.raises(WaitedTooLong, match=r"the limit is 0\.3 s \(--max-wait\)"):
        await texts.run(asked, b"", LONG, nothing, wait=wait)
    assert 0.2 <= time.monotonic() - began_s < PATIENCE_S
    work.gate.release(len(tasks))
    await asyncio.gather(*tasks)
    await assert_all_free(texts)


async def test_what_was_made_for_a_client_that_has_left_goes_no_further() -> None:
    texts, client = TextTurns(), Client()
    asked: Any = client
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    task = asyncio.ensure_future(texts.run(asked, b"a", 8, work))
    await to_thread.run_sync(begun.wait)
    client.leaves.set()
    await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(HTTPException):
        await task
    assert client.charges == [2]


async def test_a_key_rests_beside_others_for_as_long_as_it_has_worked() -> None:
    """Texts of one key took half of the processor that another one's answers were drawn on."""
    turns, began_s = TenantTurns(2), time.monotonic()
    await turns.take(b"a")
    turns.give_back(b"a", 0.1)
    await turns.take(b"b")
    turns.give_back(b"b")
    assert time.monotonic() - began_s < 0.09, "others do not rest"
    for _ in range(2):
        await turns.take(b"a")
        assert time.monotonic() - began_s >= 0.1
        turns.give_back(b"a")


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_key_that_is_alone_does_not_rest(is_alone: bool) -> None:
    def work() -> None:
        ends_s = time.thread_time() + 0.1
        while time.thread_time() < ends_s:
            pass

    texts = TextTurns(lambda tenant: is_alone)
    await run(texts, b"a", work, 8)
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        await run(texts, b"a", nothing, 8)
    assert (time.monotonic() - began_s > 0.2) is not is_alone
