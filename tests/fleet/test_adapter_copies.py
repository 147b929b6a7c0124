"""Adapters over several replicas: all have the same, whatever is lost or changed meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.adapters import adapter_store as store_module
from gemserve.adapters.adapter_store import AdapterStore
from gemserve.errors import ConfigError
from gemserve.model.passes.causal_model import CausalModel
from gemserve_fleet.replicas.ingress import create_ingress
from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
from tests import adapters, models
from tests.fakes import COMPLETIONS, FakeCore, wait_for_async
from tests.fleet.in_process import Fleet, fleet_of, replica_of

pytestmark = pytest.mark.anyio
ADAPTERS = "/v1/adapters"
MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


@pytest.fixture
def root(tmp_path: Path, model: CausalModel) -> Path:
    folder = tmp_path / "root"
    adapters.write(folder / "one", "prefix", model)
    adapters.write(folder / "two", "prefix", model, seed=2)
    return folder


@pytest.fixture
def stores(model: CausalModel, root: Path) -> Any:
    return partial(AdapterStore, model, root, MIB)


@pytest.fixture
async def fleet(tokenizer: Any, stores: Any) -> AsyncIterator[Fleet]:
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), store=stores) as made:
        yield made


async def load(fleet: Fleet, name: str = "p", path: str = "one", **more: Any) -> httpx.Response:
    return await fleet.client.post(ADAPTERS, json={"name": name, "path": path}, **more)


async def ask_of(fleet: Fleet, replica: str, adapter: str = "p") -> httpx.Response:
    """A request that goes to this replica, because all others are busy."""
    for name, each in fleet.replicas.all.items():
        each.load = 0 if name == replica else 10**6
    body = {"model": "fake", "prompt": "Hi", "adapter": adapter}
    reply = await fleet.client.post(COMPLETIONS, json=body)
    assert fleet[replica].numbers, f"{replica} has not had the request"
    fleet[replica].numbers.clear()
    return reply


def versions(fleet: Fleet) -> dict[str, dict[str, str]]:
    """What each replica's store has, as nothing but the store knows it."""
    return {
        name: {info.name: info.version for info in fleet[name].serving.adapters.list()}
        for name in fleet.replicas.names()
    }


def join(fleet: Fleet, tokenizer: Any, stores: Any, name: str = "r2") -> None:
    """A replica that has nothing starts."""
    fleet.replicas.all[name] = replica_of(name, FakeCore(), tokenizer, store=stores)


async def test_an_adapter_is_loaded_and_unloaded_everywhere(fleet: Fleet) -> None:
    loaded = await load(fleet)
    assert loaded.status_code == 200, loaded.text
    version = loaded.json()["version"]
    assert versions(fleet) == {"r0": {"p": version}, "r1": {"p": version}}
    for name in ("r0", "r1"):
        assert (await ask_of(fleet, name)).status_code == 200
        (used,) = (request.adapter for request in fleet[name].core.requests)
        assert used is not None
        assert used.version == version
        listed = (await fleet.client.get(ADAPTERS)).json()["data"]
        assert [(each["name"], each["version"]) for each in listed] == [("p", version)]
        served = (await fleet.client.get("/v1/models")).json()["data"]
        assert [each["id"] for each in served] == ["fake", "fake:p"]
    gone = await fleet.client.delete(f"{ADAPTERS}/p")
    assert (gone.status_code, gone.json()["deleted"]) == (200, True)
    assert versions(fleet) == {"r0": {}, "r1": {}}
    for name in ("r0", "r1"):
        assert (await ask_of(fleet, name)).json()["error"]["code"] == "adapter_not_found"
    again = await fleet.client.delete(f"{ADAPTERS}/p")
    assert (again.status_code, again.json()["error"]["param"]) == (404, "name")


async def test_if_one_replica_refuses_none_has_it(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    """And a name that was taken keeps the adapter that it had."""
    sizes = iter((MIB, 12_000))  # the second one has room for a prefix, and for no term

    def store() -> AdapterStore:
        return AdapterStore(model, root, next(sizes))

    adapters.write(root / "large", "ntk", model)
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), store=store) as fleet:
        before = (await load(fleet)).json()["version"]
        for name in ("p", "q"):
            refused = await load(fleet, name, "large")
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_adapter"
            assert "all adapters may take 12000" in refused.json()["error"]["message"]
        assert versions(fleet) == {"r0": {"p": before}, "r1": {"p": before}}
        held = [fleet[name].serving.adapters.num_bytes for name in ("r0", "r1")]
        assert held[0] == held[1]  # what was loaded for nothing has left memory
        assert (await load(fleet, "p", "two")).status_code == 200
        assert (await ask_of(fleet, "r1")).status_code == 200


