"""Bodies of every POST route: never a 500, always an error in its form, never a hang.

Schemathesis draws bodies from the document (tests/contract). These are bodies that no document
describes: valid ones with some members exchanged, JSON that is none, and bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.test_openapi import ASKED, DOCUMENTS, MESSAGED
from tests.fuzz.cases import bounded, cases, changed_bytes, changed_json, written
from tests.fuzz.tiny import ADAPTER, MODEL, tiny_core, tiny_server

ADAPTERS = "/v1/adapters"
OLLAMA = "/api/"
LENGTHS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
KEY = "sk-fuzz"
STATUSES = {200, 400, 404, 408, 411, 413, 415, 503}


def seeds() -> list[tuple[str, dict[str, Any]]]:
    """A body for each route that is answered with 200."""
    made = [(ADAPTERS, {"name": "other", "path": ADAPTER})]
    for path, fields in ASKED:
        body = {"model": MODEL, **fields}
        if "adapter" in body:
            body["adapter"] = ADAPTER
        if isinstance(body["model"], str) and ":" in body["model"]:
            body["model"] = f"{MODEL}:{ADAPTER}"
        if path in LENGTHS or "completions" in path:
            body.setdefault(LENGTHS.get(path, "max_tokens"), 3)
        made.append((path, body))
    return made


SEEDS = seeds()


@pytest.fixture(scope="module")
def client(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("server")
    limits = {"max_documents": 50, "document_memory_bytes": 1 << 20}
    with tiny_server(tiny_core(tokenizer), folder, keys=(KEY,), **limits) as opened:
        opened.headers["Authorization"] = f"Bearer {KEY}"
        yield opened


@st.composite
def raw_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    path, seed = draw(st.sampled_from(SEEDS))
    if draw(st.booleans()) and path not in (ADAPTERS, DOCUMENTS):
        seed = {**seed, "stream": True}
    changed = draw(changed_json(seed, most=4))
    coded = written(changed, ensure_ascii=draw(st.booleans()))
    kind = draw(st.sampled_from(("json", "json", "json", "bytes", "members", "repeated")))
    if kind == "bytes":
        return path, draw(changed_bytes(coded))
    if kind == "members":  # a member twice
        return path, coded[:-1] + b"," + coded[1:] if coded.startswith(b"{") else coded
    if kind == "repeated":
        return path, coded * draw(st.integers(2, 3))
    return path, coded


def check_error(path: str, reply: httpx.Response) -> None:
    body = reply.json()
    if path.startswith(OLLAMA):
        assert body.keys() == {"error"}
        body = {"error": {"message": body["error"], **dict.fromkeys(("type", "param", "code"))}}
    error = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(reply.content) < 3000, "an error repeats what was sent"
    if path.startswith(MESSAGED):
        assert body["type"] == "error"
        assert isinstance(error["type"], str)
    else:
        assert error.keys() == {"message", "type", "param", "code"}
    if reply.status_code == 503:
        assert int(reply.headers["retry-after"]) > 0


def check_stream(path: str, text: str) -> None:
    """It ends in its one last event, and none before it is an error."""
    assert '"error":{' not in re.sub(r"\s", "", text), text[-500:]
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    last = {"/v1/responses": "event: response.", MESSAGED: "event: message_stop"}
    assert events[-1].startswith(last.get(path, "data: [DONE]"))


@given(raw_bodies())
@cases(60)
def test_every_body_has_its_answer(client: httpx.Client, drawn: tuple[str, bytes]) -> None:
    path, raw = drawn
    with bounded(f"body {path}", cpu_s=20):
        reply = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code in STATUSES, f"{reply.status_code}: {reply.text[:500]}"
    if reply.status_code != 200:
        check_error(path, reply)
    elif reply.headers["content-type"].startswith("application/x-ndjson"):
        lines = [json.loads(line, parse_constant=_refuse) for line in reply.text.splitlines()]
        assert [line.get("done") for line in lines] == [*[False] * (len(lines) - 1), True]
    elif reply.headers["content-type"].startswith("text/event-stream"):
        check_stream(path, reply.text)
    else:
        json.loads(reply.content, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_nothing_is_left_afterwards(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    text = client.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
        assert re.search(rf"^gemserve_{name} 0.0$", text, re.MULTILINE), name


@st.composite
def forms(draw: st.DrawFn) -> tuple[bytes, str]:
    """A multipart body of /v1/documents, and its content type."""
    boundary = draw(st.sampled_from(("x", "--", "a" * 70, "é")))
    parts = draw(st.lists(st.sampled_from(("file", "wait", "pin", "ttl", "name", "nothing", "")),
                          min_size=1, max_size=4))  # fmt: skip
    body = b""
    for name in parts:
        filename = draw(st.sampled_from(("", '; filename="a.txt"', '; filename="../a"')))
        value = draw(st.one_of(st.binary(max_size=40), st.sampled_from((b"true", b"5", b"Hi"))))
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'.encode()
        body += filename.encode() + b"\r\n\r\n" + value + b"\r\n"
    body += f"--{boundary}--\r\n".encode()
    kinds = (f"multipart/form-data; boundary={boundary}", "multipart/form-data", "text/plain")
    return draw(st.one_of(st.just(body), changed_bytes(body))), draw(st.sampled_from(kinds))


@given(forms())
@cases(30)
def test_every_form_has_its_answer(client: httpx.Client, drawn: tuple[bytes, str]) -> None:
    raw, kind = drawn
    with bounded("form", cpu_s=20):
        reply = client.post(DOCUMENTS, content=raw, headers={"content-type": kind.encode()})
    assert reply.status_code in STATUSES, f"{reply.status_code}: {reply.text[:500]}"
    if reply.status_code != 200:
        check_error(DOCUMENTS, reply)
