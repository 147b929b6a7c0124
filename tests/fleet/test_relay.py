"""The ingress over replicas in this process: what clients see, also when a replica is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.access.quota import Quota
from gemserve.engine.worker import Engine
from gemserve_fleet.replicas import ingress, relayed_app
from gemserve_fleet.replicas.messages import FromReplica, RelayedRequest, RequestBody
from gemserve_fleet.replicas.replica_calls import ReplicaLost
from gemserve_fleet.replicas.replica_choice import RoutingHints
from tests.fakes import (
    BODIES,
    CHAT,
    COMPLETIONS,
    FILTERED,
    FakeCore,
    data_of,
    text_of,
    wait_for_async,
)
from tests.fleet.in_process import Fleet, fleet_of

pytestmark = pytest.mark.anyio
MESSAGES, RESPONSES, OLLAMA = "/v1/messages", "/v1/responses", "/api/chat"
QUESTION = [{"role": "user", "content": "Hello there"}]
STREAMS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {**BODIES[COMPLETIONS], "stream": True},
    CHAT: {**BODIES[CHAT], "stream": True},
    MESSAGES: {"model": "fake", "max_tokens": 9, "messages": QUESTION, "stream": True},
    RESPONSES: {"model": "fake", "input": "Hello there", "stream": True},
    OLLAMA: {"model": "fake", "messages": QUESTION},
}
ALICE = {"Authorization": "Bearer alice"}


@pytest.fixture
def gate() -> threading.Event:
    """Opened when the test ends, so that no core waits for ever."""
    return threading.Event()


@pytest.fixture
async def fleet(tokenizer: Any, gate: threading.Event) -> AsyncIterator[Fleet]:
    """Both replicas stop after a word until the gate is open."""
    cores = [FakeCore(FILTERED, "one ", gate, "two") for _ in range(2)]
    async with fleet_of(tokenizer, *cores) as made:
        yield made
        gate.set()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    return {"api_key_file": str(path)}


async def ask_in_background(fleet: Fleet, path: str = COMPLETIONS, **more: Any) -> Any:
    body = {**STREAMS[path], **more}
    return asyncio.create_task(fleet.client.post(path, json=body))


async def replica_at_work(fleet: Fleet) -> str:
    """The replica whose engine has drawn a word."""

    def working() -> list[str]:
        return [name for name, each in fleet.replicas.all.items() if each.core.started.is_set()]

    await wait_for_async(working)
    return working()[0]


def last_words(path: str, text: str) -> Any:
    """The error at a stream's end. There must be one, and the protocol's end after it."""
    if path == OLLAMA:
        lines = [json.loads(line) for line in text.splitlines()]
        assert [("error" in line) for line in lines].count(True) == 1
        return lines[-1]
    events = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    has_done = path in (COMPLETIONS, CHAT)
    assert events.count("[DONE]") == has_done
    contents = [json.loads(event) for event in events if event != "[DONE]"]
    assert events[-1] == "[DONE]" or not has_done
    return contents[-1]


async def test_replies_are_the_replicas_own(fleet: Fleet, gate: threading.Event) -> None:
    gate.set()
    whole = await fleet.client.post(CHAT, json=BODIES[CHAT])
    assert (whole.status_code, text_of([whole.json()])) == (200, "one two")
    assert len(whole.headers.get_list("x-request-id")) == 1
    streamed = await fleet.client.post(CHAT, json=STREAMS[CHAT], headers={"X-Request-Id": "mine"})
    assert text_of(data_of(streamed)) == "one two"
    assert streamed.headers["x-request-id"] == "mine"
    assert (await fleet.client.get("/v1/models")).json()["data"][0]["id"] == "fake"
    assert (await fleet.client.head("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES, OLLAMA, "/nothing"])
async def test_errors_of_replicas_have_the_protocols_form(fleet: Fleet, path: str) -> None:
    reply = await fleet.client.post(path, json={"model": 7})
    assert reply.status_code == (404 if path == "/nothing" else 400)
    error = reply.json()["error"]
    assert isinstance(error, str if path == OLLAMA else dict)
    assert len(reply.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("path", STREAMS)
async def test_a_replica_lost_in_a_stream_is_told_once_and_the_other_goes_on(
    fleet: Fleet, gate: threading.Event, path: str
) -> None:
    """Ray ends such a stream as if the answer were whole."""
    first = await ask_in_background(fleet, path)
    name = await replica_at_work(fleet)
    await asyncio.sleep(0.1)  # in which the first word reaches the client
    fleet[name].is_lost.set()
    reply: httpx.Response = await first
    assert reply.status_code == 200
    words = last_words(path, reply.text)
    assert "lost" in json.dumps(words)
    if path == RESPONSES:
        assert words["sequence_number"] > 0
    gate.set()
    other = await fleet.client.post(CHAT, json=STREAMS[CHAT])
    assert text_of(data_of(other)) == "one two"
    assert "gemserve_ingress_lost_requests_total 1.0" in (await fleet.client.get("/metrics")).text


async def test_a_replica_lost_before_the_reply_began_is_not_noticed(tokenizer: Any) -> None:
    gate = threading.Event()
    cores = [FakeCore(gate, FILTERED, "one ", "two") for _ in range(2)]
    async with fleet_of(tokenizer, *cores) as fleet:
        asked = await ask_in_background(fleet, CHAT)
        fleet[await replica_at_work(fleet)].is_lost.set()
        gate.set()
        assert text_of(data_of(await asked)) == "one two"
        assert "gemserve_ingress_retries_total 1.0" in (await fleet.client.get("/metrics")).text


async def test_a_second_replica_has_only_the_time_that_is_left(tokenizer: Any) -> None:
    """A request's time began anew at each replica, so it was answered long after its end."""
    gate = threading.Event()
    cores = [FakeCore(gate, FILTERED, "one ", "two") for _ in range(2)]
    async with fleet_of(tokenizer, *cores) as fleet:
        asked = asyncio.create_task(
            fleet.client.post(CHAT, json=STREAMS[CHAT], headers={"X-Request-Timeout": "30"})
        )
        name = await replica_at_work(fleet)
        await asyncio.sleep(0.5)
        fleet[name].is_lost.set()
        gate.set()
        assert text_of(data_of(await asked)) == "one two"
        left = [core.requests[0].begin_within_s for core in cores]
        assert 0.4 < max(left) - min(left) < 10


