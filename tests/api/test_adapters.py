"""Adapters over HTTP: names, folders, keys, requests, limits and metrics. The core is scripted."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.adapters import store as store_module
from gemserve.adapters.store import AdapterStore
from gemserve.model.causal import CausalModel
from gemserve.types import Finished
from tests import adapters, models
from tests.bad_adapters import BAD_NAMES, FOLDERS, PATHS, Spoil, lay_out
from tests.described import Described
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    data_of,
    replace_file,
    wait_for_async,
)

pytestmark = pytest.mark.anyio
ADAPTERS, RESPONSES, SELECTION = "/v1/adapters", "/v1/responses", "/v1/filter"
MIB = 1 << 20
PREFIX = 7  # positions of the prefixes that tests make
REQUESTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"input": "Hi"},
    SELECTION: {"prompt": "Hi"},
}
everywhere = pytest.mark.parametrize("path", REQUESTS)


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


@pytest.fixture
def root(tmp_path: Path, model: CausalModel) -> Path:
    folder = tmp_path / "root"
    adapters.write(folder / "good", "prefix", model)
    adapters.write(folder / "ntk", "ntk", model)
    return folder


@pytest.fixture
async def served(tokenizer: Any, model: CausalModel, root: Path) -> AsyncIterator[Api]:
    store = AdapterStore(model, root, MIB)
    async with api_over(
        FakeCore(), tokenizer, adapters=store, adapter_dir=str(root), keep_alive_s=0.05
    ) as api:
        yield api


async def load(api: Api, name: object = "p", path: object = "good", **more: Any) -> httpx.Response:
    return await api.client.post(ADAPTERS, json={"name": name, "path": path}, **more)


async def listed(api: Api) -> dict[str, dict[str, Any]]:
    reply = (await api.client.get(ADAPTERS)).json()
    assert reply["object"] == "list"
    return {entry["name"]: entry for entry in reply["data"]}


async def ask(api: Api, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    return await api.client.post(path, json={"model": "fake", **REQUESTS[path], **fields})


def check_error(reply: httpx.Response, status: int, param: str | None, code: str) -> str:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert len(reply.content) < 2048
    return str(error["message"])


async def freed(api: Api) -> None:
    """Until nothing holds the requests that were answered, as the fake core does for its tests."""
    requests = api.core.requests.copy()
    api.core.requests.clear()
    here = 3  # the list, the variable, the argument
    await wait_for_async(lambda: all(sys.getrefcount(request) == here for request in requests))


async def test_load_list_and_unload(served: Api) -> None:
    assert await listed(served) == {}
    reply = await load(served)
    assert reply.status_code == 200
    entry = reply.json()
    assert (await listed(served)) == {"p": entry}
    assert len(entry.pop("version")) == 16
    assert entry == {
        "id": "p",
        "object": "adapter",
        "name": "p",
        "path": "good",
        "type": "prefix",
        "bytes": 2 * 4 * 2 * PREFIX * 16 * 4,
        "positions": PREFIX,
        "loaded": True,
        "parent": "fake",
    }
    assert (await load(served, "n", "ntk")).json()["type"] == "ntk"
    assert list(await listed(served)) == ["n", "p"]
    gone = await served.client.delete(f"{ADAPTERS}/p")
    assert (gone.status_code, gone.json()) == (
        200,
        {"id": "p", "object": "adapter", "deleted": True},
    )
    assert list(await listed(served)) == ["n"]
    for name in ("p", "a%2F..%2Fb", "é", "x" * 10_000):
        gone = await served.client.delete(f"{ADAPTERS}/{name}")
        check_error(gone, 404, "name", "adapter_not_found")


@everywhere
async def test_a_request_names_it_either_way(served: Api, path: str) -> None:
    await load(served)
    for fields in (
        {"adapter": "p"},
        {"model": "fake:p"},
        {"model": "fake:p", "adapter": "p"},
        {"model": "fake:p", "adapter": None},
    ):
        reply = await ask(served, path, **fields)
        assert reply.status_code == 200, reply.text
        adapter = served.core.requests[-1].adapter
        assert adapter is not None
        assert (adapter.name, adapter.num_positions) == ("p", PREFIX)
        if path != SELECTION:
            assert reply.json()["model"] == fields.get("model", "fake")
    for fields in ({}, {"adapter": None}):
        await ask(served, path, **fields)
        assert served.core.requests[-1].adapter is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
async def test_a_stream_echoes_the_model_as_it_was_named(served: Api, path: str) -> None:
    await load(served)
    reply = await ask(served, path, model="fake:p", stream=True)
    assert '"model": "fake:p"' in reply.text
    assert '"model": "fake"' not in reply.text


@everywhere
async def test_unknown_ones_are_a_404(served: Api, path: str) -> None:
    await load(served)
    for fields, param in (
        ({"adapter": "x"}, "adapter"),
        ({"model": "fake:x"}, "model"),
        ({"model": "fake:"}, "model"),
        ({"model": "fake:" + "é" * 100_000}, "model"),
        ({"adapter": "x", "model": "fake:x"}, "adapter"),
    ):
        said = check_error(await ask(served, path, **fields), 404, param, "adapter_not_found")
        assert "loaded are: 'p'" in said
    for name in ("other:p", "fake:p:p", ":p"):
        check_error(await ask(served, path, model=name), 404, "model", "model_not_found")
    said = check_error(
        await ask(served, path, model="fake:x", adapter="p"), 400, "adapter", "invalid_value"
    )
    assert "'p'" in said
    assert "'fake:x'" in said
    for name in (*BAD_NAMES, 3, ["p"], {"name": "p"}):
        check_error(await ask(served, path, adapter=name), 400, "adapter", "invalid_value")
    assert served.core.requests == []
    assert (await ask(served, path)).status_code == 200


async def test_a_base_may_have_colons_itself(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store, model_name="org/a:b") as api:
        for name, adapter in (("org/a:b", None), ("org/a:b:p", "p")):
            reply = await ask(api, model=name)
            assert (reply.status_code, reply.json()["model"]) == (200, name)
            used = api.core.requests[-1].adapter
            assert (used.name if used else None) == adapter
            card = await api.client.get(f"/v1/models/{name}")
            assert (card.status_code, card.json()["id"]) == (200, name)
        for name, code in (("org/a", "model"), ("org/a:p", "model"), ("org/a:b:x", "adapter")):
            check_error(await ask(api, model=name), 404, "model", f"{code}_not_found")


async def test_models_list_the_base_with_each(served: Api) -> None:
    await load(served)
    await load(served, "n", "ntk")
    base, ntk, prefix = (await served.client.get("/v1/models")).json()["data"]
    assert [base["id"], ntk["id"], prefix["id"]] == ["fake", "fake:n", "fake:p"]
    assert [base["parent"], ntk["parent"], prefix["parent"]] == [None, "fake", "fake"]
    lengths = [card["max_model_len"] for card in (base, ntk, prefix)]
    assert lengths == [CONTEXT, CONTEXT, CONTEXT - PREFIX]
    for card in (base, ntk, prefix):
        assert (await served.client.get(f"/v1/models/{card['id']}")).json() == card
    gone = await served.client.get("/v1/models/fake:x")
    check_error(gone, 404, "model", "adapter_not_found")
    gone = await served.client.get("/v1/models/other:p")
    check_error(gone, 404, "model", "model_not_found")


async def test_the_tokenizer_takes_every_listed_model(served: Api) -> None:
    await load(served)
    for path, fields in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [50]})):
        reply = await served.client.post(path, json={"model": "fake:p", **fields})
        assert reply.status_code == 200
        reply = await served.client.post(path, json={"model": "fake:x", **fields})
        check_error(reply, 404, "model", "adapter_not_found")


# Loading


@pytest.mark.parametrize(("spoil", "said"), FOLDERS.values(), ids=list(FOLDERS))
async def test_a_bad_folder_is_an_error_and_no_more(
    served: Api, root: Path, spoil: Spoil, said: str
) -> None:
    version = (await load(served)).json()["version"]
    spoil(root / "good")
    for name in ("p", "q"):
        message = check_error(await load(served, name), 400, "path", "invalid_adapter")
        assert message.startswith(f"adapter '{name}', path 'good': ")
        assert said in message
    assert (await listed(served))["p"]["version"] == version
    assert (await ask(served, adapter="p")).status_code == 200
    assert (await load(served, "n", "ntk")).status_code == 200


@pytest.mark.parametrize(("path", "said"), PATHS.items(), ids=[ascii(p)[:20] for p in PATHS])
async def test_nothing_is_loaded_from_elsewhere(
    served: Api, root: Path, path: str, said: str
) -> None:
    lay_out(root)
    message = check_error(await load(served, "p", path), 400, "path", "invalid_adapter")
    assert said in message
    assert await listed(served) == {}
    await served.assert_alive()


async def test_wrong_bodies(served: Api) -> None:
    for name in (*BAD_NAMES, None, 3, ["p"], "x" * 1_000_000):
        message = check_error(await load(served, name), 400, "name", "invalid_value")
        assert "[A-Za-z0-9._-]{0,63}" in message or "string" in message
    for path in ("", None, 3, "x" * 4097):
        check_error(await load(served, "p", path), 400, "path", "invalid_value")
    for raw, param, code in (
        (b"{", None, "invalid_json"),
        (b'{"name": "p"}', "path", "missing_field"),
        (b'{"name": "p", "path": "good", "url": "x"}', "url", "unknown_field"),
    ):
        check_error(await served.client.post(ADAPTERS, content=raw), 400, param, code)
    assert await listed(served) == {}


async def test_without_a_folder_nothing_can_be_loaded(api: Api) -> None:
    message = check_error(await load(api), 400, "path", "invalid_adapter")
    assert "start it with --adapter-dir" in message
    assert await listed(api) == {}
    message = check_error(await ask(api, adapter="p"), 404, "adapter", "adapter_not_found")
    assert "loaded are: none" in message
    await api.assert_alive()


async def test_one_that_never_fits(tokenizer: Any, model: CausalModel, root: Path) -> None:
    store = AdapterStore(model, root, 1000)
    async with api_over(FakeCore(), tokenizer, adapters=store) as api:
        message = check_error(await load(api), 400, "path", "invalid_adapter")
        assert "needs 7168 bytes; all adapters may take 1000" in message


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


@everywhere
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
    assert (await served.metrics())["adapter_memory_bytes"] == 0


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


@everywhere
async def test_a_prefix_takes_its_room_in_the_context(
    tokenizer: Any, model: CausalModel, root: Path, path: str
) -> None:
    """As the model would otherwise be asked for positions that it has not."""
    context = 300
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    store.load("n", "ntk")

    async def with_tokens(count: int, **fields: Any) -> httpx.Response:
        text = ["a"] * count
        while True:  # as many words as make `count` tokens, template included
            content = {
                COMPLETIONS: {"prompt": [50] * len(text)},
                SELECTION: {"prompt": [50] * len(text)},
                CHAT: {"messages": [{"role": "user", "content": " ".join(text)}]},
                RESPONSES: {"input": " ".join(text)},
            }[path]
            probe = await api.client.post(
                "/tokenize", json={"messages": [{"role": "user", "content": " ".join(text)}]}
            )
            excess = probe.json()["count"] - count
            if path in (COMPLETIONS, SELECTION) or excess <= 0:
                return await ask(api, path, **content, **fields)
            text = text[:-1]

    async with api_over(
        FakeCore(),
        tokenizer,
        adapters=store,
        context_tokens=context,
        max_prompt_tokens=context - 1,
        filter_min_tokens=1000,
    ) as api:
        for adapter, longest in (("p", context - PREFIX - 1), ("n", context - 1)):
            reply = await with_tokens(longest, adapter=adapter)
            assert reply.status_code == 200, reply.text
            request = api.core.requests[-1]
            assert len(request.prompt_ids) == longest
            assert request.sampling.max_tokens == 1
            field = next(iter(REQUESTS[path]))
            code = "context_length_exceeded"
            message = check_error(await with_tokens(longest + 1, adapter=adapter), 400, field, code)
            assert f"maximum context length is {longest} tokens" in message
            assert f"prompt contains {longest + 1} input tokens" in message
            assert ("tokens with adapter 'p' (which takes 7). How" in message) == (adapter == "p")


async def test_what_a_prefix_takes_is_not_there_for_the_answer(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store) as api:
        prompt = [50] * 500  # of which the filter keeps 64
        room = CONTEXT - 64 - PREFIX
        reply = await ask(api, prompt=prompt, adapter="p", max_tokens=room)
        assert reply.status_code == 200
        reply = await ask(api, prompt=prompt, adapter="p", max_tokens=room + 1)
        message = check_error(reply, 400, "max_tokens", "invalid_value")
        assert f"{CONTEXT - PREFIX} tokens with adapter 'p' (which takes 7)" in message
        assert f"leaves room for {room} after the 64 prompt tokens" in message
        reply = await ask(api, prompt=prompt, max_tokens=room + PREFIX)
        assert reply.status_code == 200
        text = {"messages": [{"role": "user", "content": "a " * 600}], "filter": "none"}
        for adapter, taken in ((None, 0), ("p", PREFIX)):
            await ask(api, CHAT, **text, adapter=adapter)
            request = api.core.requests[-1]
            left = CONTEXT - taken - len(request.prompt_ids)
            assert request.sampling.max_tokens == left < 4096


async def test_a_shorter_limit_of_the_server_s_is_named_alone(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store, max_prompt_tokens=50) as api:
        reply = await ask(api, prompt=[50] * 51, adapter="p")
        message = check_error(reply, 400, "prompt", "context_length_exceeded")
        assert "maximum context length is 50 tokens. However" in message


async def test_a_wrong_method_is_told_which_are_right(served: Api) -> None:
    for path, allowed in (
        (ADAPTERS, "GET, POST"),
        (f"{ADAPTERS}/p", "DELETE"),
        ("/v1/models", "GET"),
        (CHAT, "POST"),
    ):
        reply = await served.client.request("PUT", path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


# Who may


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {
        "api_key_file": replace_file(tmp_path / "keys", "sk-user"),
        "admin_key_file": replace_file(tmp_path / "admins", "sk-admin"),
    }


async def test_keys_of_administrators_are_asked_for(
    tokenizer: Any, model: CausalModel, root: Path, keys: dict[str, str]
) -> None:
    user, admin = ({"Authorization": f"Bearer sk-{name}"} for name in ("user", "admin"))
    store = AdapterStore(model, root, MIB)
    async with api_over(FakeCore(), tokenizer, adapters=store, **keys) as api:
        document = Described((await api.client.get("/openapi.json", headers=user)).json())
        for headers, status, code in (
            ({}, 401, "invalid_api_key"),
            ({"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
            (user, 403, "permission_denied"),
        ):
            replies = [
                await load(api, headers=headers),
                await load(api, "", headers=headers),  # who may not is not told what is wrong
                await api.client.delete(f"{ADAPTERS}/p", headers=headers),
                await api.client.delete(f"{ADAPTERS}/%2e%2e", headers=headers),
            ]
            for reply in replies:
                message = check_error(reply, status, None, code)
                document.check(
                    reply, None if reply.request.method == "POST" else f"{ADAPTERS}/{{name}}"
                )
                assert "sk-" not in message
            assert status == 401 or "--admin-key-file" in message
        assert store.list() == []
        assert (await load(api, headers=admin)).status_code == 200
        assert (await load(api, headers={**admin, "Origin": "https://x"})).status_code == 200
        assert [a["id"] for a in (await api.client.get(ADAPTERS, headers=user)).json()["data"]]
        body = {"model": "fake:p", "prompt": "Hi"}
        assert (await api.client.post(COMPLETIONS, json=body, headers=user)).status_code == 200
        gone = await api.client.delete(f"{ADAPTERS}/p", headers=admin)
        assert gone.status_code == 200


async def test_an_administrator_may_be_in_both_files(
    tokenizer: Any, model: CausalModel, root: Path, tmp_path: Path
) -> None:
    both = {
        "api_key_file": replace_file(tmp_path / "keys", "sk-both"),
        "admin_key_file": replace_file(tmp_path / "admins", "sk-both"),
    }
    store = AdapterStore(model, root, MIB)
    async with api_over(FakeCore(), tokenizer, adapters=store, **both) as api:
        headers = {"Authorization": "Bearer sk-both"}
        assert (await load(api, headers=headers)).status_code == 200


async def test_with_keys_and_no_administrators_nobody_may(
    tokenizer: Any, model: CausalModel, root: Path, keys: dict[str, str]
) -> None:
    store = AdapterStore(model, root, MIB)
    only = {"api_key_file": keys["api_key_file"]}
    async with api_over(FakeCore(), tokenizer, adapters=store, **only) as api:
        headers = {"Authorization": "Bearer sk-user"}
        for reply in (
            await load(api, headers=headers),
            await api.client.delete(f"{ADAPTERS}/p", headers=headers),
        ):
            message = check_error(reply, 403, None, "permission_denied")
            assert "--admin-key-file" in message


async def test_without_keys_no_page_in_a_browser_may(served: Api) -> None:
    """Any page could send this to a server on its reader's machine, without asking first."""
    raw = json.dumps({"name": "p", "path": "good"})
    for origin in ("https://evil.example", "null", "http://test"):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        reply = await served.client.post(ADAPTERS, content=raw, headers=headers)
        check_error(reply, 403, None, "permission_denied")
        gone = await served.client.delete(f"{ADAPTERS}/p", headers={"Origin": origin})
        check_error(gone, 403, None, "permission_denied")
    assert await listed(served) == {}


