"""No field of a request makes the server connect to another, or open a file that it names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import CHAT, COMPLETIONS, Api
from tests.no_connections import PLACES, check_nothing_is_fetched, said

pytestmark = pytest.mark.anyio
DOCUMENTS = "/v1/documents"


def bodies(place: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (CHAT, {"messages": said({"type": "image_url", "image_url": {"url": place}})}),
        (CHAT, {"messages": said({"type": "file", "file": {"file_id": place}})}),
        (CHAT, {"messages": said({"type": "file", "file": {"file_data": place}})}),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "model": place}),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "adapter": place}),
        (CHAT, {"messages": said({"type": "text", "text": "x"}), "chat_template": place}),
        (COMPLETIONS, {"prompt": "x", "model": f"fake:{place}"}),
        (COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"$ref": place}}}}),
        (DOCUMENTS, {"url": place}),
        ("/v1/adapters", {"name": "x", "path": place}),
    ]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
async def test_an_address_in_any_field_is_refused(
    api: Api, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_nothing_is_fetched(api, bodies(place), monkeypatch)


async def test_an_address_in_a_text_is_text(api: Api) -> None:
    reply = await api.client.post(DOCUMENTS, json={"text": PLACES[0], "name": PLACES[2]})
    assert reply.status_code == 200
    assert json.loads(reply.text)["bytes"] == len(PLACES[0])
