"""Loading, listing and unloading adapters over HTTP, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.model.passes.causal_model import CausalModel
from tests.api.adapters.adapter_requests import (
    ADAPTERS,
    PREFIX,
    ask,
    check_error,
    listed,
    load,
)
from tests.bad_adapters import BAD_NAMES, FOLDERS, PATHS, Spoil, lay_out
from tests.fakes import (
    Api,
    FakeCore,
    api_over,
)

pytestmark = pytest.mark.anyio


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
