"""API keys: the files that list them, and who may do what. Only hashes are held in memory."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastapi import Request

from gemserve.config import ServerConfig
from gemserve.errors import ConfigError, InvalidKey, PermissionDenied

log = logging.getLogger("gemserve.api")
RECHECK_S = 1.0
MAX_FILE_BYTES = 1 << 20
_KEY_HEADERS = {b"authorization": "Authorization", b"x-api-key": "x-api-key"}
_KEY = re.compile(rb"[\x21-\x7e]{1,512}")
_HASHED = re.compile(rb"(?i:sha256:)([0-9a-fA-F]{64})")
_Version = tuple[int, int, int]


class KeyFile:
    """The keys of one file, which is read again within a second of a change.

    If the file can no longer be read, or has a bad line, the keys stay as they were. That is logged
    once, and the file is tried again every second.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `ConfigError`, naming file and line but never a key."""
        self._path = path
        self._clock = clock
        self._checked_s = clock()
        self._complaint: str | None = None
        self._hashes, self._version = _read(path)

    def has(self, key_hash: bytes) -> bool:
        """Takes the same time wherever in the file the key is."""
        self._reload_if_changed()
        matches = [hmac.compare_digest(known, key_hash) for known in self._hashes]
        return any(matches)

    def _reload_if_changed(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < RECHECK_S:
            return
        self._checked_s = now_s
        try:
            if _find_version(self._path) != self._version:
                self._hashes, self._version = _read(self._path)
            self._complaint = None
        except ConfigError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("%s; the keys read before stay valid", self._complaint)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. `key` is the hash of its API key."""

    key: bytes
    is_admin: bool


class Keys:
    """The keys of users and of administrators. An administrator may do what a user may."""

    def __init__(self, users: KeyFile, admins: KeyFile | None = None) -> None:
        self._users, self._admins = users, admins

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Raises `InvalidKey` unless the request has one valid key."""
        key_hash = hashlib.sha256(_key_of(headers)).digest()
        is_user = self._users.has(key_hash)
        is_admin = self._admins is not None and self._admins.has(key_hash)
        if not (is_user or is_admin):
            raise InvalidKey("The API key is incorrect.")
        return Caller(key_hash, is_admin)


def _key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key that a request sends: in `Authorization` or, without one, in Anthropic's `x-api-key`.

    Raises `InvalidKey`.
    """
    given = [(name, value.strip()) for name, value in headers if name in _KEY_HEADERS]
    if not given:
        raise InvalidKey("No API key was given; send the header Authorization: Bearer KEY.")
    header = min(name for name, _ in given)  # Authorization comes first
    values = [value for name, value in given if name == header]
    if len(values) > 1:
        raise InvalidKey(f"Several {_KEY_HEADERS[header]} headers were sent; send one.")
    key = values[0]
    if header == b"authorization":
        scheme, _, key = key.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
    if not _KEY.fullmatch(key):
        raise InvalidKey("The header must be Authorization: Bearer KEY, or x-api-key: KEY.")
    return key


def open_keys(config: ServerConfig) -> Keys | None:
    """The keys that `config` names, or None for a server that needs none.

    Raises `ConfigError` for a file that is missing, unreadable or empty, or has a bad line.
    """
    if config.api_key_file is None:
        return None
    admins = None if config.admin_key_file is None else KeyFile(config.admin_key_file)
    return Keys(KeyFile(config.api_key_file), admins)


def tenant_of(http: Request) -> bytes:
    """Whose a request is, as the server knows it; empty where there are no keys."""
    caller = http.scope["state"].get("caller")
    return b"" if caller is None else caller.key


def check_admin(http: Request, config: ServerConfig) -> None:
    """Raise `PermissionDenied` unless the request may change what the server serves.

    On a server without keys everybody may, except for pages in a browser: any web page could reach
    a server on the machine of its reader.
    """
    if config.api_key_file is None:
        if "origin" in http.headers:
            raise PermissionDenied("Pages in a browser may do this only where there are keys.")
        return
    if config.admin_key_file is None:
        raise PermissionDenied(
            "This needs an administrator's key, and the server has none: start it with "
            "--admin-key-file."
        )
    if not http.scope["state"]["caller"].is_admin:
        raise PermissionDenied("This needs a key of the server's --admin-key-file.")


def _find_version(path: str) -> _Version | None:
    try:
        return _version_of(os.stat(path))
    except OSError:
        return None


def _version_of(status: os.stat_result) -> _Version:
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: str) -> tuple[frozenset[bytes], _Version]:
    """The hashes of a file's keys, and the version of the file that they were read from."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would block
            raise ConfigError(f"{path}: must be a file")
        with open(path, "rb") as file:
            version = _version_of(os.fstat(file.fileno()))
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        # somebody may have given a key where a file's name belongs
        may_be_key = bool(path) and os.sep not in path and isinstance(error, FileNotFoundError)
        place = (
            "a key file, whose name is not shown because it may be a key" if may_be_key else path
        )
        raise ConfigError(f"{place}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_FILE_BYTES} bytes, the limit of a key file")
    hashes: set[bytes] = set()
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.strip()
        if text and not text.startswith(b"#"):
            hashes.add(_hash_of(text, f"{path}: line {number}"))
    if not hashes:
        raise ConfigError(f"{path}: has no key, must have at least 1")
    return frozenset(hashes), version


def _hash_of(text: bytes, place: str) -> bytes:
    if text.lower().startswith(b"sha256:"):
        hashed = _HASHED.fullmatch(text)
        if hashed is None:
            raise ConfigError(f"{place}: sha256: must be followed by 64 hexadecimal digits")
        return bytes.fromhex(hashed[1].decode())
    if _KEY.fullmatch(text) is None:
        raise ConfigError(
            f"{place}: a key must be 1 to 512 printable ASCII characters without spaces"
        )
    return hashlib.sha256(text).digest()
