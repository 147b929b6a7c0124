"""What this server cannot read of a conversation: a line in its place, so that it can go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.described import Described
from tests.fakes import CHAT, COMPLETIONS, MODEL, Api

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
USER = {"role": "user", "content": "Well?"}
DATA = {"type": "base64", "media_type": "image/png", "data": "aGk="}
PICTURE = {"type": "image", "source": DATA}
PDF = {"type": "document", "source": {**DATA, "media_type": "application/pdf"}, "title": "Rates"}
PART = {"type": "image_url", "image_url": {"url": "data:,"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


def line(name: str) -> str:
    return f"[{name} omitted: this model reads text only]"


def result(*blocks: Json) -> list[Json]:
    """Anthropic's messages with what a call gave."""
    given = {"type": "tool_result", "tool_use_id": "t", "content": [*blocks]}
    return [USER, USE, {"role": "user", "content": [given]}]


def answered(*blocks: Json) -> list[Json]:
    return [USER, {"role": "assistant", "content": [*blocks]}, USER]


def called(*parts: Json) -> list[Json]:
    """A chat with what a call gave."""
    caller = {"role": "assistant", "tool_calls": [CALL]}
    return [USER, caller, {"role": "tool", "tool_call_id": "c", "content": [*parts]}]


SEARCH = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
PAGE = {"type": "search_result", "source": "x.com", "title": "Tides",
        "content": [{"type": "text", "text": "High at noon."}]}  # fmt: skip
OUTPUT = {"type": "function_call_output", "call_id": "c"}
CASES: list[tuple[str, Json, list[str]]] = [
    (CHAT, {"messages": called(PART)}, [line("image")]),
    (CHAT, {"messages": called({"type": "input_audio", "input_audio": {}})}, [line("audio")]),
    (CHAT, {"messages": called({"type": "file", "file": {"file_data": "x"}})}, [line("file")]),
    (CHAT, {"messages": called({"type": "resource_link", "uri": "x"})}, [line("resource link")]),
    (CHAT, {"messages": [{"role": "user", "content": [PART]}, *answered()[1:]]}, [line("image")]),
    (MESSAGES, {"messages": result(PICTURE)}, [line("image")]),
    (MESSAGES, {"messages": result(PDF)}, ["Rates", line("document")]),
    (MESSAGES, {"messages": result(PAGE)}, ["Tides", "x.com", "High at noon."]),
    (
        MESSAGES,
        {"messages": result({**PDF, "source": {"type": "text", "data": "Four per cent."}})},
        ["Four per cent."],
    ),
    (
        MESSAGES,
        {"messages": answered(SEARCH, FOUND, {"type": "text", "text": "So."})},
        [line("server tool use"), line("web search tool result"), "So."],
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [PICTURE, PDF]}, *answered()[1:]]},
        [line("image"), line("document")],
    ),
    (
        RESPONSES,
        {"input": [{**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}]},
        [line("image")],
    ),
    (
        RESPONSES,
        {"input": [{**OUTPUT, "output": [{"type": "input_file", "file_data": "x"}]}]},
        [line("file")],
    ),
    *(
        (
            RESPONSES,
            {"input": [{"type": kind, "id": "w", "status": "completed", "x": {"y": 1}}, USER]},
            [line(kind.replace("_", " "))],
        )
        for kind in ("web_search_call", "mcp_list_tools", "local_shell_call_output", "compaction")
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
                {"role": "assistant", "content": "A cat."},
                USER,
            ]
        },
        [line("image"), "A cat."],
    ),
    (
        OLLAMA,
        {"messages": [{**USER, "images": ["aGk="]}, {"role": "assistant", "content": "!"}, USER]},
        [line("image")],
    ),
]


@pytest.mark.parametrize(("path", "fields", "lines"), CASES, ids=lambda value: str(value)[:60])
async def test_a_line_stands_in_its_place(
    api: Api, path: str, fields: Json, lines: list[str]
) -> None:
    """Each was a 400, again with every further message of the conversation."""
    body = {"model": MODEL, **({"max_tokens": 9} if path == MESSAGES else {}), **fields}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    prompt = api.serving.builder.tokenizer.decode(api.core.requests[-1].prompt_ids)
    places = [prompt.find(text) for text in lines]
    assert -1 not in places, prompt
    assert places == sorted(places)
    document = Described((await api.client.get("/openapi.json")).json())
    assert document.accepts(path, body)


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"messages": [*answered(), {"role": "user", "content": [PART]}]}, "messages.3"),
        (
            MESSAGES,
            {"messages": [*result(PICTURE)[:2], {"role": "user", "content": [PICTURE]}]},
            "messages.2.content.0",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0",
        ),
        (OLLAMA, {"messages": [{**USER, "images": ["aGk="]}]}, "messages.0.images"),
        ("/tokenize", {"messages": [{"role": "user", "content": [PART]}]}, "messages.0.content.0"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_the_user_has_sent_last_is_refused(
    api: Api, path: str, fields: Json, field: str
) -> None:
    """An answer about an image that nobody has seen would be made up."""
    body = {"model": MODEL, **({"max_tokens": 9} if path == MESSAGES else {}), **fields}
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 400
    assert field in reply.text
    assert "text only" in reply.text


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (b"a\\ud800b", "a\ufffdb"),
        (b"\\uDC00", "\ufffd"),
        (b"\\ud83c\\udf0d \\ud83c", "\U0001f30d \ufffd"),
        (b"\\ud83c\\ud83c\\udf0d", "\ufffd\U0001f30d"),
        (b"\\\\ud800 \\ud800", "\\ud800 \ufffd"),
        (b"a\xed\xa0\x80b", "a\ufffdb"),
    ],
)
async def test_half_a_character_is_replaced(api: Api, sent: bytes, read: str) -> None:
    """A client had cut a text within an emoji, and the body was no JSON for this server."""
    raw = b'{"model": "fake", "prompt": "x %s", "echo": true}' % sent
    reply = await api.client.post(COMPLETIONS, content=raw)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"].startswith(f"x {read}")
    arguments = json.dumps({"place": "\ud83c"})
    calls = [{**CALL, "function": {"name": "f", "arguments": arguments}}]
    messages = [USER, {"role": "assistant", "tool_calls": calls}, USER]
    reply = await api.client.post(CHAT, json={"model": MODEL, "messages": messages})
    assert reply.status_code == 200
