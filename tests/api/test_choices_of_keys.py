"""Each choice of a request counts for its key, and a priority has bounds."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import CHAT, COMPLETIONS, FILTERED, FakeCore, api_over, wait_for_async

pytestmark = pytest.mark.anyio
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    return {"api_key_file": str(path), "concurrency_per_key": 4, "max_queue": 100}


@both
async def test_choices_count_as_requests(
    tokenizer: Any, settings: dict[str, Any], path: str
) -> None:
    """With n, three requests held all of the server's slots."""
    gate = threading.Event()
    async with api_over(FakeCore(gate, FILTERED, "ok"), tokenizer, **settings) as api:
        first = asyncio.create_task(api.post(path, n=3, headers=ALICE))
        await wait_for_async(lambda: api.serving.engine.num_waiting == 2)
        refused = await api.post(path, n=2, headers=ALICE)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert error["code"] == "concurrency_limit_exceeded"
        assert "3 requests" in error["message"]
        assert "the limit is 4" in error["message"]
        second = asyncio.create_task(api.post(path, headers=ALICE))
        bob = asyncio.create_task(api.post(path, n=4, headers=BOB))
        await wait_for_async(lambda: api.serving.engine.num_waiting == 7)
        gate.set()
        replies = await asyncio.gather(first, second, bob)
        assert [reply.status_code for reply in replies] == [200] * 3
        for _ in range(3):  # nothing stays counted
            assert (await api.post(path, n=4, headers=ALICE)).status_code == 200


async def test_more_choices_than_a_key_may_ever_have_are_a_400(
    tokenizer: Any, settings: dict[str, Any]
) -> None:
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        reply = await api.post(CHAT, n=5, headers=ALICE)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "n"
        assert "4" in reply.json()["error"]["message"]
        prompts = await api.post(COMPLETIONS, prompt=["a"] * 5, headers=ALICE)
        assert prompts.status_code == 400
        assert (await api.post(CHAT, n=4, headers=ALICE)).status_code == 200


@both
@pytest.mark.parametrize("priority", [-101, 101, -(1 << 31)])
async def test_a_priority_out_of_bounds_is_a_400(tokenizer: Any, path: str, priority: int) -> None:
    async with api_over(FakeCore(), tokenizer) as api:
        reply = await api.post(path, priority=priority)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")
        assert "100" in reply.json()["error"]["message"]
        assert (await api.post(path, priority=-100)).status_code == 200
