"""`/v1/libraries`: made, filled, asked and deleted; nobody sees another key's."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.engine.core import Core
from gemserve_library.api.reply_types import file_object
from gemserve_library.library import Library, StoredFile
from tests.fakes import Api
from tests.library.served import build_core, serve_libraries
from tests.library.worlds import paragraphs
from tests.pdfs import pdf_of

pytestmark = pytest.mark.anyio
KEYS = {"a": "key-of-alice-0001", "b": "key-of-bob-000002"}
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
TEXT = f"{paragraphs(60)}\n\nThe ferry to Malmo leaves at nine.\n\n{paragraphs(60, 'ferry')}"
QUESTION = "When does the ferry to Malmo leave?"
FILTER = {"library": "notes", "candidates": 4, "keep": 256, "fallback": False}


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core()


@pytest.fixture
async def client(core: Core, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "keys").write_text("\n".join(KEYS.values()))
    options = {"api_key_file": str(tmp_path / "keys"), "max_libraries": 2}
    async with serve_libraries(core, tmp_path, **options) as made:
        yield made


async def send(
    client: httpx.AsyncClient, method: str, path: str, status: int = 200, **fields: Any
) -> Any:
    fields.setdefault("headers", ALICE)
    reply = await client.request(method, f"/v1/{path}", **fields)
    assert reply.status_code == status, reply.text
    return reply.json()


async def fill(client: httpx.AsyncClient, **fields: Any) -> Any:
    await send(client, "POST", "libraries", json={"name": "notes"}, **fields)
    body = {"path": "boats/notes.md", "text": TEXT}
    return await send(client, "POST", "libraries/notes/files?wait=true", json=body, **fields)


async def ask(client: httpx.AsyncClient, status: int = 200, **fields: Any) -> Any:
    body = {
        "model": "builtin",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 4,
        "temperature": 0,
        "filter": FILTER,
    }
    return await send(client, "POST", "chat/completions", status, json=body, **fields)


async def test_a_library_from_its_making_to_its_end(client: httpx.AsyncClient) -> None:
    file = await fill(client)
    assert (file["id"], file["status"], file["library"]) == ("boats/notes.md", "ready", "notes")
    assert file["tokens"] > 1000
    described = await send(client, "GET", "libraries/notes")
    assert (described["files"], described["tokens"]) == (1, file["tokens"])
    assert described["error"] is None
    assert (await send(client, "GET", "libraries"))["data"] == [described]
    assert (await send(client, "GET", "libraries/notes/files"))["data"] == [file]
    assert await send(client, "GET", "libraries/notes/files/boats/notes.md") == file
    report = (await ask(client))["filter"]
    assert report["searched"]["libraries"] == ["notes"]
    assert any("leaves at nine" in source["text"] for source in report["sources"])
    assert {source["file"] for source in report["sources"]} == {"boats/notes.md"}
    await send(client, "DELETE", "libraries/notes/files/boats/notes.md")
    assert (await ask(client))["filter"]["sources"] == []
    await send(client, "DELETE", "libraries/notes")
    assert (await send(client, "GET", "libraries"))["data"] == []
    assert (await ask(client, 404))["error"]["code"] == "library_not_found"


async def test_a_long_list_of_files_is_written_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository has tens of thousands of them, and all other requests waited."""
    of_file: dict[str, Any] = {"kind": "text", "digest": "", "num_bytes": 1, "modified_ns": -1}
    files = [StoredFile(path=f"{number}.md", **of_file) for number in range(1000)]
    threads: set[int] = set()

    def noted(library: str, file: StoredFile) -> Any:
        threads.add(threading.get_ident())
        return file_object(library, file)

    monkeypatch.setattr("gemserve_library.api.routes._list_files", lambda *_: files)
    monkeypatch.setattr("gemserve_library.api.routes.file_object", noted)
    data = (await send(client, "GET", "libraries/notes/files"))["data"]
    assert [file["id"] for file in data] == [file.path for file in files]
    assert threads
    assert threading.get_ident() not in threads


async def test_a_deleted_file_is_gone_from_the_cache(client: httpx.AsyncClient, core: Core) -> None:
    await fill(client)
    await ask(client)
    assert (await ask(client))["filter"]["cached_windows"]
    held = core.cache_state
    await send(client, "DELETE", "libraries/notes/files/boats/notes.md")
    assert core.cache_state != held
    body = {"path": "boats/notes.md", "text": TEXT}
    await send(client, "POST", "libraries/notes/files?wait=true", json=body)
    assert not (await ask(client))["filter"]["cached_windows"]


async def test_another_process_may_write_while_a_server_answers(
    client: httpx.AsyncClient, core: Core, tmp_path: Path
) -> None:
    """`gemserve library` beside a server: who comes second is told, and what is removed is gone."""
    await fill(client)
    await ask(client)
    (folder,) = (tmp_path / "libraries" / ".keys").glob("*/notes")
    other = Library(folder)
    body = {"path": "new.md", "text": "The ferry to Oslo leaves at ten."}
    with other.writing():
        upload = await send(client, "POST", "libraries/notes/files?wait=true", json=body)
        assert upload["status"] == "failed"
        assert "another process is adding or removing files" in upload["error"]
        for path in ("libraries/notes/files/boats/notes.md", "libraries/notes"):
            reply = await client.delete(f"/v1/{path}", headers=ALICE)
            assert reply.status_code == 409
            assert reply.json()["error"]["code"] == "library_busy"
            assert reply.headers["retry-after"] == "1"
        assert (await ask(client))["filter"]["cached_windows"]
        held = core.cache_state
        other.remove_files(["boats/notes.md"])
    other.close()
    assert (await ask(client))["filter"]["sources"] == []
    assert core.cache_state != held  # the next search has the cache forget what is gone
    upload = await send(client, "POST", "libraries/notes/files?wait=true", json=body)
    assert upload["status"] == "ready"


