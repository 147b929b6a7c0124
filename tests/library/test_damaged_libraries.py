"""A damaged library is refused by its name; it can be deleted, and the others go on."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from gemserve.engine.core import Core
from gemserve_library.library import DATABASE
from tests.library.served import ask_of_ferry, build_core, make_library, serve_libraries
from tests.library.worlds import paragraphs

pytestmark = pytest.mark.anyio
TEXT = f"{paragraphs(40)}\n\nThe ferry to Malmo leaves at nine."


def zeros(database: Path) -> None:
    database.write_bytes(b"\0" * database.stat().st_size)


def random_bytes(database: Path) -> None:
    database.write_bytes(Random(1).randbytes(database.stat().st_size))


def cut(database: Path) -> None:
    os.truncate(database, database.stat().st_size // 2)


def emptied(database: Path) -> None:
    database.write_bytes(b"")


def of_another_program(database: Path) -> None:
    database.unlink()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def without_segments(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("DROP TABLE windows")


def folder(database: Path) -> None:
    database.unlink()
    database.mkdir()


DAMAGES = (zeros, random_bytes, cut, emptied, of_another_program, without_segments, folder)


@pytest.fixture(scope="module")
def core() -> Core:
    return build_core()


async def make_with_ferry(client: httpx.AsyncClient, name: str) -> None:
    await make_library(client, name)
    path = f"/v1/libraries/{name}/files?wait=true"
    added = await client.post(path, json={"path": "ferry.md", "text": TEXT})
    assert added.json()["status"] == "ready", added.text


def damage_library(root: Path, damage: Callable[[Path], None]) -> None:
    """Damage it as it is when no process has it open."""
    database = root / "libraries" / "damaged" / DATABASE
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for end in ("-wal", "-shm"):
        database.with_name(DATABASE + end).unlink(missing_ok=True)
    damage(database)


def check_refusal(reply: httpx.Response) -> None:
    error: dict[str, Any] = reply.json()["error"]
    assert reply.status_code == 500, reply.text
    assert error["code"] == "library_error"
    assert error["message"].startswith("library damaged: ")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_open", [False, True], ids=["before the start", "while it is open"])
async def test_it_is_refused_and_can_be_deleted(
    core: Core, tmp_path: Path, damage: Callable[[Path], None], is_open: bool
) -> None:
    async with serve_libraries(core, tmp_path) as made:
        await make_with_ferry(made, "damaged")
        await make_with_ferry(made, "whole")
        if is_open:
            assert (await ask_of_ferry(made, ["damaged"], candidates=2)).status_code == 200
            damage_library(tmp_path, damage)
            await check_damage(made, tmp_path, damage, is_open=True)
    if not is_open:
        damage_library(tmp_path, damage)
        async with serve_libraries(core, tmp_path) as later:
            await check_damage(later, tmp_path, damage, is_open=False)


async def check_damage(
    client: httpx.AsyncClient, root: Path, damage: Callable[[Path], None], *, is_open: bool
) -> None:
    reply = await ask_of_ferry(client, ["damaged"], candidates=2)
    if not is_open or reply.status_code != 200:  # what was read before the damage may be answered
        check_refusal(reply)
    assert (await ask_of_ferry(client, ["whole"], candidates=2)).status_code == 200
    listed = (await client.get("/v1/libraries")).json()["data"]
    errors = {library["id"]: library["error"] for library in listed}
    assert errors["whole"] is None
    # what is damaged below its list of files is found when it is searched
    assert (errors["damaged"] or "library damaged: ").startswith("library damaged: ")
    if not is_open and damage is not without_segments:
        assert errors["damaged"] is not None
    path = "/v1/libraries/damaged/files"
    if (files := await client.get(path)).status_code != 200:
        check_refusal(files)
    added = await client.post(f"{path}?wait=true", json={"path": "x", "text": "A word."})
    if added.status_code == 200:
        assert added.json()["status"] == "failed"
        assert added.json()["error"].startswith("library damaged: ")
    else:
        check_refusal(added)
    gone = await client.delete("/v1/libraries/damaged")
    assert gone.status_code == 200, gone.text
    assert not (root / "libraries" / "damaged").exists()
    assert (await client.get("/v1/libraries/damaged")).status_code == 404
    await make_with_ferry(client, "damaged")
    assert (await ask_of_ferry(client, ["damaged"], candidates=2)).status_code == 200
