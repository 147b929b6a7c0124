"""Files of the document cache: whatever is wrong with one, it is noticed and never used."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors import safe_open

from gemserve.engine.cache.files import (
    CHAIN_TOKENS,
    DamagedFile,
    FileInfo,
    FileWriter,
    hash_chain,
    read_block,
    read_info,
)
from gemserve.engine.cache.folder import CacheFolder
from gemserve.errors import ConfigError

KEY = bytes(range(32))
SHAPE = (3, 2, 4)
BLOCK_BYTES = 3 * 2 * 4 * 4 * CHAIN_TOKENS


def new_info(folder: Path, tokens: list[int], ids: frozenset[str] = frozenset()) -> FileInfo:
    chain = hash_chain(KEY, b"seed", np.array(tokens))
    return FileInfo(
        path=folder / f"kv-{chain[-1].hex()}.safetensors",
        chain=chain,
        num_tokens=CHAIN_TOKENS * len(chain),
        shape=SHAPE,
        dtype="F32",
        element_bytes=4,
        block_tokens=CHAIN_TOKENS,
        ids=ids,
        seconds_per_cost=1e-9,
    )


def blocks(info: FileInfo) -> list[bytes]:
    return [Random(i).randbytes(BLOCK_BYTES) for i in range(info.num_blocks)]


def write(info: FileInfo, key: bytes = KEY) -> FileInfo:
    writer = FileWriter(info, key)
    for data in blocks(info):
        writer.add(memoryview(data))
    writer.finish()
    return writer.publish()


def read(path: Path, key: bytes = KEY) -> list[bytes]:
    info = read_info(path, key)
    with open(path, "rb") as file:
        return [bytes(read_block(file, info, i)) for i in range(info.num_blocks)]


def folder_at(path: Path, limit: int = 1 << 30) -> CacheFolder:
    path.mkdir(exist_ok=True)
    (path / "salt").write_bytes(KEY)
    return CacheFolder(path, limit)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    info = write(new_info(tmp_path, [1] * 600, frozenset({"a"})))
    assert read(info.path) == blocks(info)
    assert read_info(info.path, KEY) == info
    assert info.num_tokens == 512
    assert info.path.stat().st_mode & 0o777 == 0o600
    assert info.path.stat().st_size == info.num_bytes


def test_the_file_is_in_the_safetensors_format(tmp_path: Path) -> None:
    info = write(new_info(tmp_path, [1] * 600))
    with safe_open(info.path, "pt") as file:
        tensor = file.get_tensor("segment.1")
        assert tuple(tensor.shape) == (3, 2, CHAIN_TOKENS, 4)
        assert tensor.contiguous().numpy().tobytes() == blocks(info)[1]


def test_thousands_of_files_are_taken_up_soon(tmp_path: Path) -> None:
    """Each was compared with all others: 20,000 took 18 s of every start."""
    folder = folder_at(tmp_path)
    one = new_info(tmp_path, [1] * 300)
    began_s = time.process_time()
    for number in range(20_000):
        link = number.to_bytes(32, "big")
        folder.add(replace(one, path=tmp_path / link.hex(), chain=(link,)))
    assert time.process_time() - began_s < 2
    longer = replace(one, path=tmp_path / "longer", chain=((5).to_bytes(32, "big"), b"a"))
    folder.add(longer)
    assert len(folder) == 20_000
    assert folder.beginnings(longer.chain) == [longer]
    folder.close()


def test_a_full_disk_is_read_from(tmp_path: Path) -> None:
    """Where its speed could not be measured nothing was read from it until the server's end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        folder = folder_at(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder.bytes_per_s > 0
    assert not list(tmp_path.glob("probe*"))
    folder.close()