class CountedBody(bytes):
    num_made = num_alive = 0

    def __new__(cls, content: bytes) -> CountedBody:
        cls.num_made, cls.num_alive = cls.num_made + 1, cls.num_alive + 1
        return super().__new__(cls, content)

    def __del__(self) -> None:
        CountedBody.num_alive -= 1


async def test_nobody_holds_a_body_when_its_reply_has_begun(
    fleet: Fleet, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes held it until the stream ended, although it was no longer counted."""
    read = ingress._read_body

    async def read_counted(receive: Any) -> RequestBody:
        body = await read(receive)
        assert body is not None
        return RequestBody(CountedBody(body.content))

    monkeypatch.setattr(ingress, "_read_body", read_counted)
    asked = await ask_in_background(fleet, CHAT)
    await replica_at_work(fleet)
    await wait_for_async(lambda: not CountedBody.num_alive)
    assert CountedBody.num_made == 2
    assert not asked.done()
    gate.set()
    assert text_of(data_of(await asked)) == "one two"


# two long bodies do not fit, neither while they are read nor while they are kept
BODY_MEMORY: dict[str, Any] = {"max_body_bytes": 150_000, "body_memory_bytes": 150_000}
LONG_BODY = json.dumps(BODIES[CHAT]).ljust(145_000)


async def test_a_body_that_a_replica_has_is_not_being_read(tokenizer: Any) -> None:
    """It counted until its reply began, so a few long requests kept all other ones out."""
    gate = threading.Event()
    async with fleet_of(tokenizer, FakeCore(gate, FILTERED, "one"), **BODY_MEMORY) as fleet:
        first = asyncio.create_task(fleet.client.post(CHAT, content=LONG_BODY))
        await replica_at_work(fleet)
        second = asyncio.create_task(fleet.client.post(CHAT, content=LONG_BODY))
        await wait_for_async(lambda: second.done() or len(fleet["r0"].numbers) == 2)
        gate.set()
        for reply in await asyncio.gather(first, second):
            assert reply.status_code == 200, reply.text


async def test_only_a_request_whose_body_was_kept_is_tried_again(tokenizer: Any) -> None:
    gate = threading.Event()
    cores = [FakeCore(gate, FILTERED, "one") for _ in range(3)]
    async with fleet_of(tokenizer, *cores, **BODY_MEMORY) as fleet:
        fleet["r1"].load = fleet["r2"].load = 10**6
        kept = asyncio.create_task(fleet.client.post(CHAT, content=LONG_BODY))
        await wait_for_async(cores[0].started.is_set)
        fleet["r0"].load, fleet["r1"].load = 10**6, 0
        dropped = asyncio.create_task(fleet.client.post(CHAT, content=LONG_BODY))
        await wait_for_async(cores[1].started.is_set)
        fleet["r1"].is_lost.set()
        reply: httpx.Response = await dropped
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_lost")
        fleet["r0"].is_lost.set()
        await wait_for_async(cores[2].started.is_set)
        gate.set()
        assert (await kept).status_code == 200


async def test_a_request_that_is_tried_again_counts_once(
    tokenizer: Any, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of the lost attempt still counted, so the second one was refused with a 429."""
    settings: dict[str, Any] = {**keys, "concurrency_per_key": 3, "tokens_per_minute": 200}
    charges: list[int] = []
    charge = Quota.charge

    def note(quota: Quota, key: bytes, tokens: int, age_s: float = 0.0) -> None:
        charges.append(tokens)
        charge(quota, key, tokens, age_s)

    monkeypatch.setattr(Quota, "charge", note)
    gate = threading.Event()
    cores = [FakeCore(gate, FILTERED, "one ", "two") for _ in range(2)]
    async with fleet_of(tokenizer, *cores, **settings) as fleet:
        body = {**BODIES[CHAT], "n": 3}
        asked = asyncio.create_task(fleet.client.post(CHAT, json=body, headers=ALICE))
        fleet[await replica_at_work(fleet)].is_lost.set()
        gate.set()
        reply: httpx.Response = await asked
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert sum(charges) == 3 * usage["prompt_tokens"] + usage["completion_tokens"]
        again = await fleet.client.post(CHAT, json=body, headers=ALICE)
        assert again.status_code == 200, again.text


@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA])
async def test_a_request_that_two_replicas_were_lost_with_is_not_tried_again(
    tokenizer: Any, path: str
) -> None:
    gate = threading.Event()
    cores = [FakeCore(gate, FILTERED, "one") for _ in range(3)]
    async with fleet_of(tokenizer, *cores) as fleet:
        asked = await ask_in_background(fleet, path)
        for _ in range(2):
            name = await replica_at_work(fleet)
            fleet[name].core.started.clear()
            fleet[name].is_lost.set()
            await asyncio.sleep(0.05)
        reply: httpx.Response = await asked
        gate.set()
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        assert isinstance(reply.json()["error"], str if path == OLLAMA else dict)