async def test_two_loads_of_one_name_end_with_the_same_everywhere(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_adapter = store_module.load_adapter
    turns = iter((0.2, 0.0, 0.0, 0.2))

    def slowly(*arguments: Any) -> Any:
        threading.Event().wait(next(turns, 0))  # so that they could overtake each other
        return load_adapter(*arguments)

    monkeypatch.setattr(store_module, "load_adapter", slowly)
    replies = await asyncio.gather(load(fleet, path="one"), load(fleet, path="two"))
    assert [reply.status_code for reply in replies] == [200, 200]
    found = versions(fleet)
    assert found["r0"] == found["r1"]
    assert found["r0"]["p"] in {reply.json()["version"] for reply in replies}


async def test_a_folder_that_changes_while_it_is_loaded_is_refused(
    fleet: Fleet, model: CausalModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else replicas would answer with different adapters of one name."""
    load_adapter, numbers = store_module.load_adapter, iter(range(10, 20))
    turn = threading.Lock()

    def changed_before(*arguments: Any) -> Any:
        with turn:
            adapters.write(root / "one", "prefix", model, seed=next(numbers))
            return load_adapter(*arguments)

    monkeypatch.setattr(store_module, "load_adapter", changed_before)
    refused = await load(fleet)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
    assert "different files" in refused.json()["error"]["message"]
    assert versions(fleet) == {"r0": {}, "r1": {}}
    monkeypatch.undo()
    assert (await load(fleet)).status_code == 200


async def test_a_replica_that_joins_has_all_before_it_gets_requests(
    fleet: Fleet, tokenizer: Any, stores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(fleet)
    await load(fleet, "q", "two")
    await fleet.client.delete(f"{ADAPTERS}/q")
    gate, load_adapter = threading.Event(), store_module.load_adapter

    def when_open(*arguments: Any) -> Any:
        assert gate.wait(20)
        return load_adapter(*arguments)

    monkeypatch.setattr(store_module, "load_adapter", when_open)
    join(fleet, tokenizer, stores)
    fleet["r0"].load = fleet["r1"].load = 10**6  # it would get everything
    try:
        for _ in range(3):
            body = {"model": "fake", "prompt": "Hi", "adapter": "p"}
            assert (await fleet.client.post(COMPLETIONS, json=body)).status_code == 200
        assert not fleet["r2"].numbers
        metrics = (await fleet.client.get("/metrics")).text
        assert "gemserve_replicas_ready 2.0" in metrics
        assert "\nprocess_resident_memory_bytes " in metrics, "of the ingress itself"
    finally:
        gate.set()
    await wait_for_async(lambda: "r2" in fleet.ingress.adapters.ready_now())
    assert (await ask_of(fleet, "r2")).status_code == 200
    found = versions(fleet)
    assert found["r2"] == found["r0"]
    assert list(found["r2"]) == ["p"]


async def test_a_replica_that_joins_during_a_change_gets_it(
    fleet: Fleet, tokenizer: Any, stores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.ingress.adapters.ready()
    gate, started, load_adapter = threading.Event(), threading.Event(), store_module.load_adapter

    def when_open(*arguments: Any) -> Any:
        started.set()
        assert gate.wait(20)
        return load_adapter(*arguments)

    monkeypatch.setattr(store_module, "load_adapter", when_open)
    loading = asyncio.create_task(load(fleet))
    await wait_for_async(started.is_set)
    join(fleet, tokenizer, stores)
    await wait_for_async(lambda: "r2" in fleet.ingress.adapters.ready_now())
    gate.set()
    assert (await loading).status_code == 200
    assert (await ask_of(fleet, "r0")).status_code == 200
    await wait_for_async(lambda: "r2" in fleet.ingress.adapters.ready_now())
    assert (await ask_of(fleet, "r2")).status_code == 200


@pytest.mark.parametrize("method", ["adopt_adapters", "answer_whole"])
async def test_a_replica_that_dies_during_a_change_does_not_stop_it(
    fleet: Fleet, tokenizer: Any, stores: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """`answer_whole`: while it loads. `adopt_adapters`: when all have loaded."""
    await fleet.ingress.adapters.ready()
    original = getattr(fleet["r1"].relayed, method)

    async def die(*arguments: Any) -> Any:
        fleet["r1"].is_lost.set()
        return await original(*arguments)

    monkeypatch.setattr(fleet["r1"].relayed, method, die)
    loaded = await load(fleet)
    assert loaded.status_code == 200, loaded.text
    join(fleet, tokenizer, stores)  # in its place
    await wait_for_async(lambda: "r2" in fleet.ingress.adapters.ready_now())
    assert versions(fleet) == {name: {"p": loaded.json()["version"]} for name in ("r0", "r2")}


async def test_if_all_die_the_change_is_not_made(fleet: Fleet, tokenizer: Any, stores: Any) -> None:
    await fleet.ingress.adapters.ready()
    for name in ("r0", "r1"):
        fleet[name].is_lost.set()
    refused = await load(fleet)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    join(fleet, tokenizer, stores)
    assert (await load(fleet)).status_code == 200


async def test_a_replica_that_did_not_answer_is_left_out_until_it_has_all(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica may hang for a while and go on."""
    await fleet.ingress.adapters.ready()
    original = fleet.replicas.call
    hangs = True

    async def call(replica: str, method: str, *arguments: Any, **more: Any) -> Any:
        if hangs and replica == "r1":
            from gemserve_fleet.replicas.replica_calls import ReplicaLost

            raise ReplicaLost("r1 has not answered")
        return await original(replica, method, *arguments, **more)

    monkeypatch.setattr(fleet.replicas, "call", call)
    assert (await load(fleet)).status_code == 200
    assert fleet.ingress.adapters.ready_now() == ["r0"]
    hangs = False
    await wait_for_async(lambda: len(fleet.ingress.adapters.ready_now()) == 2)
    assert (await ask_of(fleet, "r1")).status_code == 200


async def test_a_replica_never_has_another_version(
    fleet: Fleet, tokenizer: Any, stores: Any, model: CausalModel, root: Path
) -> None:
    """The folder has changed since all loaded it: one that joins says so, and serves the rest."""
    await load(fleet)
    await load(fleet, "q", "two")
    adapters.write(root / "one", "prefix", model, seed=9)
    join(fleet, tokenizer, stores)
    await wait_for_async(lambda: "r2" in fleet.ingress.adapters.ready_now())
    found = versions(fleet)
    assert found["r2"] == found["r0"]
    assert (await ask_of(fleet, "r0")).status_code == 200
    refused = await ask_of(fleet, "r2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_unavailable")
    assert "other replicas have" in refused.json()["error"]["message"]
    assert (await ask_of(fleet, "r2", "q")).status_code == 200
    assert (await load(fleet)).status_code == 200  # the new files, everywhere
    for name in ("r0", "r1", "r2"):
        assert (await ask_of(fleet, name)).status_code == 200


async def test_only_an_administrator_may_change_them(
    tokenizer: Any, stores: Any, root: Path, tmp_path: Path
) -> None:
    users, admins = tmp_path / "users", tmp_path / "admins"
    users.write_text("alice\n")
    admins.write_text("root\n")
    keys: dict[str, Any] = {"api_key_file": str(users), "admin_key_file": str(admins)}
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), store=stores, **keys) as fleet:
        alice, admin = ({"Authorization": f"Bearer {key}"} for key in ("alice", "root"))
        assert (await load(fleet, headers=alice)).status_code == 403
        assert versions(fleet) == {"r0": {}, "r1": {}}
        assert (await load(fleet, headers=admin)).status_code == 200
        unloaded = await fleet.client.delete(f"{ADAPTERS}/p", headers=alice)
        assert unloaded.status_code == 403
        assert (await ask_with(fleet, alice)).status_code == 200


