"""Citations of kept passages, in the forms of OpenAI's and Anthropic's replies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from gemserve.api.replies.citations import CitedDocument, char_locations
from gemserve.engine.core import Core
from tests.library.served import build_core, serve_libraries
from tests.library.worlds import paragraphs

pytestmark = pytest.mark.anyio
FACT = "The ferry to Malmo leaves at nine."
TEXT = f"{paragraphs(60)}\n\n{FACT}\n\n{paragraphs(60, 'ferry')}"
QUESTION = "When does the ferry to Malmo leave?"
FILTER = {
    **{"library": "notes", "candidates": 4, "keep": 256, "fallback": False},
    "citations": True,
}
ASKED = [{"role": "user", "content": QUESTION}]
SMALL = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core()


@pytest.fixture
async def http(core: Core, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_libraries(core, tmp_path) as made:
        await send(made, "libraries", {"name": "notes"})
        path = "libraries/notes/files?wait=true"
        await send(made, path, {"path": "boats/my notes.md", "text": TEXT})
        yield made


async def send(http: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
    reply = await http.post(f"/v1/{path}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def sdk(http: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)


async def test_chats_cite_urls(http: httpx.AsyncClient) -> None:
    chats: Any = sdk(http).chat.completions
    asked = {"model": "builtin", "messages": ASKED, **SMALL, "extra_body": {"filter": FILTER}}
    reply = await chats.create(**asked)
    message = reply.choices[0].message
    (first, *_) = message.annotations
    assert first.type == "url_citation"
    place = first.url_citation
    assert place.title == "boats/my notes.md"
    assert (place.start_index, place.end_index) == (0, len(message.content))
    cited = {each.url_citation.url for each in message.annotations}
    sources = reply.filter["sources"]
    assert cited == {
        f"/v1/libraries/notes/files/boats/my%20notes.md#line={first - 1},{last}"
        for first, last in (source["lines"] for source in sources)
    }
    described = await http.get(place.url)
    assert described.json()["id"] == "boats/my notes.md"
    streamed = [chunk async for chunk in await chats.create(**asked, stream=True)]
    *others, last = [chunk.choices[0].delta for chunk in streamed]
    assert last.annotations == [a.model_dump() for a in message.annotations]
    assert not any(getattr(delta, "annotations", None) for delta in others)
    # the reply comes back as history
    messages = [*ASKED, message.model_dump(exclude_none=True), *ASKED]
    await chats.create(**{**asked, "messages": messages})


async def test_calls_cite_nothing(http: httpx.AsyncClient) -> None:
    body = {
        "model": "builtin",
        "messages": ASKED,
        "max_tokens": 30,
        "filter": FILTER,
        "tools": [{"type": "function", "function": {"name": "find"}}],
        "tool_choice": "required",
    }
    message = (await send(http, "chat/completions", body))["choices"][0]["message"]
    assert message["tool_calls"]
    assert "annotations" not in message


async def test_responses_cite_files(http: httpx.AsyncClient) -> None:
    responses: Any = sdk(http).responses
    asked = {"model": "builtin", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    asked["extra_body"] = {"filter": FILTER}
    reply = await responses.create(**asked)
    (text,) = reply.output[0].content
    (cited,) = text.annotations
    assert cited.model_dump() == {
        "type": "file_citation",
        "file_id": "notes/boats/my notes.md",
        "filename": "boats/my notes.md",
        "index": len(text.text),
    }
    events = [event async for event in await responses.create(**asked, stream=True)]
    (added,) = [e for e in events if e.type == "response.output_text.annotation.added"]
    assert added.annotation_index == 0
    (done,) = [e for e in events if e.type == "response.content_part.done"]
    assert [a.model_dump() for a in done.part.annotations] == [cited.model_dump()]
    without = await responses.create(**{**asked, "extra_body": {"filter": {"library": "notes"}}})
    assert without.output[0].content[0].annotations == []


async def events_of(http: httpx.AsyncClient, body: Any) -> list[Any]:
    reply = await http.post("/v1/messages", json={**body, "stream": True})
    return [
        json.loads(line.removeprefix("data: "))
        for line in reply.text.splitlines()
        if line.startswith("data: ")
    ]


async def test_messages_cite_search_results(http: httpx.AsyncClient) -> None:
    body = {"model": "builtin", "messages": ASKED, **SMALL, "filter": FILTER}
    message = await send(http, "messages", body)
    (block,) = message["content"]
    sources = message["filter"]["sources"]
    assert [c["cited_text"] for c in block["citations"]] == [s["text"] for s in sources]
    for number, cited in enumerate(block["citations"]):
        assert cited["type"] == "search_result_location"
        assert cited["source"] == "notes/boats/my notes.md"
        place = ("search_result_index", "start_block_index", "end_block_index")
        assert [cited[name] for name in place] == [0, number, number + 1]
    await check_stream(http, body, block["citations"])


async def check_stream(http: httpx.AsyncClient, body: Any, expected: list[Any]) -> None:
    events = await events_of(http, body)
    kinds = [event["type"] for event in events]
    (started,) = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert started == {"type": "text", "text": "", "citations": []}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [d["citation"] for d in deltas if d["type"] == "citations_delta"] == expected
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def documents(*texts: str, **fields: Any) -> list[Any]:
    blocks = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": text},
            "title": f"Number {number}",
            **fields,
        }
        for number, text in enumerate(texts)
    ]
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": QUESTION}]}]


async def test_messages_cite_documents(http: httpx.AsyncClient) -> None:
    other = paragraphs(40, "train\N{EN DASH}station")
    body = {
        "model": "builtin",
        "messages": documents(other, TEXT, citations={"enabled": True}),
        "filter": {"keep": 256, "fallback": False},
        **SMALL,
    }
    message = await send(http, "messages", body)
    assert message["filter"]["applied"]
    assert message["filter"]["selection"] is None  # nobody has asked for it
    (block,) = message["content"]
    assert any(FACT in cited["cited_text"] for cited in block["citations"])
    for cited in block["citations"]:
        text = (other, TEXT)[cited["document_index"]]
        assert cited["type"] == "char_location"
        assert text[cited["start_char_index"] : cited["end_char_index"]] == cited["cited_text"]
        assert cited["document_title"] == f"Number {cited['document_index']}"
    await check_stream(http, body, block["citations"])
    without = {**body, "messages": documents(other, TEXT)}
    assert "citations" not in (await send(http, "messages", without))["content"][0]
    # and what was cited comes back as history
    history = [*body["messages"], {"role": "assistant", "content": message["content"]}, *ASKED]
    await send(http, "messages", {**body, "messages": history})


async def test_stored_documents_are_cited_by_their_id(http: httpx.AsyncClient) -> None:
    stored = await send(http, "documents", {"text": TEXT, "name": "ferries.md"})
    source = {"type": "file", "file_id": stored["id"]}
    block = {"type": "document", "source": source, "citations": {"enabled": True}}
    content = [block, {"type": "text", "text": QUESTION}]
    body = {
        "model": "builtin",
        "messages": [{"role": "user", "content": content}],
        "filter": {"keep": 256, "fallback": False},
        **SMALL,
    }
    (text,) = (await send(http, "messages", body))["content"]
    assert {cited["file_id"] for cited in text["citations"]} == {stored["id"]}
    assert {cited["document_title"] for cited in text["citations"]} == {"ferries.md"}


async def test_what_is_read_whole_is_cited_whole(http: httpx.AsyncClient) -> None:
    messages = documents(f"\n{FACT}\n", citations={"enabled": True})
    (text,) = (await send(http, "messages", {"model": "builtin", "messages": messages, **SMALL}))[
        "content"
    ]
    (cited,) = text["citations"]
    assert (cited["start_char_index"], cited["end_char_index"]) == (1, 1 + len(FACT))


async def test_where_nothing_can_be_cited_it_is_refused(http: httpx.AsyncClient) -> None:
    for path, body in (
        ("completions", {"prompt": QUESTION}),
        ("filter", {"messages": ASKED}),
    ):
        error = (await send(http, path, {"model": "builtin", "filter": FILTER, **body}, 400))[
            "error"
        ]
        assert "citations" in error["message"]
    wanted = {"model": "builtin", "messages": ASKED, "filter": {"citations": True}}
    error = (await send(http, "chat/completions", wanted, 400))["error"]
    assert error["param"] == "filter.citations"
    assert "only with filter.library" in error["message"]


def test_a_character_of_several_tokens_does_not_shift_places() -> None:
    """A range that begins amid a character decodes to a mark of its own."""
    data = "naïve → café ".encode()
    text = data.decode()

    def decode(ids: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    kept = [(3, 9), (11, 17)]  # the first one begins within ï
    found = char_locations([CitedDocument(index=0, text=text)], list(data), kept, decode)
    assert [text[f["start_char_index"] : f["end_char_index"]] for f in found] == [
        f["cited_text"] for f in found
    ]
    assert found[-1]["cited_text"] == "café"


def test_many_places_take_no_longer_than_the_prompt() -> None:
    """Where a blank is left out in front of a part, all tokens before each place were decoded."""
    text = " ".join(f"word{number}" for number in range(4000))
    words, num_decoded = text.split(), 0

    def decode(ids: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return " ".join(words[each] for each in ids)

    kept = [(first, first + 2) for first in range(0, 4000, 8)]
    found = char_locations([CitedDocument(index=0, text=text)], range(4000), kept, decode)
    assert [each["cited_text"] for each in found] == [f"{words[a]} {words[a + 1]}" for a, _ in kept]
    assert num_decoded < 30_000