async def test_a_second_replica_that_is_lost_before_it_accepts_is_the_last_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not counted, so that the request was sent again as long as replicas were lost."""
    gate = threading.Event()
    cores = [FakeCore(gate, FILTERED, "one") for _ in range(3)]
    async with fleet_of(tokenizer, *cores) as fleet:
        answer, tries = fleet.replicas.answer, list[RoutingHints]()

        async def answer_once(
            hints: RoutingHints, request: RelayedRequest
        ) -> AsyncGenerator[list[FromReplica], None]:
            tries.append(hints)
            assert len(tries) < 5, "it would not end"
            if len(tries) > 1:
                raise ReplicaLost("it has died")
            async with aclosing(answer(hints, request)) as batches:
                async for batch in batches:
                    yield batch

        monkeypatch.setattr(fleet.replicas, "answer", answer_once)
        asked = asyncio.create_task(fleet.client.post(CHAT, json=BODIES[CHAT]))
        name = await replica_at_work(fleet)
        fleet[name].is_lost.set()
        reply: httpx.Response = await asked
        gate.set()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_lost")
        assert len(tries) == 2
        assert tries[1].avoid == {name}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA])
async def test_without_a_replica_the_ingress_says_so(fleet: Fleet, path: str) -> None:
    for replica in fleet.replicas.all.values():
        replica.is_lost.set()
    reply = await fleet.client.post(path, json=STREAMS[path])
    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert "No replica is ready." in reply.text
    ready = await fleet.client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "loading"})


async def test_one_replica_is_enough_to_be_ready(fleet: Fleet) -> None:
    fleet["r0"].serving.engine.stop()
    for path in ("/health", "/ready", "/ping"):
        assert (await fleet.client.get(path)).status_code == 200
    fleet["r1"].serving.engine.stop()
    dead = await fleet.client.get("/health")
    assert (dead.status_code, dead.json()["status"]) == (503, "dead")


async def test_metrics_of_all_replicas_are_told_apart(
    fleet: Fleet, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a busy machine two replicas and the ingress in one process may take longer
    monkeypatch.setattr("gemserve_fleet.replicas.ingress.PROBE_TIMEOUT_S", 30.0)
    gate.set()
    await fleet.client.post(CHAT, json=BODIES[CHAT])
    text = (await fleet.client.get("/metrics")).text
    assert {"gemserve_replicas_ready 2.0", "gemserve_replicas_wanted 2.0"} <= set(text.split("\n"))
    for name in ("r0", "r1"):
        assert f'gemserve_engine_up{{replica="{name}"}} 1.0' in text
    assert text.count("# TYPE gemserve_engine_up ") == 1
    assert "gemserve_replicas_ready 2.0" in text


async def test_a_client_that_leaves_ends_the_work(fleet: Fleet, gate: threading.Event) -> None:
    left = await ask_in_background(fleet)
    name = await replica_at_work(fleet)
    left.cancel()
    await wait_for_async(lambda: not fleet[name].relayed.num_running)
    gate.set()
    assert await asyncio.to_thread(fleet[name].core.cancelled.wait, 5)


async def test_a_slow_reader_holds_the_replica_up(tokenizer: Any) -> None:
    """All of the answer waited in the ingress's memory, and limits of replies did not hold."""
    reads, parts = asyncio.Event(), list[bytes]()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()
            parts.append(message["body"])

    def waiting_bytes(fleet: Fleet) -> int:
        """What the replica has handed over, and nobody has read."""
        (answering,) = fleet["r0"].relayed._running.values()
        bodies = [each for each in answering._messages if isinstance(each, dict)]
        return sum(len(each.get("body", b"")) for each in bodies)

    core = FakeCore(FILTERED, *["x" * 50_000] * 200)
    async with fleet_of(tokenizer, core) as fleet:
        body = {**STREAMS[COMPLETIONS], "max_tokens": 300}
        asking = asyncio.create_task(ask_raw(fleet, COMPLETIONS, body, asyncio.Event(), send))
        await wait_for_async(lambda: core.started.is_set() and core.is_idle)
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert waiting_bytes(fleet) < 3 << 20
        reads.set()
        await asking
        assert b"".join(parts).count(b"x" * 50_000) == 200
        assert b"".join(parts).count(b"[DONE]") == 1


