"""`gemserve serve --replicas 2` as a whole: real processes of Ray, the built-in model, one kill -9.

It is one test, because a cluster takes half a minute to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.fakes import CHAT, COMPLETIONS

pytest.importorskip("ray", reason="needs the packages of gemserve[ray]")
# A cluster is a dozen processes: beside other tests, what it waits for takes too long.
WANTED = "GEMSERVE_TEST_CLUSTER"
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WANTED not in os.environ, reason="only in `make test-replicas`"),
]
MARK = "REPLICAS_TEST"
START_S, PATIENCE_S = 240.0, 60.0  # for machines that are busy
PER_MINUTE = 12
TEXT = "The river runs past the houses. " * 60


@dataclass(frozen=True, slots=True)
class Cluster:
    process: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    mark: str

    async def post(self, path: str, key: str, **fields: Any) -> httpx.Response:
        body = {"model": "builtin", "max_tokens": 8, **fields}
        return await self.client.post(path, json=body, headers=bearer(key))

    async def stream(self, key: str, num_tokens: int) -> list[str]:
        """The data of a stream of so many tokens."""
        fields = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True}
        reply = await self.post(COMPLETIONS, key, stream=True, **fields)
        assert reply.status_code == 200, reply.text
        return [x.removeprefix("data: ") for x in reply.text.splitlines() if x]

    async def metric(self, name: str) -> dict[str, float]:
        """The sum of a metric by replica."""
        text = (await self.client.get("/metrics")).text
        sums: Counter[str] = Counter()
        for labels, value in re.findall(rf"^gemserve_{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            found = re.search(r'replica="(\w+)"', labels)
            assert found is not None
            sums[found[1]] += float(value)
        return dict(sums)

    def processes(self, kind: str = "") -> list[int]:
        """Processes that the server has started, itself included, whose command begins so."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_ours = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if is_ours and (folder / "cmdline").read_text().startswith(kind):
                    found.append(int(folder.name))
        return found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def until(condition: Any, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.2)


@pytest.fixture
async def cluster(tmp_path: Path) -> Any:
    keys, mark = tmp_path / "keys", uuid.uuid4().hex
    keys.write_text("\n".join(f"key{number}" for number in range(10)) + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", "--replicas", "2", "--port", str(port), "--kv-memory", "256MiB"]
    words += ["--device", "cpu", "--filter", "none", "--api-key-file", str(keys)]
    words += ["--requests-per-minute", str(PER_MINUTE), "--allowed-host", "*", "--cpu-step", "off"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GEMSERVE_", "RAY_"))}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gemserve.cli.main", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark, "OMP_NUM_THREADS": "1"},
        )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        made = Cluster(process, client, mark)
        try:
            yield made
        except BaseException:
            print((tmp_path / "log").read_text()[-6000:])
            raise
        finally:
            process.kill()
            process.wait()
            for pid in made.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_two_replicas_from_start_to_end(cluster: Cluster) -> None:
    await it_is_ready_when_one_replica_is(cluster)
    await replies_are_those_of_one_engine(cluster)
    await both_replicas_are_used(cluster)
    await a_quota_holds_over_both(cluster)
    await a_document_is_known_on_both(cluster)
    await a_long_document_is_read_by_both(cluster)
    await a_text_goes_where_it_is_cached(cluster)
    await a_client_that_leaves_ends_its_work(cluster)
    await a_kill_ends_only_the_streams_of_its_replica(cluster)
    await it_drains_and_leaves_nothing(cluster)


async def it_is_ready_when_one_replica_is(cluster: Cluster) -> None:
    said = set()

    async def ready() -> bool:
        assert cluster.process.poll() is None
        try:
            reply = await cluster.client.get("/ready")
        except httpx.TransportError:
            return False
        said.add(reply.json()["status"])
        return reply.status_code == 200

    await until(ready, START_S)
    assert said == {"loading", "ok"}

    async def both() -> bool:
        return len(await cluster.metric("engine_up")) == 2

    await until(both, START_S)


