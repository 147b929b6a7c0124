"""What has a limit is refused with it, by every endpoint alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes import Api


async def check_longest_stop(api: Api, path: str, body: dict[str, Any], param: str) -> None:
    """`body`: its stop string `param` is too long.

    What may become a stop string is held back and compared, for every token.
    """
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith(f"{param}=")
    assert "1000" in message
    name = param.split(".")[0]
    longest = "x" * 1000 if isinstance(body[name], str) else ["x" * 1000]
    assert (await api.client.post(path, json={**body, name: longest})).status_code == 200


async def check_count(api: Api, path: str, body: dict[str, Any], message: str) -> None:
    """`body`: it has too many of what `message` begins with.

    300,000 messages took ten seconds to their refusal, and other streams stood still.
    """
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith(message)
    assert error.get("param", "messages") == message.partition(":")[0]


async def check_often_named_document(
    api: Api, path: str, part: Callable[[str], dict[str, Any]]
) -> None:
    """`part`: what a message names a document's id with.

    A body of 800 KB named 13 MB of text; tokenizing it took 5 GB.
    """
    text = "The river runs past the houses. " * 80
    stored = await api.client.post("/v1/documents", json={"text": text, "wait": True})
    assert stored.status_code == 200, stored.text
    messages = [{"role": "user", "content": [part(stored.json()["id"])] * 1700}]
    reply = await api.client.post(path, json={"model": "fake", "messages": messages})
    assert reply.status_code == 400, reply.text[:300]
    assert "bytes as UTF-8, the limit of what is tokenized is" in reply.json()["error"]["message"]
