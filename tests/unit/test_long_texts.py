"""Requests with long texts are worked on a few at a time, and keys take turns."""

from __future__ import annotations

import asyncio

import pytest

from gemserve.api.requests.long_texts import (
    AT_ONCE,
    LONG_BYTES,
    LongTexts,
    count_chars,
    count_chat_chars,
)

pytestmark = pytest.mark.anyio
LONG = LONG_BYTES + 1


async def test_keys_take_turns_and_short_texts_pass() -> None:
    """Ten texts of 13 MB at once took 9 GB, and every thread in which requests are parsed."""
    texts, order, gate = LongTexts(), [], asyncio.Event()
    most = running = 0

    async def work(tenant: bytes) -> None:
        nonlocal most, running
        async with texts.turn(tenant, LONG):
            running += 1
            most = max(most, running)
            order.append(tenant)
            await gate.wait()
            await asyncio.sleep(0)
            running -= 1

    tasks = [asyncio.ensure_future(work(b"greedy")) for _ in range(6)]
    tasks.append(asyncio.ensure_future(work(b"modest")))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(1), texts.turn(b"modest", LONG_BYTES):
        pass
    tasks[3].cancel()  # who waits may leave
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == AT_ONCE
    assert order.index(b"modest") <= AT_ONCE + 1, "behind one of the other key"
    assert len(order) == 6
    async with asyncio.timeout(1), texts.turn(b"a", LONG), texts.turn(b"b", LONG):
        pass  # all turns were given back


async def test_who_leaves_as_the_turn_comes_gives_it_back() -> None:
    texts = LongTexts()

    async def work() -> None:
        async with texts.turn(b"", LONG):
            await asyncio.sleep(0.01)

    tasks = [asyncio.ensure_future(work()) for _ in range(2 * AT_ONCE)]
    await asyncio.sleep(0)
    held = tasks[:AT_ONCE]
    await asyncio.wait(held)
    for task in tasks[AT_ONCE:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(1), texts.turn(b"a", LONG), texts.turn(b"b", LONG):
        pass


def test_all_texts_of_a_chat_count() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "y" * 100}}}
    message = {"role": "assistant", "content": "z" * 50, "tool_calls": [call]}
    assert count_chat_chars([message]) == 150 + 5 * 16
    assert count_chat_chars([], [{"a" * 20: ["b" * 30, 1, None]}], {"c" * 40: True}) == 90
    assert count_chars(["", "x"]) == 16