async def replies_are_those_of_one_engine(cluster: Cluster) -> None:
    fields: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "ignore_eos": True}
    texts = [
        (await cluster.post(COMPLETIONS, "key0", **fields)).json()["choices"][0]["text"]
        for _ in range(2)
    ]
    data = [
        x.removeprefix("data: ")
        for x in (await cluster.post(COMPLETIONS, "key0", stream=True, **fields)).text.splitlines()
        if x
    ]
    assert data.pop() == "[DONE]"
    streamed = "".join(json.loads(x)["choices"][0]["text"] for x in data)
    assert {streamed, *texts} == {streamed}
    openai = await cluster.post(CHAT, "key0", messages=[], temperature="hot")
    assert (openai.status_code, openai.json()["error"]["type"]) == (400, "invalid_request_error")
    anthropic = await cluster.post("/v1/messages", "key0", messages="?")
    assert (anthropic.status_code, anthropic.json()["type"]) == (400, "error")
    ollama = await cluster.post("/api/chat", "wrong", messages=[])
    assert (ollama.status_code, type(ollama.json()["error"])) == (401, str)


async def both_replicas_are_used(cluster: Cluster) -> None:
    await asyncio.gather(*(cluster.stream("key1", 20) for _ in range(6)))
    ended = await cluster.metric("request_success_total")
    assert len(ended) == 2
    assert min(ended.values()) >= 1


async def a_quota_holds_over_both(cluster: Cluster) -> None:
    asked = [cluster.post(COMPLETIONS, "key2", prompt="Hello") for _ in range(PER_MINUTE + 4)]
    statuses = Counter(reply.status_code for reply in await asyncio.gather(*asked))
    assert statuses == {200: PER_MINUTE, 429: 4}


async def a_document_is_known_on_both(cluster: Cluster) -> None:
    stored = await cluster.client.post(
        "/v1/documents", json={"text": TEXT, "wait": True}, headers=bearer("key3")
    )
    assert stored.status_code == 200, stored.text
    document_id = stored.json()["id"]
    part = {"type": "file", "file": {"file_id": document_id}}
    content = [part, {"type": "text", "text": "What runs past the houses?"}]
    before = await cluster.metric("request_success_total")
    messages = [{"role": "user", "content": content}]
    asked = [cluster.post(CHAT, "key3", messages=messages, max_tokens=40) for _ in range(8)]
    assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
    after = await cluster.metric("request_success_total")
    assert all(after[name] > before[name] for name in after)
    path = f"/v1/documents/{document_id}"
    assert (await cluster.client.delete(path, headers=bearer("key3"))).status_code == 200
    assert (await cluster.client.get(path, headers=bearer("key3"))).status_code == 404


async def a_text_goes_where_it_is_cached(cluster: Cluster) -> None:
    async def ask(text: str, question: str) -> tuple[str, int]:
        """Which replica has answered, and how many tokens it had."""
        before = await cluster.metric("request_success_total")
        messages = [{"role": "user", "content": f"{text} {question}"}]
        reply = await cluster.post(CHAT, "key8", messages=messages, max_tokens=4)
        assert reply.status_code == 200, reply.text
        after = await cluster.metric("request_success_total")
        (name,) = (name for name in after if after[name] > before[name])
        details = reply.json()["usage"]["prompt_tokens_details"]
        return name, details["cached_tokens"]

    await asyncio.sleep(2.5)  # until the router knows that all other work has ended
    first, second = (numbered_lines(place) for place in ("harbour", "station"))
    home, num_cached = await ask(first, "Where is line 5?")
    assert num_cached == 0
    await asyncio.sleep(6.0)  # until the replica has told what it has, on a busy machine, too
    for question in ("Where is line 6?", "Where is line 7?"):
        name, num_cached = await ask(first, question)
        assert name == home
        assert num_cached > 500
    # when that replica is busy, a document that is on neither goes to the other one
    busy = asyncio.create_task(ask_all_day(cluster, first))
    await asyncio.sleep(2.5)  # until a report has counted all its tokens
    before = await cluster.metric("request_success_total")
    messages = [{"role": "user", "content": f"{second} Where is line 5?"}]
    reply = await cluster.post(CHAT, "key8", messages=messages, max_tokens=4)
    assert reply.status_code == 200, reply.text
    after = await cluster.metric("request_success_total")
    assert [name for name in after if after[name] > before[name] and name != home]
    assert not busy.done()
    busy.cancel()