async def test_a_replica_that_nobody_may_call_any_more_goes_on(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lets nobody call one that is to stop when its requests have ended."""
    monkeypatch.setattr(relayed_app, "_SILENCE_S", 0.2)
    core = FakeCore(FILTERED, *["x" * 50_000] * 200)
    async with fleet_of(tokenizer, core) as fleet:
        call = fleet.replicas.call

        async def refuse(replica: str, method: str, *arguments: Any, **named: Any) -> Any:
            if method == "taken":
                raise ReplicaLost("it does not run any more")
            return await call(replica, method, *arguments, **named)

        monkeypatch.setattr(fleet.replicas, "call", refuse)
        body = {**STREAMS[COMPLETIONS], "max_tokens": 300}
        reply = await fleet.client.post(COMPLETIONS, json=body)
        assert reply.text.count("x" * 50_000) == 200
        assert reply.text.count("[DONE]") == 1


async def test_a_replica_is_told_of_a_reader_that_is_slow(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take the silence for its end, and send everything."""
    monkeypatch.setattr(relayed_app, "_SILENCE_S", 2.0)
    monkeypatch.setattr(ingress, "_TELL_PERIOD_S", 0.1)
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await reads.wait()

    core = FakeCore(FILTERED, *["x" * 50_000] * 200)
    async with fleet_of(tokenizer, core) as fleet:
        body = {**STREAMS[COMPLETIONS], "max_tokens": 300}
        asking = asyncio.create_task(ask_raw(fleet, COMPLETIONS, body, asyncio.Event(), send))
        await wait_for_async(lambda: core.started.is_set() and core.is_idle)
        await asyncio.sleep(3)
        (answering,) = fleet["r0"].relayed._running.values()
        assert answering._num_sent < 3 << 20
        reads.set()
        await asking


# keys and quotas


async def test_a_key_has_one_quota_for_all_replicas(tokenizer: Any, keys: dict[str, str]) -> None:
    settings: dict[str, Any] = {**keys, "requests_per_minute": 3}
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), **settings) as fleet:
        statuses = []
        for busy in ("r0", "r1", "r0", "r1"):  # each replica is used
            fleet["r0"].load, fleet["r1"].load = (90_000, 0) if busy == "r0" else (0, 90_000)
            reply = await fleet.client.post(CHAT, json=BODIES[CHAT], headers=ALICE)
            statuses.append(reply.status_code)
        assert statuses == [200, 200, 200, 429]
        assert all(each.numbers for each in fleet.replicas.all.values())
        no_key = await fleet.client.post(CHAT, json=BODIES[CHAT])
        assert no_key.status_code == 401
        bob = await fleet.client.post(
            CHAT, json=BODIES[CHAT], headers={"Authorization": "Bearer bob"}
        )
        assert bob.status_code == 200


