"""One long document that several replicas read: the choice is that of one, whatever they do.

Replicas are in this process, with the built-in model. What passes between them is pickled.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import httpx
import pytest
from fastapi import FastAPI

from gemserve.api.access.keys import Caller
from gemserve.api.app import create_app
from gemserve.api.serving import Serving, build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.contract import filter_plan
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Segment, SegmentPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve_fleet.replicas.messages import ChoicesAdded, RelayedRequest, RequestBody, TokensUsed
from gemserve_fleet.replicas.relayed_app import RelayedApp
from gemserve_fleet.replicas.replica_calls import ReplicaLost
from gemserve_fleet.replicas.segment_shares import FromPeer, Refused, SegmentShare, assign_groups
from gemserve_fleet.replicas.segment_sharing import LEAST_GROUPS, SegmentSharing
from gemserve_fleet.replicas.share_reading import ShareReader
from gemserve_fleet.replicas.staged_adapters import StagedAdapters
from tests import adapters
from tests.fakes import CHAT, parse_metrics, wait_for_async

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
PATIENCE_S = 120.0
GROUP, SEGMENT, LAYER = 1024, 256, 2
FILTER: dict[str, Any] = {
    "window": SEGMENT,
    "keep": 256,
    "fallback": False,
    "return_selection": True,
    "return_scores": "exact",
}
# "dies": after its first group. "hangs": it never answers. "lies": it answers something else
Conduct = Literal["reads", "dies", "hangs", "fails", "lies"]


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_plan, "GROUP_TOKENS", GROUP)


@dataclass(eq=False)
class Member:
    """A replica. `shares`: what others have asked it to read. `num_open`: how many it reads now."""

    name: str
    core: Core
    serving: Serving
    app: FastAPI = field(init=False)
    client: httpx.AsyncClient = field(init=False)
    reader: ShareReader = field(init=False)
    conduct: Conduct = "reads"
    is_ready: bool = True
    shares: list[SegmentShare] = field(default_factory=list)
    num_open: int = 0

    async def ask(self, text: str, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        reply = await self.client.post(path, json=body_of(text, **fields))
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    async def lent(self) -> dict[str, float]:
        """Segments that others were to read, by outcome."""
        metrics = parse_metrics((await self.client.get("/metrics")).text)
        start = 'lent_windows_total{outcome="'
        found = {k.removeprefix(start)[:-2]: v for k, v in metrics.items() if k.startswith(start)}
        return {outcome: count for outcome, count in found.items() if count}


class MemberPeers:
    def __init__(self, own_name: str, fleet: dict[str, Member]) -> None:
        self.own_name, self._fleet = own_name, fleet

    def names(self) -> Sequence[str]:
        return [name for name, member in self._fleet.items() if member.is_ready]

    async def read(self, peer: str, share: SegmentShare) -> AsyncGenerator[FromPeer, None]:
        member, num_sent = self._fleet[peer], 0
        member.shares.append(pickle.loads(pickle.dumps(share)))
        member.num_open += 1
        try:
            if member.conduct == "hangs":
                await asyncio.Event().wait()
            if member.conduct == "fails":
                raise RuntimeError("as it happens")
            async with aclosing(member.reader.read(member.shares[-1])) as parts:
                async for part in parts:
                    if member.conduct == "dies" and num_sent:
                        raise ReplicaLost(f"{peer} has died")
                    if member.conduct == "lies" and not isinstance(part, Refused):
                        read = replace(part.read, summaries=part.read.summaries[1:])
                        part = replace(part, read=read)
                    num_sent += 1
                    yield pickle.loads(pickle.dumps(part))
        finally:
            member.num_open -= 1


@asynccontextmanager
async def fleet_of(
    count: int, *, cache_memory: float = 0.5, timeout_s: float = PATIENCE_S, **server: Any
) -> AsyncIterator[list[Member]]:
    fleet = dict[str, Member]()
    for name in (f"r{number}" for number in range(count)):
        config = EngineConfig(
            kv_memory_bytes=1 << 28,
            filter_min_tokens=256,
            filter_layer=LAYER,
            cache_memory=cache_memory,
        )
        core = build_core(ModelConfig(device="cpu", dtype="float32"), config)
        serving = build_serving(core, model_name="builtin", config=ServerConfig(**server))
        member = fleet[name] = Member(name, core, serving)
        peers = MemberPeers(name, fleet)
        member.app = create_app(
            serving,
            is_replica=True,
            new_sharing=lambda backlog, metrics, engine=serving.engine, peers=peers: SegmentSharing(
                engine, backlog, peers, metrics.lent_segments(), timeout_s
            ),
        )
        member.reader = ShareReader(serving.engine, serving.adapters, member.app.state.backlog)
        transport = httpx.ASGITransport(member.app, raise_app_exceptions=False)
        member.client = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=PATIENCE_S
        )
    try:
        yield list(fleet.values())
    finally:
        for member in fleet.values():
            await member.client.aclose()
            member.serving.engine.stop()
            member.core.check_integrity()


def document(seed: int, num_lines: int = 130) -> str:
    rng = Random(seed)
    lines = (f"Line {n}: the guard at gate {rng.getrandbits(30)} sleeps." for n in range(num_lines))
    return "\n".join(lines)


def body_of(text: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"{text}\n\nWho sleeps at line 7?"}
    return {
        "model": "builtin",
        "messages": [message],
        "max_tokens": 4,
        "temperature": 0,
        "filter": FILTER,
        **fields,
    }


def choice_of(body: dict[str, Any]) -> Any:
    """All that says which tokens were kept and why, and the answer."""
    report = body["filter"]
    scores = report["scores"]["tokens"]
    return report["selection"], scores, report["coverage"], body["choices"][0]["message"]["content"]


async def choice_alone(text: str, **fields: Any) -> Any:
    async with fleet_of(1, cache_memory=0.0) as (alone,):
        body = await alone.ask(text, **fields)
        assert await alone.lent() == {}
        return choice_of(body)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("cache_memory", [0.0, 0.5])
async def test_the_choice_is_that_of_one_replica(count: int, cache_memory: float) -> None:
    text = document(1)
    expected = await choice_alone(text)
    async with fleet_of(count, cache_memory=cache_memory) as members:
        first = await members[0].ask(text)
        assert choice_of(first) == expected
        assert first["filter"]["cached_windows"] == 0
        num_segments = first["filter"]["windows"]
        num_lent = (await members[0].lent())["read"]
        assert num_segments / 2 - 4 <= num_lent * count / (2 * count - 2) <= num_segments / 2 + 4
        for owner in members:  # each finds every segment in somebody's cache, and reads none twice
            again = await owner.ask(text)
            assert choice_of(again) == expected
            assert again["filter"]["windows"] == num_segments
            assert again["filter"]["cached_windows"] == (num_segments if cache_memory else 0)
        assert set(await members[0].lent()) == {"read"}


async def test_choices_of_one_request_share_one_reading() -> None:
    text = document(2)
    expected = await choice_alone(text)
    async with fleet_of(2, cache_memory=0.0) as (owner, peer):
        body = await owner.ask(text, n=3)
        assert len(body["choices"]) == 3
        assert choice_of(body) == expected
        assert len(peer.shares) == 1


async def test_filter_requests_are_shared() -> None:
    text = document(3)
    fields = {"messages": body_of(text)["messages"], "model": "builtin", "filter": FILTER}
    async with fleet_of(1) as (alone,):
        expected = (await alone.client.post("/v1/filter", json=fields)).json()
    async with fleet_of(2) as (owner, _):
        found = (await owner.client.post("/v1/filter", json=fields)).json()
        assert found["filter"]["selection"] == expected["filter"]["selection"]
        assert (await owner.lent())["read"]


@pytest.mark.parametrize(
    ("conduct", "outcome"),
    [("dies", "lost"), ("hangs", "late"), ("fails", "failed"), ("lies", "failed")],
)
async def test_what_a_peer_does_not_read_the_owner_reads(conduct: Conduct, outcome: str) -> None:
    text = document(4)
    expected = await choice_alone(text)
    async with fleet_of(2, timeout_s=0.0 if conduct == "hangs" else PATIENCE_S) as (owner, peer):
        await owner.ask("Hello", filter="none")
        await owner.ask(document(5))  # from which the owner knows how fast it is
        before = await owner.lent()
        peer.conduct = conduct
        assert choice_of(await owner.ask(text)) == expected
        after = await owner.lent()
        assert after[outcome] > before.get(outcome, 0)
        assert peer.num_open == 0


async def test_a_busier_peer_refuses() -> None:
    text = document(6)
    expected = await choice_alone(text)
    async with fleet_of(2) as (owner, peer):
        busy = Request(
            request_id="busy",
            prompt_ids=[1] * 60_000,
            sampling=SamplingParams(max_tokens=1),
            filter=FilterParams(method="none", keep=16),
        )
        job = peer.app.state.backlog.enter(busy)
        assert choice_of(await owner.ask(text)) == expected
        assert set(await owner.lent()) == {"busy"}
        job.close()
        await owner.ask(document(7))
        assert (await owner.lent())["read"]


async def test_a_replica_that_is_not_ready_is_not_asked() -> None:
    async with fleet_of(2) as (owner, peer):
        peer.is_ready = False
        await owner.ask(document(8))
        assert (await owner.lent(), peer.shares) == ({}, [])


async def test_short_documents_and_stored_ones_are_not_shared() -> None:
    async with fleet_of(2) as (owner, peer):
        short = await owner.ask(document(9, 40))
        assert short["filter"]["windows"]
        stored = await owner.client.post(
            "/v1/documents", json={"text": document(10), "wait": True, "filter": FILTER}
        )
        if stored.status_code != 200:
            stored = await owner.client.post(
                "/v1/documents", json={"text": document(10), "wait": True}
            )
        part = {"type": "file", "file": {"file_id": stored.json()["id"]}}
        content = [part, {"type": "text", "text": "Who sleeps at line 7?"}]
        asked = await owner.ask("", messages=[{"role": "user", "content": content}])
        assert asked["filter"]["windows"]
        assert (await owner.lent(), peer.shares) == ({}, [])


async def test_a_peer_without_the_adapter_refuses(tmp_path: Path) -> None:
    text, settings = document(11), {"adapter_dir": str(tmp_path), "adapter_memory_bytes": 1 << 26}
    async with fleet_of(2, **settings) as (owner, peer):
        model = owner.core.model
        adapters.write(tmp_path / "one", "ntk", model, 0)
        adapters.write(tmp_path / "two", "ntk", model, 1)
        owner.serving.adapters.load("style", "one")
        body = await owner.ask(text, adapter="style")
        assert set(await owner.lent()) == {"adapter"}
        peer.serving.adapters.load("style", "two")
        await owner.ask(document(12), adapter="style")
        assert set(await owner.lent()) == {"adapter"}
        peer.serving.adapters.unload("style")
        peer.serving.adapters.load("style", "one")
        await owner.ask(document(13), adapter="style")
        assert (await owner.lent())["read"]
        again = await peer.ask(text, adapter="style")
        assert choice_of(again) == choice_of(body)


def relayed(text: str, caller: Caller | None, **fields: Any) -> RelayedRequest:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"one")],
        "client": None,
        "server": None,
        "asgi": {"version": "3.0"},
        "root_path": "",
    }
    body = json.dumps(body_of(text, **fields)).encode()
    return RelayedRequest(number="1", scope=scope, body=RequestBody(body), caller=caller)


def relayed_of(member: Member) -> RelayedApp:
    adapters = StagedAdapters(member.serving.adapters)
    return RelayedApp(member.app, member.app.state.documents, adapters, member.name)


async def test_tokens_are_charged_once_and_keys_share_nothing() -> None:
    text = document(14)
    used = []
    for count in (1, 2):
        async with fleet_of(count) as (owner, *peers):
            app = relayed_of(owner)
            charged = 0
            for key in (b"alice", b"bob"):
                request = relayed(text, Caller(key * 6, False))
                async for batch in app.answer(request):
                    charged += sum(each.count for each in batch if isinstance(each, TokensUsed))
                    assert not any(isinstance(each, ChoicesAdded) for each in batch)
            used.append(charged)
            for peer in peers:
                assert [share.tenant[:3] for share in peer.shares] == [b"ali", b"bob"]
                assert peer.core.cache_counts.hits == 0
    assert used[0] == used[1] > 6_000


async def test_a_client_that_leaves_ends_the_peers_work() -> None:
    async with fleet_of(2) as (owner, peer):
        app = relayed_of(owner)
        batches = app.answer(relayed(document(15, 1500), None, stream=True))
        reading = asyncio.create_task(anext_of_all(batches))
        await wait_for_async(lambda: peer.app.state.backlog.tokens_left, PATIENCE_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert peer.num_open == 0
        for member in (owner, peer):
            engine = member.serving.engine
            await wait_for_async(
                lambda engine=engine: not engine.num_running + engine.num_waiting, PATIENCE_S
            )
            assert member.app.state.backlog.tokens_left == 0


async def anext_of_all(batches: AsyncGenerator[Any, None]) -> None:
    async with aclosing(batches):
        async for _ in batches:
            pass


def plan_of(num_groups: int, seed: int = 0) -> SegmentPlan:
    rng = Random(seed)
    segments = tuple(
        Segment(start=GROUP * i, stop=GROUP * (i + 1), name=rng.randbytes(16))
        for i in range(num_groups)
    )
    return SegmentPlan(size=GROUP, anchor=(1,), asked=(2,), segments=segments)


@pytest.mark.parametrize("num_groups", [LEAST_GROUPS, 9, 64])
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_groups_are_divided_evenly_and_alike_everywhere(num_groups: int, num_replicas: int) -> None:
    names = [f"replica{n}" for n in range(num_replicas)]
    chosen = assign_groups(plan_of(num_groups), names)
    most = -(-num_groups // num_replicas)
    assert max(chosen.count(name) for name in names) <= most
    assert assign_groups(plan_of(num_groups), names[::-1]) == chosen
    if num_groups == 64:  # most stay where they are when a replica is added
        moved = assign_groups(plan_of(num_groups), [*names, "another"])
        stayed = sum(a == b for a, b in zip(chosen, moved, strict=True))
        assert stayed > num_groups * (num_replicas - 1) / (num_replicas + 1)