async def a_long_document_is_read_by_both(cluster: Cluster) -> None:
    text = numbered_lines("market", 1250)
    choice = {"method": "sieve", "window": 1024, "keep": 256, "fallback": False}
    asked = {"filter": {**choice, "return_selection": True}, "model": "builtin"}
    messages = [{"role": "user", "content": f"{text}\n\nWhere is line 7?"}]
    reports = []
    for _ in range(2):
        reply = await cluster.client.post(
            "/v1/filter", json={**asked, "messages": messages}, headers=bearer("key8")
        )
        assert reply.status_code == 200, reply.text
        reports.append(reply.json()["filter"])
    text = (await cluster.client.get("/metrics")).text
    found = re.findall(r"^gemserve_lent_windows_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    outcomes: Counter[str] = Counter()
    for labels, count in found:
        outcomes[labels.partition('outcome="')[2].partition('"')[0]] += int(float(count))
    assert outcomes["read"] > reports[0]["windows"] / 4, outcomes
    assert +outcomes == {"read": outcomes["read"]}
    assert reports[1]["selection"] == reports[0]["selection"]
    assert (reports[0]["cached_windows"], reports[1]["cached_windows"]) == (
        0,
        reports[0]["windows"],
    )


def numbered_lines(place: str, count: int = 300) -> str:
    numbers = Random(place)
    lines = (f"Line {n} is at {place} {numbers.getrandbits(30)}." for n in range(count))
    return "\n".join(lines)


async def ask_all_day(cluster: Cluster, text: str) -> httpx.Response:
    """As many tokens as four of these documents have."""
    messages = [{"role": "user", "content": f"{text} Where is line 8?"}]
    fields = {"n": 4, "max_tokens": 2500, "ignore_eos": True}
    return await cluster.post(CHAT, "key8", messages=messages, **fields)


async def a_client_that_leaves_ends_its_work(cluster: Cluster) -> None:
    body = {"model": "builtin", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
    async with cluster.client.stream(
        "POST", COMPLETIONS, json={**body, "stream": True}, headers=bearer("key4")
    ) as reply:
        await anext(reply.aiter_lines())

    async def idle() -> bool:
        load = await cluster.client.get("/load", headers=bearer("key4"))
        return load.json() == {"server_load": 0}

    await until(idle, 20)


async def a_kill_ends_only_the_streams_of_its_replica(cluster: Cluster) -> None:
    await asyncio.sleep(2.5)  # until the router knows that all other work has ended
    running = [asyncio.create_task(cluster.stream("key5", 400)) for _ in range(4)]
    await asyncio.sleep(1.0)
    (victim, *_) = cluster.processes("ray::ServeReplica")
    os.kill(victim, signal.SIGKILL)
    after = [asyncio.create_task(cluster.stream("key6", 10)) for _ in range(4)]
    streams, later = await asyncio.gather(*running), await asyncio.gather(*after)
    outcomes = []
    for data in streams:
        assert data.count("[DONE]") == 1
        assert data[-1] == "[DONE]"
        errors = [json.loads(x)["error"] for x in data[:-1] if "error" in json.loads(x)]
        outcomes.append([error["code"] for error in errors])
    assert sorted(outcomes)[0] == []
    assert sorted(outcomes)[-1] == ["replica_lost"]
    assert all(outcome in ([], ["replica_lost"]) for outcome in outcomes)
    assert all("error" not in x for data in later for x in data)

    async def both() -> bool:
        pids = cluster.processes("ray::ServeReplica")
        return victim not in pids and len(await cluster.metric("engine_up")) == 2

    await until(both, START_S)


async def it_drains_and_leaves_nothing(cluster: Cluster) -> None:
    running = asyncio.create_task(cluster.stream("key7", 300))
    await asyncio.sleep(0.5)
    cluster.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    ready = await cluster.client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "shutting down"})
    refused = await cluster.post(COMPLETIONS, "key7", prompt="Hello")
    assert refused.status_code == 503
    data = await running
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    assert await asyncio.to_thread(cluster.process.wait, PATIENCE_S) == 143

    async def none_left() -> bool:
        return not cluster.processes()

    await until(none_left, 20)
