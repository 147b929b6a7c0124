"""Key files: which are accepted, how a change of them is followed, what is held of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gemserve.api.access import keys
from gemserve.api.access.keys import KeyFile, open_keys
from gemserve.config import ServerConfig
from gemserve.errors import ConfigError
from tests.fakes import Clock, hash_of, replace_file

ALICE, BOB = "sk-alice-0123", "sk-bob-4567"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    replace_file(path, ALICE, f"sha256:{hash_of(BOB).hex()}")
    return path


def test_a_file_holds_keys_hashes_comments_and_blank_lines(tmp_path: Path) -> None:
    hashed = hash_of(BOB).hex()
    lines = ["# schlüssel", "", f"  {ALICE}\t\r", f"SHA256:{hashed.upper()}", "   ", ALICE]
    file = KeyFile(replace_file(tmp_path / "keys", *lines))
    assert file.has(hash_of(ALICE))
    assert file.has(hash_of(BOB))
    for text in ("# schlüssel", "", f"sha256:{hashed}", hashed, ALICE.upper(), ALICE[:-1]):
        assert not file.has(hash_of(text))


BAD_LINES = [
    ("two words", "512 printable ASCII"),
    ("sk-1 # bob's", "512 printable ASCII"),
    ("schlüssel", "512 printable ASCII"),
    ("\ufeffsk-1", "512 printable ASCII"),
    ("sk-\x001", "512 printable ASCII"),
    ("x" * 513, "512 printable ASCII"),
    ("sha256:", "64 hexadecimal"),
    ("sha256:" + "a" * 63, "64 hexadecimal"),
    ("sha256:" + "a" * 65, "64 hexadecimal"),
    ("SHA256:" + "g" * 64, "64 hexadecimal"),
    ("sha256: " + "a" * 64, "64 hexadecimal"),
]


@pytest.mark.parametrize(("line", "limit"), BAD_LINES, ids=lambda v: ascii(v)[:20])
def test_a_bad_line_is_named_but_not_shown(tmp_path: Path, line: str, limit: str) -> None:
    path = replace_file(tmp_path / "keys", "# ours", ALICE, line, BOB)
    with pytest.raises(ConfigError) as caught:
        open_keys(ServerConfig(api_key_file=path))
    message = str(caught.value)
    assert message.startswith(f"{path}: line 3: ")
    assert limit in message
    for secret in (line, ALICE, BOB):
        assert secret not in message.removeprefix(path) or secret == "sha256:"


@pytest.mark.parametrize("content", ["", "\n\n", "# only\n  # comments\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    path = replace_file(tmp_path / "keys", content)
    with pytest.raises(ConfigError, match="keys: has no key, must have at least 1"):
        open_keys(ServerConfig(api_key_file=path))


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    huge = replace_file(tmp_path / "huge", "#" * (1 << 20), ALICE)
    for path, why in [
        (str(tmp_path / "none"), "cannot be read: No such file"),
        ("", "cannot be read: No such file"),  # GEMSERVE_API_KEY_FILE= must not open the server
        (str(tmp_path), "must be a file"),
        (str(tmp_path / "pipe"), "must be a file"),
        (huge, "more than 1048576 bytes"),
    ]:
        with pytest.raises(ConfigError, match=why):
            open_keys(ServerConfig(api_key_file=path))
    good = replace_file(tmp_path / "good", ALICE)
    with pytest.raises(ConfigError, match="none: cannot be read"):
        open_keys(ServerConfig(api_key_file=good, admin_key_file=str(tmp_path / "none")))


def test_without_files_no_key_is_asked() -> None:
    assert open_keys(ServerConfig()) is None


def test_a_changed_file_is_read_again_within_a_second(key_file: Path) -> None:
    clock = Clock()
    file = KeyFile(str(key_file), clock)
    replace_file(key_file, BOB)
    clock.now_s += 0.9
    assert file.has(hash_of(ALICE))
    clock.now_s += 0.1
    assert not file.has(hash_of(ALICE))
    assert file.has(hash_of(BOB))


def test_a_file_is_looked_at_once_a_second(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, num_looks = Clock(), 0
    file = KeyFile(str(key_file), clock)
    find_version = keys._find_version

    def counted(path: str) -> Any:
        nonlocal num_looks
        num_looks += 1
        return find_version(path)

    monkeypatch.setattr(keys, "_find_version", counted)
    for _ in range(40):
        clock.now_s += 0.25
        file.has(hash_of(ALICE))
    assert num_looks == 10


@pytest.mark.parametrize("has_same_size", [True, False])
def test_a_file_replaced_in_the_same_instant_is_noticed(
    key_file: Path, has_same_size: bool
) -> None:
    clock = Clock()
    replace_file(key_file, ALICE)
    file = KeyFile(str(key_file), clock)
    before = key_file.stat()
    other = "z" * (len(ALICE) if has_same_size else 3)
    replace_file(key_file, other)
    os.utime(key_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock.now_s += 1
    assert file.has(hash_of(other))
    assert not file.has(hash_of(ALICE))


def test_a_link_that_is_turned_is_followed(tmp_path: Path) -> None:
    """Mounted secrets are links, replaced as a whole."""
    clock = Clock()
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    replace_file(old, ALICE)
    replace_file(new, BOB)
    link.symlink_to(old)
    file = KeyFile(str(link), clock)
    (tmp_path / "turned").symlink_to(new)
    (tmp_path / "turned").replace(link)
    clock.now_s += 1
    assert file.has(hash_of(BOB))
    assert not file.has(hash_of(ALICE))


def test_a_file_gone_bad_keeps_its_keys_and_is_logged_once(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = KeyFile(str(key_file), clock)

    def messages_after(seconds: int) -> list[str]:
        caplog.clear()
        for _ in range(seconds):
            clock.now_s += 1
            assert file.has(hash_of(ALICE))
        return [record.getMessage() for record in caplog.records]

    replace_file(key_file, BOB, "not a key")
    (message,) = messages_after(5)
    assert f"{key_file}: line 2: " in message
    assert "not a key" not in message
    replace_file(key_file, "# emptied")
    assert "has no key" in "".join(messages_after(3))
    key_file.unlink()
    assert "cannot be read: No such file" in "".join(messages_after(3))
    replace_file(key_file, ALICE)
    assert messages_after(2) == []
    key_file.unlink()
    assert len(messages_after(2)) == 1
    replace_file(key_file, BOB)
    clock.now_s += 1
    assert file.has(hash_of(BOB))
    assert not file.has(hash_of(ALICE))


def test_a_file_that_becomes_readable_again_is_read(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions change neither time nor size nor inode."""
    clock = Clock()
    file = KeyFile(str(key_file), clock)
    replace_file(key_file, BOB)

    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    clock.now_s += 1
    assert file.has(hash_of(ALICE))
    monkeypatch.undo()
    clock.now_s += 1
    assert not file.has(hash_of(ALICE))


def test_only_hashes_are_held(key_file: Path) -> None:
    file = KeyFile(str(key_file))
    assert file._hashes == {hash_of(ALICE), hash_of(BOB)}
    assert ALICE not in repr(vars(file))
    assert "hash" not in repr(file)
