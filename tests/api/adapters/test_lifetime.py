"""How long an adapter and the requests that use it stay in memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemserve.adapters import adapter_store as store_module
from gemserve.adapters.adapter_store import AdapterStore
from gemserve.contract.events import Finished
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters
from tests.api.adapters.adapter_requests import (
    ADAPTERS,
    SELECTION,
    ask,
    check_error,
    freed,
    listed,
    load,
)
from tests.described import Described
from tests.fakes import (
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    wait_for_async,
)

pytestmark = pytest.mark.anyio


async def test_loading_again_leaves_running_requests_their_version(
    served: Api, root: Path, model: CausalModel
) -> None:
    gate = threading.Event()
    served.core.script = (FILTERED, "a", gate, "b")
    before = (await load(served)).json()["version"]
    running = asyncio.create_task(ask(served, adapter="p", stream=True))
    await wait_for_async(served.core.started.is_set)
    adapters.write(root / "good", "prefix", model, seed=1)
    after = (await load(served)).json()["version"]
    assert after != before
    await served.client.delete(f"{ADAPTERS}/p")
    gate.set()
    assert len(data_of(await running)) > 2
    [request] = served.core.requests
    assert request.adapter is not None
    assert request.adapter.version == before


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["an answer", "a failure", "leaving"])
@pytest.mark.usefixtures("_no_collector")
async def test_a_request_that_ended_holds_nothing(
    served: Api, path: str, stream: bool, end: str
) -> None:
    """Its adapter is counted no longer, without waiting for the garbage collector."""
    await load(served)
    gate = threading.Event()
    failure = Finished(reason="error", completion_tokens=1, error="boom")
    ends = {"an answer": "b", "a failure": failure, "leaving": gate}
    served.core.script = (FILTERED, "a", ends[end], "c")
    fields = {"adapter": "p"} if path == SELECTION else {"adapter": "p", "stream": stream}
    asking = asyncio.create_task(ask(served, path, **fields))
    await wait_for_async(served.core.started.is_set)
    if end == "leaving":
        asking.cancel()
    await asyncio.wait([asking])
    del asking
    await freed(served)
    await served.client.delete(f"{ADAPTERS}/p")
    for _ in range(500):  # threads that served the request may take a moment to let go
        held = (await served.metrics())["adapter_memory_bytes"]
        if not held:
            break
        await asyncio.sleep(0.01)
    assert held == 0


async def test_a_folder_that_went_bad_is_the_server_s_fault(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, 20_000)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store) as api:
        (root / "good" / "adapter.json").unlink()
        assert (await ask(api, adapter="p")).status_code == 200
        await freed(api)
        store.load("n", "ntk")
        assert not (await listed(api))["p"]["loaded"]
        document = Described((await api.client.get("/openapi.json")).json())
        for fields, param in (({"adapter": "p"}, "adapter"), ({"model": "fake:p"}, "model")):
            reply = await ask(api, **fields)
            document.check(reply)
            message = check_error(reply, 503, param, "adapter_unavailable")
            assert "adapter 'p', path 'good': must hold" in message
            assert reply.json()["error"]["type"] == "server_error"
            assert "retry-after" not in reply.headers  # waiting does not help
        assert (await ask(api)).status_code == 200
        counted = await api.metrics()
        assert counted['admission_rejections_total{reason="adapter_unavailable"}'] == 2


async def test_one_that_left_memory_comes_back(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    """And while requests hold all there is room for, the answer is 503."""
    for name in "abc":
        adapters.write(root / name, "prefix", model, seed=ord(name))
    store = AdapterStore(model, root, 15_000)
    async with api_over(FakeCore(), tokenizer, adapters=store) as api:
        for name in "abc":
            assert (await load(api, name, name)).status_code == 200
        entries = await listed(api)
        assert {n: e["loaded"] for n, e in entries.items()} == {"a": False, "b": True, "c": True}
        metrics = await api.metrics()
        assert (metrics["adapters_loaded"], metrics["adapter_memory_bytes"]) == (2, 2 * 7168)
        assert (await ask(api, adapter="a")).status_code == 200
        assert (await ask(api, adapter="c")).status_code == 200  # the fake core keeps requests
        document = Described((await api.client.get("/openapi.json")).json())
        for reply in (await ask(api, adapter="b"), await load(api, "d", "b")):
            document.check(reply)
            message = check_error(reply, 503, None, "adapter_memory_full")
            assert "needs 7168 bytes; running requests hold 14336 of the 15000" in message
            assert reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["type"] == "overloaded_error"
        await freed(api)
        assert (await ask(api, adapter="b")).status_code == 200
        assert (await listed(api))["b"]["version"] == entries["b"]["version"]


async def test_a_slow_folder_holds_up_nobody_else(
    tokenizer: Any, model: CausalModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if more requests wait for it than there are threads."""
    gate = threading.Event()
    gate.set()
    load_adapter = store_module.load_adapter

    def slowly(*arguments: Any) -> Any:
        assert gate.wait(20)
        return load_adapter(*arguments)

    monkeypatch.setattr(store_module, "load_adapter", slowly)
    adapters.write(root / "b", "prefix", model, seed=1)
    store = AdapterStore(model, root, 8000)
    async with api_over(FakeCore(), tokenizer, adapters=store, max_queue=1000) as api:
        for name, path in (("p", "good"), ("b", "b")):
            await load(api, name, path)
        gate.clear()
        waiting = [asyncio.create_task(ask(api, adapter="p")) for _ in range(60)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            assert (await ask(api)).status_code == 200
            assert (await ask(api, adapter="b")).status_code == 200
            assert not (await listed(api))["p"]["loaded"]
            assert (await api.metrics())["adapters_loaded"] == 1
        await freed(api)
        gate.set()
        replies = await asyncio.gather(*waiting)
        assert {reply.status_code for reply in replies} == {200}
        assert len({id(request.adapter) for request in api.core.requests}) == 1


# The context
