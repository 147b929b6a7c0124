"""The other protocols divide the document cache by `cache_salt`, too, and take its key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import MODEL, Api

pytestmark = pytest.mark.anyio
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {**SAID, "max_tokens": 9},
    "/api/chat": SAID,
    "/api/generate": {"prompt": "Hello"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_salt_reaches_the_engine(api: Api, path: str) -> None:
    for more, salt in (
        ({"cache_salt": "a"}, "a"),
        ({"cache_salt": None}, ""),
        ({"prompt_cache_key": "a"}, ""),
        ({"prompt_cache_key": None}, ""),
    ):
        reply = await api.client.post(path, json={"model": MODEL, **BODIES[path], **more})
        assert reply.status_code == 200, reply.text
        assert api.core.requests[-1].cache_salt == salt
    wrong = await api.client.post(path, json={"model": MODEL, **BODIES[path], "cache_salt": ""})
    assert wrong.status_code == 400
    assert "cache_salt=''" in wrong.text