# Metrics and the document


async def test_junk_names_do_not_grow_the_metrics(served: Api) -> None:
    await load(served)
    for fields in ({"adapter": "junk"}, {"model": "fake:junk"}, {"adapter": "p"}):
        await ask(served, **fields)
    before = await served.metrics()
    for number in range(5000):
        assert (await ask(served, adapter=f"junk-{number}")).status_code == 404
        assert (await ask(served, model=f"fake:junk-{number}")).status_code == 404
    after = await served.metrics()
    assert after.keys() == before.keys()
    assert not any("junk" in name for name in after)
    assert after['admission_rejections_total{reason="unknown_adapter"}'] == 10_002


async def test_replies_are_as_described(served: Api) -> None:
    document = Described((await served.client.get("/openapi.json")).json())
    for name, path in (("p", "good"), ("p", "nowhere"), ("-", "good")):
        reply = await load(served, name, path)
        document.check(reply)
        assert document.accepts(ADAPTERS, {"name": name, "path": path}) == (name == "p")
    document.check(await served.client.get(ADAPTERS))
    document.check(await served.client.get("/v1/models"))
    document.check(await served.client.get("/v1/models/fake:p"), "/v1/models/{name}")
    for path in REQUESTS:
        for fields, is_good in (
            ({"adapter": "p"}, True),
            ({"model": "fake:p"}, True),
            ({"adapter": None}, True),
            ({"adapter": "a b"}, False),
            ({"adapter": "p" * 65}, False),
            ({"adapter": ""}, False),
        ):
            reply = await ask(served, path, **fields)
            document.check(reply)
            assert reply.status_code == (200 if is_good else 400)
            body = {"model": "fake", **REQUESTS[path], **fields}
            assert document.accepts(path, body) == is_good
        document.check(await ask(served, path, adapter="x"))
        for name in ("fake:a b", "fake:", "fakes", "fake:p:p"):
            assert not document.accepts(path, {**REQUESTS[path], "model": name})
    for name in ("p", "p"):
        gone = await served.client.delete(f"{ADAPTERS}/{name}")
        document.check(gone, f"{ADAPTERS}/{{name}}")
