"""No field of the other protocols makes the server connect to another, or open a named file."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import Api
from tests.no_connections import PLACES, check_nothing_is_fetched, said

pytestmark = pytest.mark.anyio
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def bodies(place: str) -> list[tuple[str, dict[str, Any]]]:
    source = {"type": "url", "url": place}
    mcp = {"type": "mcp", "server_label": "x", "server_url": place}
    return [
        (RESPONSES, {"input": said({"type": "input_image", "image_url": place})}),
        (RESPONSES, {"input": said({"type": "input_file", "file_url": place})}),
        (RESPONSES, {"input": "x", "tools": [mcp]}),
        (RESPONSES, {"input": "x", "previous_response_id": place}),
        (MESSAGES, {"messages": said({"type": "image", "source": source}), "max_tokens": 1}),
        (MESSAGES, {"messages": said({"type": "document", "source": source}), "max_tokens": 1}),
        (MESSAGES, {"messages": said({"type": "text", "text": "x"}), "max_tokens": 1,
                    "mcp_servers": [{"type": "url", "url": place, "name": "x"}]}),
    ]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
async def test_an_address_in_any_field_is_refused(
    api: Api, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_nothing_is_fetched(api, bodies(place), monkeypatch)
