"""What one key may do: requests a minute, requests at once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.access.quota import Quota
from gemserve.config import ServerConfig
from gemserve.errors import ConfigError, QuotaExceeded
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    Clock,
    FakeCore,
    api_over,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
both = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
either = pytest.mark.parametrize("stream", [True, False])


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    return str(path)


def assert_refused(reply: httpx.Response, code: str) -> None:
    assert reply.status_code == 429
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("requests", None, code)
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.headers["x-request-id"]


# the counting itself


def per_minute(limit: int, clock: Clock) -> Quota:
    return Quota(requests_per_minute=limit, concurrency_per_key=None, clock=clock)


def test_no_minute_has_more_than_its_requests() -> None:
    clock = Clock()
    quota = per_minute(3, clock)
    admitted: list[float] = []
    for _ in range(5000):
        clock.now_s += 0.1
        try:
            quota.enter(b"a")
        except QuotaExceeded:
            continue
        quota.leave(b"a")
        admitted.append(clock.now_s)
    assert len(admitted) == 3 * 9  # 500 seconds
    for first, fourth in zip(admitted, admitted[3:], strict=False):
        assert fourth - first >= 60 - 1e-6


def test_whoever_waits_as_told_is_let_in() -> None:
    clock = Clock()
    quota = per_minute(2, clock)
    for pause_s in (0.0, 7.3):
        clock.now_s += pause_s
        quota.enter(b"a")
    with pytest.raises(QuotaExceeded) as caught:
        quota.enter(b"a")
    assert (caught.value.code, caught.value.retry_after_s) == ("rate_limit_exceeded", 53)
    clock.now_s += 52
    with pytest.raises(QuotaExceeded) as caught:
        quota.enter(b"a")
    assert caught.value.retry_after_s == 1
    clock.now_s += 1
    quota.enter(b"a")


def test_keys_do_not_share_a_limit() -> None:
    quota = Quota(requests_per_minute=2, concurrency_per_key=1)
    quota.enter(b"a")
    quota.enter(b"b")
    for key in (b"a", b"b"):
        with pytest.raises(QuotaExceeded, match="1 requests under way, the limit is 1"):
            quota.enter(key)
    quota.leave(b"a")
    quota.enter(b"a")
    with pytest.raises(QuotaExceeded):
        quota.enter(b"b")


def test_a_refused_request_counts_for_nothing() -> None:
    clock = Clock()
    quota = Quota(requests_per_minute=2, concurrency_per_key=1, clock=clock)
    quota.enter(b"a")
    for _ in range(10):
        with pytest.raises(QuotaExceeded, match="under way"):
            quota.enter(b"a")
    quota.leave(b"a")
    quota.enter(b"a")  # the second of the minute
    quota.leave(b"a")
    for _ in range(10):
        clock.now_s += 1
        with pytest.raises(QuotaExceeded, match="2 requests within a minute"):
            quota.enter(b"a")
    clock.now_s += 50
    quota.enter(b"a")


def test_without_limits_everything_enters() -> None:
    quota = Quota(requests_per_minute=None, concurrency_per_key=None)
    for _ in range(10_000):
        quota.enter(b"a")


@pytest.mark.parametrize(
    "field", ["requests_per_minute", "tokens_per_minute", "concurrency_per_key", "admin_key_file"]
)
def test_what_needs_keys_is_refused_without_them(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=7: needs api_key_file"):
        ServerConfig(**{field: 7})


def test_tokens_of_a_minute_are_counted_and_forgotten() -> None:
    clock = Clock()
    quota = Quota(
        requests_per_minute=None, concurrency_per_key=None, tokens_per_minute=100, clock=clock
    )
    quota.enter(b"a")
    for tokens in (40, 50):
        quota.charge(b"a", tokens)
        clock.now_s += 10
        quota.enter(b"a")  # below the limit
    quota.charge(b"a", 500)
    for waited_s, retry_s in ((0, 60), (45, 15)):  # the last charge alone is too much
        clock.now_s += waited_s
        with pytest.raises(QuotaExceeded, match="the limit is 100") as caught:
            quota.enter(b"a")
        assert (caught.value.code, caught.value.retry_after_s) == ("token_limit_exceeded", retry_s)
    quota.enter(b"b")
    clock.now_s += 15
    quota.enter(b"a")


def test_what_is_given_back_is_forgotten_with_what_was_charged() -> None:
    """It was forgotten later, and until then the key could use as much twice."""
    clock = Clock()
    quota = Quota(
        requests_per_minute=None, concurrency_per_key=None, tokens_per_minute=100, clock=clock
    )
    quota.enter(b"a")
    quota.charge(b"a", 1000)
    clock.now_s += 30
    quota.charge(b"a", -1000, age_s=30)
    quota.enter(b"a")
    clock.now_s += 31
    quota.enter(b"a")
    quota.charge(b"a", 150)
    with pytest.raises(QuotaExceeded, match="has used 150 tokens"):
        quota.enter(b"a")
    quota.charge(b"a", -150, age_s=61)  # of a charge that is forgotten
    with pytest.raises(QuotaExceeded, match="has used 150 tokens"):
        quota.enter(b"a")


def test_an_empty_name_is_a_name() -> None:
    """`GEMSERVE_ADMIN_KEY_FILE=` must not pass for none."""
    with pytest.raises(ConfigError, match="needs api_key_file"):
        ServerConfig(admin_key_file="")


# over HTTP


@both
@either
async def test_requests_a_minute(tokenizer: Any, key_file: str, path: str, stream: bool) -> None:
    settings = {"api_key_file": key_file, "requests_per_minute": 3}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        for _ in range(3):
            assert (await api.post(path, stream=stream, headers=ALICE)).status_code == 200
        refused = await api.post(path, stream=stream, headers={**ALICE, "X-Request-Id": "mine"})
        assert_refused(refused, "rate_limit_exceeded")
        assert refused.headers.get_list("x-request-id") == ["mine"]
        assert len(api.core.requests) == 3
        assert (await api.post(path, headers=BOB)).status_code == 200
        assert (await api.post(path)).status_code == 401
        assert (await api.client.get("/v1/models", headers=ALICE)).status_code == 200
        metrics = await api.metrics()
        assert metrics['admission_rejections_total{reason="rate_limit_exceeded"}'] == 1
        assert not [name for name in metrics if "alice" in name]


async def test_wrong_requests_count_too(tokenizer: Any, key_file: str) -> None:
    settings = {"api_key_file": key_file, "requests_per_minute": 2}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        for _ in range(2):
            assert (await api.post(CHAT, headers=ALICE, temperature=9)).status_code == 400
        assert_refused(await api.post(CHAT, headers=ALICE), "rate_limit_exceeded")


async def test_no_body_is_read_beyond_the_limit(tokenizer: Any, key_file: str) -> None:
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b"x"

    settings = {"api_key_file": key_file, "requests_per_minute": 1}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        await api.post(CHAT, headers=ALICE)
        reply = await api.client.post(CHAT, content=pieces(), headers=ALICE)
        assert_refused(reply, "rate_limit_exceeded")
    assert num_sent == 0


@both
@either
async def test_concurrent_requests_at_the_limit(
    tokenizer: Any, key_file: str, path: str, stream: bool
) -> None:
    gate = threading.Event()
    settings = {"api_key_file": key_file, "concurrency_per_key": 3}
    async with api_over(
        FakeCore(gate, FILTERED, "ok"), tokenizer, max_queue=100, **settings
    ) as api:
        posts = [
            asyncio.create_task(api.post(path, stream=stream, headers=ALICE)) for _ in range(20)
        ]
        await wait_for_async(lambda: sum(p.done() for p in posts) == 17)
        bob = asyncio.create_task(api.post(path, stream=stream, headers=BOB))
        assert (await api.client.get("/v1/models", headers=ALICE)).status_code == 200
        gate.set()
        replies = await asyncio.gather(*posts)
        assert Counter(r.status_code for r in replies) == {200: 3, 429: 17}
        for reply in replies:
            if reply.status_code == 429:
                assert_refused(reply, "concurrency_limit_exceeded")
        assert (await bob).status_code == 200
        again = await asyncio.gather(*[api.post(path, headers=ALICE) for _ in range(3)])
        assert [r.status_code for r in again] == [200] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_and_answers_use_up_a_key_s_tokens(
    tokenizer: Any, key_file: str, stream: bool
) -> None:
    """Of all choices; and a key that has used them up is refused before its body is read."""
    core = FakeCore(FILTERED, "a", "b")
    settings = {"api_key_file": key_file, "tokens_per_minute": 111}
    async with api_over(core, tokenizer, **settings) as api:
        body = {"prompt": [400] * 50, "n": 2, "stream": stream}
        assert (await api.post(COMPLETIONS, headers=ALICE, **body)).status_code == 200  # 104 tokens
        assert (await api.post(COMPLETIONS, headers=ALICE, **body)).status_code == 200
        refused = await api.post(COMPLETIONS, headers=ALICE, prompt="Hi")
        assert_refused(refused, "token_limit_exceeded")
        assert "used 208 tokens within a minute, the limit is 111" in refused.text