async def test_choices_and_tokens_are_counted_where_the_key_is(
    tokenizer: Any, keys: dict[str, str]
) -> None:
    settings: dict[str, Any] = {**keys, "concurrency_per_key": 3, "tokens_per_minute": 40}
    gate = threading.Event()
    cores = [FakeCore(FILTERED, gate, "a", "b") for _ in range(2)]
    async with fleet_of(tokenizer, *cores, **settings) as fleet:
        two = {**BODIES[CHAT], "n": 2}
        first = asyncio.create_task(fleet.client.post(CHAT, json=two, headers=ALICE))
        await replica_at_work(fleet)
        refused = await fleet.client.post(CHAT, json=two, headers=ALICE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            429,
            "concurrency_limit_exceeded",
        )
        never = await fleet.client.post(CHAT, json={**two, "n": 4}, headers=ALICE)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        gate.set()
        assert (await first).status_code == 200
        statuses = [
            (await fleet.client.post(CHAT, json=BODIES[CHAT], headers=ALICE)).status_code
            for _ in range(8)
        ]
        assert statuses[-1] == 429


async def test_the_engine_knows_the_tenant(tokenizer: Any, keys: dict[str, str]) -> None:
    """Else caches of several keys would be one."""
    async with fleet_of(tokenizer, FakeCore(), **keys) as fleet:
        await fleet.client.post(CHAT, json=BODIES[CHAT], headers=ALICE)
        await fleet.client.post(CHAT, json=BODIES[CHAT], headers={"x-api-key": "bob"})
        tenants = {request.tenant for request in fleet["r0"].core.requests}
    assert len(tenants) == 2
    assert b"" not in tenants


# documents


async def store(fleet: Fleet, headers: dict[str, str]) -> str:
    body = {"text": "The river runs past the houses. " * 20, "wait": True}
    reply = await fleet.client.post("/v1/documents", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


def naming(document_id: str) -> dict[str, Any]:
    part = {"type": "file", "file": {"file_id": document_id}}
    question = {"type": "text", "text": "What runs past the houses?"}
    return {"model": "fake", "messages": [{"role": "user", "content": [part, question]}]}


async def test_a_document_is_known_wherever_a_request_lands(
    tokenizer: Any, keys: dict[str, str]
) -> None:
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), **keys) as fleet:
        fleet["r1"].load = 10_000
        document_id = await store(fleet, ALICE)
        (home,) = (name for name, each in fleet.replicas.all.items() if each.core.requests)
        assert home == "r0"
        fleet["r0"].load = 10**6
        asked = await fleet.client.post(CHAT, json=naming(document_id), headers=ALICE)
        assert asked.status_code == 200, asked.text
        assert len(fleet["r1"].core.requests) == 1
        assert fleet["r1"].core.requests[0].documents == (document_id,)
        bob = {"Authorization": "Bearer bob"}
        stolen = await fleet.client.post(CHAT, json=naming(document_id), headers=bob)
        assert stolen.status_code == 404
        fleet["r0"].is_lost.set()
        listed = (await fleet.client.get("/v1/documents", headers=ALICE)).json()["data"]
        assert [each["id"] for each in listed] == [document_id]


