"""Requests for libraries at the same time: nobody waits for ever, and nothing stays locked."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gemserve.config import ServerConfig
from gemserve.contract.events import Finished
from gemserve.engine.core import Core
from gemserve.engine.stream import Stream
from gemserve.errors import LibraryBusy
from gemserve.prompting.stopping import Stopped, stoppable_by
from gemserve_library.api.shelf import Shelf
from gemserve_library.api.uploads import Turn, Upload, Uploads
from gemserve_library.asking import find_excerpts
from gemserve_library.library import Library
from tests.fakes import wait_for_async
from tests.library.served import ask_of_ferry, build_core, make_library, serve_libraries
from tests.library.test_formats import xlsx_of
from tests.library.worlds import IDENTITY, FakeReader, FakeRequests, paragraphs

pytestmark = pytest.mark.anyio
LONG = paragraphs(3000)


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core()


@pytest.fixture
async def client(core: Core, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_libraries(core, tmp_path) as made:
        yield made


async def add(client: httpx.AsyncClient, name: str, path: str, text: str, *, wait: bool) -> Any:
    address = f"/v1/libraries/{name}/files" + ("?wait=true" if wait else "")
    return await client.post(address, json={"path": path, "text": text})


async def test_libraries_may_be_named_in_any_order(client: httpx.AsyncClient) -> None:
    """Two threads, each of which held one library, waited for each other for ever."""
    for name in ("a", "b"):
        await make_library(client, name)
        await add(client, name, "ferry.md", f"{name}: the ferry leaves at nine.", wait=True)
    asked = [ask_of_ferry(client, names, candidates=1) for names in (["a", "b"], ["b", "a"]) * 12]
    replies = await asyncio.wait_for(asyncio.gather(*asked), 120)
    assert {reply.status_code for reply in replies} == {200}
    assert replies[1].json()["filter"]["searched"]["libraries"] == ["b", "a"]


async def test_searches_of_a_key_leave_threads_for_others(
    core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that waited for one library held all threads, and nobody's text was read."""
    (tmp_path / "keys").write_text("key-of-alice-0001\nkey-of-bob-000002")
    may_go_on, began = threading.Event(), []

    def find(*given: Any) -> Any:
        began.append(1)
        may_go_on.wait(60)
        return find_excerpts(*given)

    monkeypatch.setattr("gemserve_library.api.shelf.find_excerpts", find)
    options = {"api_key_file": str(tmp_path / "keys")}
    async with serve_libraries(core, tmp_path, **options) as client:
        client.headers["Authorization"] = "Bearer key-of-alice-0001"
        await make_library(client, "a")
        await add(client, "a", "ferry.md", "The ferry leaves at nine.", wait=True)
        asked = [asyncio.create_task(ask_of_ferry(client, ["a"], candidates=1)) for _ in range(60)]
        while not began:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)  # the others come as far as they may
        body = {"model": "builtin", "messages": [{"role": "user", "content": "Hi"}]}
        other = {"Authorization": "Bearer key-of-bob-000002"}
        sent = client.post("/v1/chat/completions", json=body | {"max_tokens": 1}, headers=other)
        try:
            reply = await asyncio.wait_for(sent, 5)
        finally:
            may_go_on.set()
            replies = await asyncio.gather(*asked)
        assert reply.status_code == 200
        assert {each.status_code for each in replies} == {200}


def test_a_search_does_not_begin_when_its_client_has_left(tmp_path: Path) -> None:
    shelf = fake_shelf(tmp_path, None)
    shelf.create(b"", "a")
    left = threading.Event()
    left.set()
    with stoppable_by(left), pytest.raises(Stopped):
        shelf.find(b"", ["a"], None, None, 1)  # type: ignore[arg-type]
    shelf.close()