async def test_another_key_sees_nothing(client: httpx.AsyncClient) -> None:
    """What it is told of a name that another key has is what it is told of any."""
    await fill(client)
    assert (await send(client, "GET", "libraries", headers=BOB))["data"] == []
    for method, path in (
        ("GET", "libraries/{}"),
        ("DELETE", "libraries/{}"),
        ("GET", "libraries/{}/files"),
        ("GET", "libraries/{}/files/boats/notes.md"),
        ("DELETE", "libraries/{}/files/boats/notes.md"),
    ):
        errors = [
            await send(client, method, path.format(name), 404, headers=BOB)
            for name in ("notes", "never")
        ]
        assert str(errors[0]).replace("notes", "never") == str(errors[1]).replace("notes", "never")
    assert (await ask(client, 404, headers=BOB))["error"]["code"] == "library_not_found"
    other = {"path": "x", "text": "The ferry to Malmo leaves at ten."}
    await send(client, "POST", "libraries", json={"name": "notes"}, headers=BOB)
    await send(client, "POST", "libraries/notes/files?wait=true", json=other, headers=BOB)
    (source,) = (await ask(client, headers=BOB))["filter"]["sources"]
    assert source["file"] == "x"
    assert (await send(client, "GET", "libraries/notes"))["files"] == 1
    assert (await ask(client))["filter"]["sources"][0]["file"] == "boats/notes.md"


async def test_files_come_as_forms_too(client: httpx.AsyncClient) -> None:
    await send(client, "POST", "libraries", json={"name": "notes"})
    path = "libraries/notes/files?wait=true"
    pdf = pdf_of(["The river is long.", "The ferry to Malmo leaves at nine."])
    await send(client, "POST", path, files={"file": ("ferry.pdf", pdf)})
    html = b"<h1>Trains</h1><p>The train to Malmo leaves at ten.</p><script>nothing</script>"
    await send(client, "POST", path, files={"file": ("a.html", html)}, data={"path": "t/a.html"})
    failed = await send(client, "POST", path, files={"file": ("x.bin", b"\0\1")})
    assert failed["status"] == "failed"
    assert failed["error"].startswith("is no text (100.0% of it")
    sources = {source["file"]: source for source in (await ask(client))["filter"]["sources"]}
    assert sources["ferry.pdf"]["pages"] in ([1, 2], [2, 2])
    assert sources["t/a.html"]["heading"] in ("# Trains", None)
    assert "nothing" not in sources["t/a.html"]["text"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "../other"}, "name"),
        ({"name": ".keys"}, "name"),
        ({"name": ""}, "name"),
        ({}, "name"),
    ],
)
async def test_bad_names_are_refused(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    error = (await send(client, "POST", "libraries", 400, json=body))["error"]
    assert error["param"] == param


async def test_limits_are_named(client: httpx.AsyncClient) -> None:
    for name in ("one", "two"):
        await send(client, "POST", "libraries", json={"name": name})
    error = (await send(client, "POST", "libraries", 400, json={"name": "three"}))["error"]
    assert error["code"] == "too_many_libraries"
    assert "--max-libraries" in error["message"]
    error = (await send(client, "POST", "libraries", 400, json={"name": "one"}))["error"]
    assert error["code"] == "exists"
    await send(client, "POST", "libraries", json={"name": "three"}, headers=BOB)


async def test_every_kind_of_request_can_be_answered_from_a_library(
    client: httpx.AsyncClient,
) -> None:
    await fill(client)
    message = {"role": "user", "content": QUESTION}
    bodies: dict[str, Any] = {
        "/v1/completions": {"prompt": f"{QUESTION}\nAnswer:", "max_tokens": 4},
        "/v1/filter": {"messages": [message]},
        "/v1/responses": {"input": QUESTION, "max_output_tokens": 16},
        "/v1/messages": {"messages": [message], "max_tokens": 4},
        "/api/chat": {"messages": [message], "stream": False, "options": {"num_predict": 4}},
        "/api/generate": {"prompt": QUESTION, "stream": False, "options": {"num_predict": 4}},
    }
    for path, body in bodies.items():
        full = {"model": "builtin", "filter": FILTER} | body
        reply = await client.post(path, json=full, headers=ALICE)
        assert reply.status_code == 200, (path, reply.text)
        sources = reply.json()["filter"]["sources"]
        assert any("leaves at nine" in source["text"] for source in sources), path


async def test_prompts_that_no_library_can_answer_are_refused(client: httpx.AsyncClient) -> None:
    await fill(client)
    for prompt in ([1, 2, 3], ["One?", "Two?"]):
        body = {"model": "builtin", "prompt": prompt, "filter": FILTER}
        error = (await send(client, "POST", "completions", 400, json=body))["error"]
        assert error["param"] == "filter.library"


async def test_head_is_allowed_where_get_is(api: Api) -> None:
    for path, allowed in (
        ("/v1/libraries/notes", "DELETE, GET, HEAD"),
        ("/v1/libraries/notes/files", "GET, HEAD, POST"),
    ):
        reply = await api.client.put(path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