async def ask_with(fleet: Fleet, headers: dict[str, str]) -> httpx.Response:
    body = {"model": "fake:p", "prompt": "Hi"}
    return await fleet.client.post(COMPLETIONS, json=body, headers=headers)


async def test_an_ingress_that_replaces_another_takes_its_adapters_over(
    fleet: Fleet, tokenizer: Any, stores: Any
) -> None:
    """Where Ray starts the ingress anew, replicas live on."""
    await load(fleet)
    await load(fleet, "q", "two")
    await fleet.client.delete(f"{ADAPTERS}/q")
    join(fleet, tokenizer, stores)
    config = fleet["r0"].serving.config
    ingress = create_ingress(fleet.replicas, config, IngressMetrics(lambda: 1))
    transport = httpx.ASGITransport(ingress)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        listed = (await client.get(ADAPTERS)).json()["data"]
        assert [each["name"] for each in listed] == ["p"]
        await wait_for_async(lambda: "r2" in ingress.state.ingress.adapters.ready_now())
    assert len(set(map(str, versions(fleet).values()))) == 1


async def test_adapters_named_at_the_start_are_on_all(
    tokenizer: Any, stores: Any, root: Path
) -> None:
    settings: dict[str, Any] = {"store": stores, "adapter_dir": str(root)}
    settings["adapters_at_start"] = (("p", "one"),)
    async with fleet_of(tokenizer, FakeCore(), FakeCore(), **settings) as fleet:
        for name in ("r0", "r1"):
            await wait_for_async(lambda name=name: name in fleet.ingress.adapters.ready_now())
            assert (await ask_of(fleet, name)).status_code == 200
    settings["adapters_at_start"] = (("p", "nothing"),)
    async with fleet_of(tokenizer, FakeCore(), **settings) as fleet:
        with pytest.raises(ConfigError, match="'nothing'"):
            await fleet.ingress.adapters.learn()


async def test_draining_refuses_changes(fleet: Fleet) -> None:
    fleet.ingress.drain(60)
    refused = await load(fleet)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
