"""`/v1/documents`: stored, listed, named by id, deleted, expired; nobody sees another key's."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import from_thread

from gemserve.api.documents.document_store import ID_PATTERN
from tests.chat_templates import FAMILIES, shaped_like
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    Api,
    FakeCore,
    api_over,
    replace_file,
    wait_for_async,
)
from tests.refusals import check_often_named_document

pytestmark = pytest.mark.anyio
PATH = "/v1/documents"
TEXT = "The river runs past the houses. " * 40
QUESTION = "What runs past the houses?"
UNKNOWN = "doc-" + "0" * 32


async def store(api: Api, **fields: Any) -> dict[str, Any]:
    reply = await api.client.post(PATH, json={"text": TEXT, "wait": True, **fields})
    assert reply.status_code == 200, reply.text
    document: dict[str, Any] = reply.json()
    return document


async def refused(api: Api, status: int = 400, **fields: Any) -> dict[str, Any]:
    reply = await api.client.post(PATH, json={"text": TEXT, **fields})
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


async def listed(api: Api) -> list[str]:
    return [each["id"] for each in (await api.client.get(PATH)).json()["data"]]


async def test_a_document_is_described_as_it_was_stored(api: Api) -> None:
    document = await store(api, name="river.txt", ttl=60)
    plain = {"prompt": TEXT, "add_special_tokens": False}
    tokens = (await api.client.post("/tokenize", json=plain)).json()["count"]
    assert document == {
        "id": document["id"],
        "object": "document",
        "name": "river.txt",
        "created_at": document["created_at"],
        "expires_at": document["created_at"] + 60,
        "bytes": len(TEXT),
        "tokens": tokens,
        "status": "ready",
        "error": None,
        "cached_tokens": len(api.core.requests[0].prompt_ids),
        "pinned": False,
    }
    assert (await api.client.get(f"{PATH}/{document['id']}")).json() == document
    other = await store(api)
    assert await listed(api) == [document["id"], other["id"]]
    gone = await api.client.delete(f"{PATH}/{document['id']}")
    assert gone.json() == {"id": document["id"], "object": "document", "deleted": True}
    assert await listed(api) == [other["id"]]
    for method in ("GET", "DELETE"):
        reply = await api.client.request(method, f"{PATH}/{document['id']}")
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "document_not_found"


async def test_the_warm_up_reads_what_a_first_question_begins_with(api: Api) -> None:
    """A warm-up of other tokens than the question's would cost a pass and gain nothing."""
    document = await store(api, system="Be brief.")
    parts = [
        {"type": "file", "file": {"file_id": document["id"]}},
        {"type": "text", "text": QUESTION},
    ]
    system = {"role": "system", "content": "Be brief."}
    reply = await api.post(CHAT, messages=[system, {"role": "user", "content": parts}])
    assert reply.status_code == 200
    warm, asked = (list(request.prompt_ids) for request in api.core.requests)
    common = next(i for i, (a, b) in enumerate(zip(warm, asked, strict=False)) if a != b)
    assert common >= len(warm) - 4
    assert api.core.requests[0].selects_only
    assert api.core.requests[0].filter.keep == 16  # a larger choice would take memory for nothing


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_question_begins_with_the_warm_up_s_tokens_in_every_template(
    tokenizer: Any, family: str, system: str | None
) -> None:
    """Templates trim messages, add system messages, and put them in front of the first turn."""
    async with api_over(FakeCore(FILTERED, "ok"), shaped_like(tokenizer, family)) as api:
        given = {} if system is None else {"system": system}
        document = await store(api, text=f"  {TEXT}\n\n", **given)
        parts = [
            {"type": "file", "file": {"file_id": document["id"]}},
            {"type": "text", "text": QUESTION},
        ]
        messages = [{"role": "user", "content": parts}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        assert (await api.post(CHAT, messages=messages)).status_code == 200
        warm, asked = (list(request.prompt_ids) for request in api.core.requests)
        common = next(i for i, (a, b) in enumerate(zip(warm, asked, strict=False)) if a != b)
        assert common >= document["tokens"] - 4


async def test_the_reply_comes_before_the_warm_up_has_ended(api: Api) -> None:
    gate = threading.Event()
    api.core.script = (gate, FILTERED)
    document = await store(api, wait=False)
    assert document["status"] == "warming"
    gate.set()

    async def status() -> str:
        found: str = (await api.client.get(f"{PATH}/{document['id']}")).json()["status"]
        return found

    async with asyncio.timeout(5):
        while await status() != "ready":
            await asyncio.sleep(0.01)
    waited = await api.client.post(PATH, params={"wait": "true"}, json={"text": TEXT})
    assert waited.json()["status"] == "ready"


async def test_who_waits_too_long_for_a_document_is_told_its_id(tokenizer: Any) -> None:
    """Such a client left without it, and its next tries took places of other documents."""
    gate = threading.Event()
    async with api_over(FakeCore(gate, FILTERED), tokenizer) as api:
        headers = {"X-Request-Timeout": "0.3"}
        reply = await api.client.post(PATH, json={"text": TEXT, "wait": True}, headers=headers)
        assert (reply.status_code, reply.json()["status"]) == (200, "warming")
        assert await listed(api) == [reply.json()["id"]]
        gate.set()


async def test_a_warm_up_that_fails_leaves_the_document_usable(api: Api) -> None:
    api.core.script = (MemoryError("boom"),)
    document = await store(api)
    assert document["status"] == "failed"
    assert "boom" in document["error"]
    api.core.script = (FILTERED, "ok")
    assert (await api.post(COMPLETIONS, document=document["id"])).status_code == 200


async def test_a_deleted_document_is_no_longer_warmed(api: Api) -> None:
    api.core.script = (threading.Event(),)
    document = await store(api, wait=False)
    await wait_for_async(api.core.started.is_set)
    await api.client.delete(f"{PATH}/{document['id']}")
    await wait_for_async(api.core.cancelled.is_set)


async def test_nothing_is_warmed_where_nothing_is_filtered(api: Api) -> None:
    document = await store(api, filter="none")
    assert (document["status"], document["cached_tokens"]) == ("ready", 0)
    assert (await store(api, filter="snapkv"))["cached_tokens"] == 0  # it keeps no selection
    assert (await store(api, text="Short."))["cached_tokens"] == 0


async def test_the_cache_forgets_what_is_gone(api: Api) -> None:
    """Requests carry the ids of their documents, or the cache could not know what to drop."""
    document = await store(api, text=TEXT[:600])
    other = await store(api, text=TEXT[:500], pin=True)
    parts = [{"type": "file", "file": {"file_id": each["id"]}} for each in (document, other)]
    await api.post(CHAT, messages=[{"role": "user", "content": [*parts, parts[0]]}], n=2)
    await api.post(COMPLETIONS)
    first, second = document["id"], other["id"]
    tags = [(request.documents, request.pin) for request in api.core.requests]
    both = ((first, second), False)
    assert tags == [((first,), False), ((second,), True), both, both, ((), False)]
    await api.client.delete(f"{PATH}/{first}")
    assert api.core.forgotten == {first}  # by the time of the reply


async def test_a_request_whose_document_goes_while_it_is_read_is_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache would keep what nobody can delete any more."""
    document = await store(api)
    builder, build = api.serving.builder, type(api.serving.builder).build_completion

    def build_and_delete(*given: Any) -> Any:
        requests = build(builder, *given)
        from_thread.run(api.client.delete, f"{PATH}/{document['id']}")
        return requests

    monkeypatch.setattr(
        type(builder), "build_completion", lambda _, *given: build_and_delete(*given)
    )
    reply = await api.post(COMPLETIONS, document=document["id"])
    assert reply.status_code == 404
    assert len(api.core.requests) == 1


async def test_a_document_can_be_deleted_when_the_engine_is_dead(tokenizer: Any) -> None:
    async with api_over(FakeCore(FILTERED), tokenizer) as api:
        document = await store(api)
        api.core.script = (SystemExit("device lost"),)
        await api.post(COMPLETIONS)
        reply = await api.client.delete(f"{PATH}/{document['id']}")
        assert reply.status_code == 200
        assert await listed(api) == []


async def test_a_document_that_has_expired_is_gone(api: Api) -> None:
    document = await store(api, ttl=1)
    assert await listed(api) == [document["id"]]
    await wait_for_async(lambda: api.core.forgotten == {document["id"]})  # nobody has to ask
    assert await listed(api) == []
    reply = await api.post(COMPLETIONS, document=document["id"])
    assert reply.status_code == 404


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": ""}, "text", ()),
        ({"text": "  "}, "text", ("empty",)),
        ({"text": None}, "text", ()),
        ({"text": "x" * 300_000}, "text", ("1000 tokens",)),
        ({"ttl": 0}, "ttl", ("ttl=0",)),
        ({"ttl": 86401}, "ttl", ("ttl=86401", "86400")),
        ({"ttl": 5, "expires_after": {"anchor": "created_at", "seconds": 5}}, "ttl", ()),
        ({"expires_after": {"anchor": "last_used", "seconds": 5}}, "expires_after.anchor", ()),
        ({"name": "n" * 257}, "name", ()),
        ({"filter": "most"}, "filter", ()),
        ({"adapter": "none"}, "adapter", ()),
        ({"model": "other"}, "model", ()),
        ({"anything": 1}, "anything", ()),
        ({"wait": "yes"}, "wait", ()),
    ],
)
async def test_what_cannot_be_stored_is_named(
    api: Api, fields: dict[str, Any], param: str, words: tuple[str, ...]
) -> None:
    error = await refused(api, 404 if param in ("adapter", "model") else 400, **fields)
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error
    assert not api.core.requests
    assert await listed(api) == []


async def test_each_limit_is_named_with_its_option(tokenizer: Any) -> None:
    limits = {
        "max_documents": 3,
        "max_document_bytes": 2000,
        "document_memory_bytes": 3000,
        "max_pinned_documents": 1,
    }
    async with api_over(FakeCore(FILTERED), tokenizer, **limits) as api:
        error = await refused(api, text="x" * 2001)
        assert (error["param"], error["code"]) == ("text", "document_too_large")
        assert "2001 bytes, the limit is 2000 (--max-document-bytes)" in error["message"]
        pinned = await store(api, pin=True)
        assert pinned["pinned"]
        error = await refused(api, text="Short.", pin=True)
        assert (error["param"], error["code"]) == ("pin", "too_many_documents")
        error = await refused(api, text="é" * 900)  # as it is, and as UTF-8
        assert error["code"] == "document_memory_full"
        assert re.search(r"takes 27\d\d bytes of memory; this key's", error["message"])
        assert f"have {sys.getsizeof(TEXT)} of the 3000" in error["message"]
        for _ in range(2):
            await store(api, text="Short.")
        error = await refused(api, text="Short.")
        assert "this key has 3, the limit is 3 (--max-documents)" in error["message"]
        await api.client.delete(f"{PATH}/{pinned['id']}")
        await store(api, text="Short.", pin=True)
        assert api.core.requests[-1].pin


async def test_a_full_queue_stores_nothing(tokenizer: Any) -> None:
    async with api_over(FakeCore(), tokenizer, max_queue=0) as api:
        reply = await api.client.post(PATH, json={"text": TEXT})
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        assert await listed(api) == []


@pytest.fixture
async def keyed(tokenizer: Any, tmp_path: Path) -> AsyncIterator[Api]:
    keys = replace_file(tmp_path / "keys", "sk-alice", "sk-bob")
    async with api_over(FakeCore(FILTERED, "ok"), tokenizer, api_key_file=keys) as opened:
        yield opened


async def test_another_key_s_document_is_like_an_unknown_one(keyed: Api) -> None:
    alice, bob = ({"Authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))

    async def ask(headers: dict[str, str], document_id: str) -> list[httpx.Response]:
        client = keyed.client
        part = {"type": "file", "file": {"file_id": document_id}}
        return [
            await client.get(f"{PATH}/{document_id}", headers=headers),
            await client.delete(f"{PATH}/{document_id}", headers=headers),
            await keyed.post(COMPLETIONS, headers=headers, document=document_id),
            await keyed.post(CHAT, headers=headers, messages=[{"role": "user", "content": [part]}]),
        ]

    reply = await keyed.client.post(PATH, headers=alice, json={"text": TEXT, "wait": True})
    document_id = reply.json()["id"]
    assert (await keyed.client.get(PATH, headers=bob)).json()["data"] == []
    theirs, unknown = await ask(bob, document_id), await ask(bob, UNKNOWN)
    for reply, other in zip(theirs, unknown, strict=True):
        assert reply.status_code == other.status_code == 404
        assert reply.text.replace(document_id, UNKNOWN) == other.text
    assert [r.status_code for r in await ask(alice, document_id)] == [200, 200, 404, 404]
    tenants = {request.tenant for request in keyed.core.requests}
    assert len(tenants) == 1  # nothing ran for the other key


def test_ids_cannot_be_guessed() -> None:
    """128 random bits. A counter or a time would let one try the ids of others."""
    assert ID_PATTERN == "^doc-[0-9a-f]{32}$"


async def test_a_document_that_is_named_often_is_not_tokenized(api: Api) -> None:
    def part(document_id: str) -> dict[str, Any]:
        return {"type": "file", "file": {"file_id": document_id}}

    await check_often_named_document(api, "/tokenize", part)