async def test_a_document_whose_client_leaves_is_stored_like_any_other(
    tokenizer: Any, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one replica knew it, and nothing of its key's quota was taken while it was read."""
    monkeypatch.setattr("gemserve_fleet.replicas.ingress._LEAVE_TIMEOUT_S", 0.1)
    settings: dict[str, Any] = {**keys, "concurrency_per_key": 1}
    gate, leaves = threading.Event(), asyncio.Event()
    cores = [FakeCore(gate, FILTERED, "one") for _ in range(2)]
    async with fleet_of(tokenizer, *cores, **settings) as fleet:
        body = {"text": "The river runs past the houses. " * 20, "wait": True}
        storing = asyncio.create_task(ask_and_leave(fleet, "/v1/documents", body, leaves))
        await replica_at_work(fleet)
        leaves.set()
        await asyncio.sleep(0.5)
        second = await fleet.client.post("/v1/documents", json={"text": "x"}, headers=ALICE)
        assert second.status_code == 429
        gate.set()
        await storing
        for busy, free in (("r0", "r1"), ("r1", "r0")):
            fleet[busy].load, fleet[free].load = 10**6, 0
            listed = await fleet.client.get("/v1/documents", headers=ALICE)
            assert len(listed.json()["data"]) == 1
        assert (await fleet.client.post(CHAT, json=BODIES[CHAT], headers=ALICE)).is_success


async def ask_and_leave(
    fleet: Fleet, path: str, body: dict[str, Any], leaves: asyncio.Event, method: str = "POST"
) -> None:
    """Ask as a client that disconnects. The server goes on; httpx would end it."""

    async def send(message: Any) -> None:
        assert not leaves.is_set(), message

    await ask_raw(fleet, path, body, leaves, send, method)


async def ask_raw(
    fleet: Fleet,
    path: str,
    body: dict[str, Any],
    leaves: asyncio.Event,
    send: Any,
    method: str = "POST",
) -> None:
    """Ask as a server of HTTP does, whose client may leave and read slowly."""
    content = json.dumps(body).encode()
    messages = iter([{"type": "http.request", "body": content, "more_body": False}])
    headers = {**ALICE, "Content-Type": "application/json", "Host": "localhost"}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "client": None,
        "headers": [(name.lower().encode(), text.encode()) for name, text in headers.items()],
    }

    async def receive() -> Any:
        for message in messages:
            return message
        await leaves.wait()
        return {"type": "http.disconnect"}

    assert isinstance(fleet.client._transport, httpx.ASGITransport)
    await fleet.client._transport.app(scope, receive, send)


async def stored_in_both(fleet: Fleet) -> str:
    """The id of a document that has been asked about at each of two replicas."""
    document_id = await store(fleet, ALICE)
    for busy, free in (("r0", "r1"), ("r1", "r0")):
        fleet[busy].load, fleet[free].load = 10**6, 0
        assert (await fleet.client.post(CHAT, json=naming(document_id), headers=ALICE)).is_success
    return str(document_id)


async def test_a_deleted_document_is_gone_everywhere(tokenizer: Any, keys: dict[str, str]) -> None:
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), **keys) as fleet:
        document_id = await stored_in_both(fleet)
        path = f"/v1/documents/{document_id}"
        assert (await fleet.client.delete(path, headers=ALICE)).status_code == 200
        cores = [each.core for each in fleet.replicas.all.values()]
        await wait_for_async(lambda: all(document_id in core.forgotten for core in cores))
        for busy, free in (("r0", "r1"), ("r1", "r0")):
            fleet[busy].load, fleet[free].load = 10**6, 0
            asked = await fleet.client.post(CHAT, json=naming(document_id), headers=ALICE)
            assert asked.status_code == 404
            assert (await fleet.client.get(path, headers=ALICE)).status_code == 404


