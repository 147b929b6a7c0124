"""Who may load adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.model.passes.causal_model import CausalModel
from tests.api.adapters.adapter_requests import (
    ADAPTERS,
    MIB,
    check_error,
    listed,
    load,
)
from tests.described import Described
from tests.fakes import (
    COMPLETIONS,
    Api,
    FakeCore,
    api_over,
    replace_file,
)

pytestmark = pytest.mark.anyio


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
