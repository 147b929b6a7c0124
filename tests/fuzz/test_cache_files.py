"""Whatever stands in a cache folder: a server starts, and uses only what a server has written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.engine.cache.files import DamagedFile, FileInfo, hash_chain, read_block, read_info
from gemserve.engine.cache.folder import CacheFolder
from gemserve.errors import ConfigError
from tests.fuzz.cases import MIB, bounded, cases, changed_bytes
from tests.unit.test_cache_files import KEY, blocks, new_info, write

NAMES = ("lock", "salt", "salt.tmp", "probe.tmp", "kv-x", "notes", "kv-" + "1" * 32 + ".tmp")
OTHERS = ("kv-" + "0" * 32 + ".safetensors", *NAMES)


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes 16 MiB, which says nothing about files."""
    monkeypatch.setattr("gemserve.engine.cache.folder._measure_reading", lambda path: 1e9)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> FileInfo:
    return write(new_info(tmp_path_factory.mktemp("cache"), [7] * 600))


@given(st.data())
@cases(50)
def test_a_changed_file_is_noticed(
    original: FileInfo, tmp_path_factory: Any, data: st.DataObject
) -> None:
    """The header by its seal, and blocks by their sums: the others can still be used."""
    content = original.path.read_bytes()
    changed = data.draw(changed_bytes(content, original.data_start))
    path = tmp_path_factory.mktemp("changed") / original.path.name
    path.write_bytes(changed)
    with bounded("cache file", cpu_s=5, grown_bytes=100 * MIB):
        try:
            info = read_info(path, KEY)
        except DamagedFile:
            assert changed != content
            return
        assert changed[: original.data_start] == content[: original.data_start]
        for number, expected in enumerate(blocks(info)):
            with open(path, "rb") as file:
                try:
                    assert read_block(file, info, number) == expected
                except DamagedFile:
                    assert changed != content


@st.composite
def litter(draw: st.DrawFn, content: bytes) -> tuple[str, str, bytes]:
    """(name, kind, content) of something in the folder that a server has not written."""
    kind = draw(st.sampled_from(("file", "file", "folder", "link", "pipe")))
    return draw(st.sampled_from(OTHERS)), kind, draw(changed_bytes(content))


def put(folder: Path, name: str, kind: str, content: bytes) -> None:
    path = folder / name
    if path.is_symlink() or path.exists():
        return
    if kind == "file":
        path.write_bytes(content)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(folder / "nowhere")
    else:
        os.mkfifo(path)


@given(st.data())
@cases(40)
@pytest.mark.timeout(60)
def test_a_folder_of_anything_is_opened_or_refused(
    original: FileInfo, tmp_path_factory: Any, data: st.DataObject
) -> None:
    """A pipe that was opened for reading would have hung the start."""
    folder = tmp_path_factory.mktemp("folder")
    content = original.path.read_bytes()
    for name, kind, made in data.draw(st.lists(litter(content), min_size=1, max_size=4)):
        put(folder, name, kind, made)
    if not os.path.lexists(folder / "salt"):
        (folder / "salt").write_bytes(KEY)
        (folder / original.path.name).write_bytes(content)
    with bounded("cache folder", cpu_s=5, grown_bytes=100 * MIB):
        try:
            opened = CacheFolder(folder, 1 << 30)
        except ConfigError as error:
            assert str(folder) in str(error)
            return
        chain = hash_chain(opened.key, b"seed", np.array([7] * 600))
        found, count = opened.find(chain)
        assert count == (0 if found is None else 2)
        assert opened.num_bytes == sum(info.num_bytes for info in opened.files)
        opened.close()