class SlowToForget(FakeCore):
    """Forgets documents when `gate` is open, as if a step took until then."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate, self.is_asked = gate, threading.Event()

    def forget_documents(self, ids: Collection[str]) -> None:
        self.is_asked.set()
        self.gate.wait(30)
        super().forget_documents(ids)


async def test_a_document_is_gone_everywhere_although_its_client_has_left(
    tokenizer: Any, keys: dict[str, str]
) -> None:
    """Deleting waits for a step. One replica deleted it, and the next question brought it back."""
    gate, leaves = threading.Event(), asyncio.Event()
    cores = [SlowToForget(gate) for _ in range(2)]
    async with fleet_of(tokenizer, *cores, **keys) as fleet:
        document_id = await stored_in_both(fleet)
        path = f"/v1/documents/{document_id}"
        deleting = asyncio.create_task(ask_and_leave(fleet, path, {}, leaves, "DELETE"))
        await wait_for_async(lambda: any(core.is_asked.is_set() for core in cores))
        leaves.set()
        await wait_for_async(lambda: all(each.is_over for each in fleet.ingress._running))
        gate.set()
        await deleting
        await wait_for_async(lambda: all(document_id in core.forgotten for core in cores))
        for busy, free in (("r0", "r1"), ("r1", "r0")):
            fleet[busy].load, fleet[free].load = 10**6, 0
            found = await fleet.client.get(path, headers=ALICE)
            assert found.status_code == 404


async def test_limits_of_documents_hold_over_all_replicas(
    tokenizer: Any, keys: dict[str, str]
) -> None:
    settings: dict[str, Any] = {**keys, "max_documents": 2}
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), **settings) as fleet:
        await store(fleet, ALICE)
        fleet["r0"].load = 10**6
        await store(fleet, ALICE)
        third = await fleet.client.post("/v1/documents", json={"text": "x"}, headers=ALICE)
        assert third.json()["error"]["code"] == "too_many_documents"


async def test_an_ingress_without_requests_drops_what_has_expired(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts stayed in its memory until the next request."""
    monkeypatch.setattr("gemserve_fleet.replicas.ingress._EXPIRY_PERIOD_S", 0.1)
    async with fleet_of(tokenizer, FakeCore()) as fleet:
        body = {"text": "The river runs past the houses.", "ttl": 1}
        assert (await fleet.client.post("/v1/documents", json=body)).status_code == 200
        assert len(fleet.ingress._documents) == 1
        await wait_for_async(lambda: not len(fleet.ingress._documents))


# stopping


async def test_draining_lets_streams_end_and_refuses_others(
    fleet: Fleet, gate: threading.Event
) -> None:
    asked = await ask_in_background(fleet, CHAT)
    await replica_at_work(fleet)
    fleet.ingress.drain(60)
    refused = await fleet.client.post(CHAT, json=BODIES[CHAT])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    assert (await fleet.client.get("/ready")).json() == {"status": "shutting down"}
    assert (await fleet.client.get("/health")).status_code == 200
    gate.set()
    assert text_of(data_of(await asked)) == "one two"


async def test_stopping_ends_streams_with_an_error(fleet: Fleet) -> None:
    asked = await ask_in_background(fleet, CHAT)
    name = await replica_at_work(fleet)
    await asyncio.sleep(0.1)
    fleet.ingress.stop()
    assert last_words(CHAT, (await asked).text)["error"]["code"] == "cancelled"
    assert await asyncio.to_thread(fleet[name].core.cancelled.wait, 5)


async def test_bodies_have_their_limit_in_the_ingress(tokenizer: Any) -> None:
    async with fleet_of(tokenizer, FakeCore(), max_body_bytes=100) as fleet:
        reply = await fleet.client.post(MESSAGES, content=b"x" * 101)
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "request_too_large"
        assert not fleet["r0"].numbers


async def test_load_is_that_of_all_replicas(fleet: Fleet, gate: threading.Event) -> None:
    first, second = await ask_in_background(fleet), None
    name = await replica_at_work(fleet)
    fleet[name].load = 10**6
    second = await ask_in_background(fleet)
    engines: list[Engine] = [each.serving.engine for each in fleet.replicas.all.values()]
    await wait_for_async(lambda: all(engine.num_running for engine in engines))
    assert (await fleet.client.get("/load")).json() == {"server_load": 2}
    gate.set()
    await asyncio.gather(first, second)
