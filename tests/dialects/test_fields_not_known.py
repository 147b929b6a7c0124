"""Fields of the core's endpoints that the other protocols have no place for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Api

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ],
)
async def test_what_the_answer_attended_to_is_not_asked_for(
    api: Api, path: str, body: dict[str, Any]
) -> None:
    """Silence would look like an answer that attended to nothing."""
    fields = {"filter": {"return_attention": True}}
    reply = await api.client.post(path, json={"model": "fake", **body, **fields})
    assert reply.status_code == 400
    assert "return_attention" in reply.text