async def test_few_libraries_are_held_open(
    core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a connection and a map of its keys, and names come from clients."""
    monkeypatch.setattr("gemserve_library.api.shelf._MOST_OPEN", 2)
    held = len(list(Path("/proc/self/fd").iterdir()))
    async with serve_libraries(core, tmp_path, max_libraries=8) as client:
        for number in range(8):
            await make_library(client, f"n{number}")
            await add(client, f"n{number}", "ferry.md", "The ferry leaves at nine.", wait=True)
        forgotten = {*core._scheduler.cache._forgotten}
        for number in (*range(8), 0, 7):
            reply = await ask_of_ferry(client, [f"n{number}"], candidates=1)
            assert reply.json()["filter"]["searched"]["windows"] == 1
        assert len(list(Path("/proc/self/fd").iterdir())) < held + 16
        # what was forgotten is never cached again
        assert core._scheduler.cache._forgotten.keys() == forgotten
        await client.delete("/v1/libraries/n0")
        assert core._scheduler.cache._forgotten.keys() > forgotten


def test_uploads_that_are_gone_leave_nothing() -> None:
    """A client that makes a library for each session left an entry for each."""
    uploads = Uploads(None, None)  # type: ignore[arg-type]
    uploads._of[b"", "a"] = [Upload(path="a.md", num_bytes=1), Upload(path="b.md", num_bytes=1)]
    assert uploads.cancel(b"", "a", "a.md")
    assert [upload.path for upload in uploads.list(b"", "a")] == ["b.md"]
    assert uploads.cancel(b"", "a")
    assert not uploads._of


async def test_few_uploads_that_a_bug_has_ended_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those with a known reason few were, and of the others all, for ever."""
    monkeypatch.setattr("gemserve_library.api.uploads._REMEMBERED", 2)

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    uploads = Uploads(None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(uploads, "_add", fail)
    monkeypatch.setattr(uploads, "_erase", lambda *_: None)
    begun = [
        uploads.begin(b"", "a", f"{i}.md", 1, BytesIO(), charge=lambda _: None, end=lambda: None)
        for i in range(4)
    ]
    for upload in begun:
        await asyncio.wait_for(upload.is_settled.wait(), 20)
    assert [upload.path for upload in uploads.list(b"", "a")] == ["2.md", "3.md"]
    assert begun[0].error == "RuntimeError: a bug"


async def test_a_removal_ends_what_the_engine_reads_of_a_file() -> None:
    """While its request waited behind others, each removal of the file was refused."""
    request: Any = SimpleNamespace(prompt_ids=[1], lent_groups=())
    stream = Stream(request, asyncio.get_running_loop())
    engine: Any = SimpleNamespace(submit=lambda _: stream)
    uploads = Uploads(None, engine)  # type: ignore[arg-type]
    uploads._of[b"", "a"] = [upload := Upload(path="a.md", num_bytes=1)]
    reading = asyncio.create_task(uploads._run(request, lambda _: None, upload))
    await asyncio.sleep(0)
    assert uploads.cancel(b"", "a", "a.md")
    assert stream.is_cancelled()
    stream.emit(Finished(reason="abort", completion_tokens=0))
    assert (await reading).reason == "abort"


@pytest.mark.parametrize("what", ["libraries/a", "libraries/a/files/long.txt"])
async def test_what_is_being_read_can_be_deleted(
    client: httpx.AsyncClient, tmp_path: Path, what: str
) -> None:
    """The file that was cancelled left the library locked, and what was read of it on disk."""
    await make_library(client, "a")
    assert (await add(client, "a", "long.txt", LONG, wait=False)).status_code == 200
    for _ in range(600):
        file = (await client.get("/v1/libraries/a/files/long.txt")).json()
        if file["tokens"]:
            break
        await asyncio.sleep(0.05)
    assert file["status"] == "reading"
    gone = await client.delete(f"/v1/{what}")
    assert gone.status_code == 200, gone.text
    if what == "libraries/a":
        await make_library(client, "a")
    assert count_keys(tmp_path / "libraries" / "a") == 0
    added = await add(client, "a", "short.txt", "A word.", wait=True)
    assert added.json()["status"] == "ready", added.text


async def test_files_that_wait_count_for_the_disk(core: Core, tmp_path: Path) -> None:
    async with serve_libraries(core, tmp_path, library_disk_bytes=1 << 19) as client:
        await make_library(client, "a")
        text = paragraphs(60)
        replies = [await add(client, "a", f"{i}.txt", text + str(i), wait=False) for i in range(14)]
        statuses = [reply.status_code for reply in replies]
        assert statuses[0] == 200
        refused = replies[statuses.index(400)].json()["error"]
        assert refused["code"] == "library_disk_full"
        while (await client.get("/v1/libraries/a")).json()["reading"]:
            await asyncio.sleep(0.1)


async def test_files_that_come_together_are_unpacked_within_the_limit_of_their_key(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was on the disk before any was counted: 500 of 64 KB, packed, took 32 GB of it."""
    monkeypatch.setattr("gemserve_library.api.uploads._MOST_OF_KEY", 2)
    held: list[int] = []
    may_go_on, hold = threading.Event(), Shelf.hold

    def hold_slowly(*given: Any) -> Any:
        held.append(1)
        may_go_on.wait(60)
        return hold(*given)

    monkeypatch.setattr(Shelf, "hold", hold_slowly)
    await make_library(client, "a")
    adding = [
        asyncio.create_task(add(client, "a", f"{i}.md", f"Word {i}.", wait=True)) for i in range(5)
    ]
    try:
        await wait_for_async(lambda: len(held) + sum(each.done() for each in adding) == 5, 20)
        assert len(held) == 2
    finally:
        may_go_on.set()
        replies = await asyncio.gather(*adding)
    refused = [reply.json()["error"]["code"] for reply in replies if reply.status_code == 400]
    assert refused == ["too_many_uploads"] * 3
    assert (await add(client, "a", "late.md", "Late.", wait=True)).json()["status"] == "ready"


async def test_a_file_that_needs_more_than_its_size_tells_ends_at_the_limit(
    core: Core, tmp_path: Path
) -> None:
    """The room for a file was estimated once, from its size before it was unpacked."""
    limit = 1 << 19
    async with serve_libraries(core, tmp_path, library_disk_bytes=limit) as client:
        await make_library(client, "a")
        rows = (f"<row><c t='str'><v>{line}</v></c></row>" for line in LONG.splitlines())
        files = {"file": ("a.xlsx", xlsx_of("".join(rows)))}
        reply = await client.post("/v1/libraries/a/files?wait=true", files=files)
        assert reply.json()["status"] == "failed", reply.text
        assert f"and may have {limit}" in reply.json()["error"]
        described = (await client.get("/v1/libraries/a")).json()
        assert described["files"] == 0
        assert described["bytes"] < 2 * limit  # a group of segments has fewer
        assert count_keys(tmp_path / "libraries" / "a") == 0


def count_keys(folder: Path) -> int:
    """Of how many segments a library has keys."""
    with closing(Library(folder)) as library:
        (count,) = library._connection.execute("SELECT count(*) FROM keys").fetchone()
        return int(count)


def test_what_is_known_of_a_file_is_charged_too(tmp_path: Path, tokenizer: Any) -> None:
    """A file of a text that is known cost nothing, and took as long to cut."""
    shelf = fake_shelf(tmp_path, tokenizer)
    shelf.create(b"", "a")
    uploads = Uploads(shelf, None)  # type: ignore[arg-type]
    charged: list[int] = []
    for path in ("x", "y"):
        content = BytesIO(paragraphs(60).encode())
        upload = Upload(path=path, num_bytes=1)
        uploads._add(b"", "a", upload, content, FakeReader(), charged.append)
    described = shelf.describe(b"", "a")
    assert described.files == 2
    assert sum(charged) == described.tokens / 2
    shelf.close()


def fake_shelf(folder: Path, tokenizer: Any) -> Shelf:
    """A shelf for `FakeReader`, of which nothing is cached."""

    def forget(ids: Sequence[str]) -> Future[None]:
        forgotten: Future[None] = Future()
        forgotten.set_result(None)
        return forgotten

    requests = FakeRequests(planner=None, identity=IDENTITY)  # type: ignore[arg-type]
    return Shelf(folder, requests, tokenizer, ServerConfig(), forget)


async def test_a_packed_file_counts_as_what_it_unpacks_to(client: httpx.AsyncClient) -> None:
    await make_library(client, "a")
    packed = gzip.compress(b"word " * 20_000_000)
    files = {"file": ("bomb.txt.gz", packed)}
    reply = await client.post("/v1/libraries/a/files", files=files)
    assert reply.status_code == 400
    assert "unpacks to more than" in reply.json()["error"]["message"]
    files = {"file": ("bomb.txt.gz", gzip.compress(packed))}
    reply = await client.post("/v1/libraries/a/files", files=files)
    assert reply.status_code == 400
    assert "is packed twice" in reply.json()["error"]["message"]
    files = {"file": ("notes.txt.gz", gzip.compress(b"The ferry leaves at nine."))}
    reply = await client.post("/v1/libraries/a/files?wait=true", files=files)
    assert reply.json()["status"] == "ready"


@pytest.mark.parametrize("path", ["../../b", ".", "a/../b", "a/./b"])
async def test_a_path_that_no_address_can_name_is_refused(
    client: httpx.AsyncClient, path: str
) -> None:
    """A browser would leave its parts out, and so delete something else."""
    await make_library(client, "a")
    reply = await add(client, "a", path, "A word.", wait=True)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "path"
    files = {"file": ("x.txt", b"A word.")}
    reply = await client.post("/v1/libraries/a/files", files=files, data={"path": path})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "path"


async def test_a_removal_comes_before_files_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemserve_library.api.uploads._REMOVAL_S", 0.2)
    turn, said = Turn(), []

    async def upload(name: str) -> None:
        async with turn.for_upload():
            said.append(name)
            await asyncio.sleep(0.1)

    async def remove() -> None:
        async with turn.for_removal("a"):
            said.append("removal")

    uploads = [asyncio.create_task(upload(name)) for name in ("first", "second", "third")]
    await asyncio.sleep(0.01)
    removal = asyncio.create_task(remove())
    await asyncio.sleep(0.01)
    uploads[1].cancel()  # one that waits may leave
    await asyncio.gather(*uploads, removal, return_exceptions=True)
    assert said == ["first", "removal", "third"]
    async with turn.for_upload():
        began_s = time.monotonic()
        with pytest.raises(LibraryBusy):
            await remove()
        assert time.monotonic() - began_s < 5
    async with turn.for_removal("a"):
        pass
    async with turn.for_upload():
        late = asyncio.create_task(upload("late"))
        await asyncio.sleep(0.01)
        late.cancel()  # in the moment in which the turn is handed over
    with pytest.raises(asyncio.CancelledError):
        await late
    async with turn.for_removal("a"):
        pass