def test_a_folder_that_cannot_be_synchronised_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every file system does that. Each file that was written left a descriptor open."""

    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    writer = FileWriter(new_info(tmp_path, [1] * 600), KEY)
    monkeypatch.setattr(os, "fsync", refuse)
    held = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        writer.settle()
    assert len(list(Path("/proc/self/fd").iterdir())) < held + 16
    writer.abort()


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    info = write(new_info(tmp_path, [1] * 600))
    whole, rng = info.path.read_bytes(), Random(1)
    places = [*range(16), *range(info.data_start - 9, info.data_start + 2)]
    places += [rng.randrange(info.data_start) for _ in range(100)]
    places += [rng.randrange(len(whole)) for _ in range(40)] + [len(whole) - 1]
    for place in places:
        altered = bytearray(whole)
        altered[place] ^= 1 << rng.randrange(8)
        info.path.write_bytes(altered)
        with pytest.raises(DamagedFile):
            read(info.path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    info = write(new_info(tmp_path, [1] * 600))
    whole, rng = info.path.read_bytes(), Random(2)
    sizes = [0, 1, 7, 8, 9, info.data_start - 1, info.data_start, info.data_start + 1]
    sizes += [len(whole) - 33, len(whole) - 32, len(whole) - 1]
    sizes += [rng.randrange(len(whole)) for _ in range(50)]
    for size in sizes:
        info.path.write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            read_info(info.path, KEY)
    info.path.write_bytes(whole + b"x")
    with pytest.raises(DamagedFile):
        read_info(info.path, KEY)


def test_a_file_of_another_salt_is_not_used(tmp_path: Path) -> None:
    info = write(new_info(tmp_path, [1] * 600), key=bytes(32))
    with pytest.raises(DamagedFile, match="salt"):
        read_info(info.path, KEY)


def test_a_hash_chain_depends_on_everything_before() -> None:
    tokens = np.arange(1000)
    chain = hash_chain(KEY, b"seed", tokens)
    assert len(chain) == 3
    altered = tokens.copy()
    altered[300] += 1
    other = hash_chain(KEY, b"seed", altered)
    assert other[0] == chain[0]
    assert other[1] != chain[1]
    assert other[2] != chain[2]
    assert not set(chain) & set(hash_chain(KEY, b"other", tokens))
    assert not set(chain) & set(hash_chain(bytes(32), b"seed", tokens))


def test_a_new_process_finds_the_files(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    folder.add(write(new_info(tmp_path, [1] * 600)))
    folder.close()
    again = folder_at(tmp_path)
    chain = hash_chain(KEY, b"seed", np.array([1] * 300 + [2] * 300))
    found, num_links = again.find(chain)
    assert found is not None
    assert num_links == 1
    assert again.seconds_per_cost == 1e-9
    again.close()


def test_leftovers_and_damaged_files_are_removed_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write(new_info(tmp_path, [1] * 600))
    for token in (2, 3):
        bad = write(new_info(tmp_path, [token] * 600)).path
        bad.write_bytes(bad.read_bytes()[:-100])
    foreign = tmp_path / f"kv-{'0' * 32}.safetensors"
    foreign.write_bytes(b"hello")
    for number in range(50):
        writer = FileWriter(new_info(tmp_path, [10 + number] * 600), KEY)
        if number % 2:
            writer.add(memoryview(blocks(good)[0]))
        writer._file.close()  # the process was killed
    mine = tmp_path / "model.safetensors"
    mine.write_bytes(b"somebody's model")
    with caplog.at_level(logging.WARNING):
        folder = folder_at(tmp_path)
    assert len(caplog.records) == 3
    assert [info.path for info in folder.files] == [good.path]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {good.path.name, "salt", "lock", mine.name}, "a stranger's file must stay"
    folder.close()


def test_the_file_that_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    size = write(new_info(tmp_path, [1] * 600)).path.stat().st_size
    folder = folder_at(tmp_path, 3 * size)
    infos = [write(new_info(tmp_path, [token] * 600)) for token in (1, 2, 3)]
    for info in infos:
        folder.add(info)
    folder.touch(infos[0])
    assert folder.make_room(size)
    assert not infos[1].path.exists()
    assert infos[0].path.exists()
    assert folder.num_bytes == 2 * size
    assert not folder.make_room(3 * size + 1)
    assert len(folder) == 2
    folder.close()


def test_a_longer_document_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    short = write(new_info(tmp_path, [1] * 600))
    folder.add(short)
    folder.add(longer := write(new_info(tmp_path, [1] * 1100)))
    assert [info.path for info in folder.files] == [longer.path]
    assert not short.path.exists()
    folder.forget(["other"])
    assert len(folder) == 1
    folder.close()


def test_a_file_that_cannot_be_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be of a document that its owner has deleted, on a disk that can only be read."""
    folder = folder_at(tmp_path)
    folder.add(write(new_info(tmp_path, [1] * 600, frozenset({"a"}))))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "unlink", refuse)
        folder.forget(["a"])
    (record,) = caplog.records
    assert "cannot be deleted: [Errno 30] Read-only file system" in record.getMessage()
    assert not folder.files
    folder.close()


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "new", 1 << 30)
    assert (tmp_path / "new" / "salt").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another server"):
        CacheFolder(tmp_path / "new", 1 << 30)
    folder.close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache_dir"):
        CacheFolder(tmp_path / "file", 1 << 30)


@pytest.mark.timeout(20)
def test_a_pipe_in_the_folder_does_not_hold_up_the_start(tmp_path: Path) -> None:
    """To open it for reading waits for somebody who writes."""
    os.mkfifo(tmp_path / f"kv-{'0' * 32}.safetensors")
    folder = folder_at(tmp_path)
    assert folder.files == []
    folder.close()
    (tmp_path / "salt").unlink()
    os.mkfifo(tmp_path / "salt")
    with pytest.raises(ConfigError, match="it is not a file"):
        CacheFolder(tmp_path, 1 << 30)
