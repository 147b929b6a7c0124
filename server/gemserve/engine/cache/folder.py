"""The folder of the document cache: its salt, its lock, and which file begins like a prompt."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from gemserve.engine.cache.files import NAME, DamagedFile, FileInfo, checksum, open_plain, read_info
from gemserve.errors import ConfigError

log = logging.getLogger("gemserve.engine")
_PROBE_BYTES = 16 << 20
_GUESSED_BYTES_PER_S = 1e8  # until files are read


class CacheFolder:
    """The files in one folder, at most `limit` bytes, least recently used first out.

    Only the engine's thread changes it. `key`: the folder's secret salt.
    """

    def __init__(self, path: Path, limit: int) -> None:
        """Raises `ConfigError` if the folder cannot be used, or another server uses it."""
        self.path, self._limit = path, limit
        self.num_bytes = 0
        self._files: dict[Path, FileInfo] = {}  # least recently used first
        self._by_link: dict[bytes, set[Path]] = {}  # the files that begin so
        self._by_last_link: dict[bytes, FileInfo] = {}
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.key = _salt_of(path / "salt")
            self._read_headers()
            self.bytes_per_s = _measure_reading(path / "probe.tmp")
        except BlockingIOError as error:
            raise ConfigError(f"cache_dir={path}: another server uses it") from error
        except OSError as error:
            raise ConfigError(f"cache_dir={path}: {error}") from error

    def __len__(self) -> int:
        return len(self._files)

    @property
    def is_own(self) -> bool:
        """Is the folder still at its path? Another server may use one that was made anew."""
        try:
            there = os.stat(self.path / "lock")
            return os.path.samestat(there, os.fstat(self._lock))
        except OSError:
            return False

    @property
    def files(self) -> list[FileInfo]:
        return list(self._files.values())

    @property
    def seconds_per_cost(self) -> float | None:
        """How fast the server computed when it wrote the newest file."""
        return self.files[-1].seconds_per_cost if self._files else None

    def has(self, info: FileInfo) -> bool:
        """Is it this file that there is under its path?"""
        return self._files.get(info.path) is info

    def find(self, chain: Sequence[bytes]) -> tuple[FileInfo | None, int]:
        """The file with the longest common beginning, and how many links of the chain it has."""
        for count in range(len(chain), 0, -1):
            for path in self._by_link.get(chain[count - 1], ()):
                return self._files[path], count
        return None, 0

    def beginnings(self, chain: Sequence[bytes]) -> list[FileInfo]:
        """The files whose chains this one begins with. A link says what all links before it are."""
        return [self._by_last_link[link] for link in chain if link in self._by_last_link]

    def make_room(self, num_bytes: int) -> bool:
        """Remove old files until `num_bytes` more are allowed. False: never."""
        if num_bytes > self._limit:
            return False
        while self.num_bytes + num_bytes > self._limit:
            self.remove(next(iter(self._files.values())))
        return True

    def add(self, info: FileInfo) -> None:
        """Take up a file that was written. Files that are its beginning are removed."""
        self._forget_file(info.path)
        for other in self.beginnings(info.chain):
            self.remove(other)
        self._files[info.path] = info
        self._by_last_link[info.chain[-1]] = info
        for link in info.chain:
            self._by_link.setdefault(link, set()).add(info.path)
        self.num_bytes += info.num_bytes

    def touch(self, info: FileInfo) -> None:
        """Note that a file was used."""
        if info.path in self._files:
            self._files[info.path] = self._files.pop(info.path)
            with suppress(OSError):
                os.utime(info.path)

    def remove(self, info: FileInfo) -> None:
        """Delete a file."""
        self._forget_file(info.path)
        try:
            info.path.unlink(missing_ok=True)
        except OSError as error:  # it may contain a document that its owner has deleted
            log.warning("document cache: %s cannot be deleted: %s", info.path, error)

    def forget(self, ids: Collection[str]) -> None:
        """Delete all files that contain these stored documents."""
        for info in self.files:
            if not info.ids.isdisjoint(ids):
                self.remove(info)

    def close(self) -> None:
        """Let another server use the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _forget_file(self, path: Path) -> None:
        info = self._files.pop(path, None)
        if info is None:
            return
        for link in info.chain:
            self._by_link[link].discard(path)
            if not self._by_link[link]:
                del self._by_link[link]
        if self._by_last_link.get(info.chain[-1]) is info:
            del self._by_last_link[info.chain[-1]]
        self.num_bytes -= info.num_bytes

    def _read_headers(self) -> None:
        """Take up the files that an earlier process has left. Its unfinished ones are removed.

        So are those with stored documents: these ended with their process, and nobody could delete
        or name them any more.
        """
        found = []
        for path in self.path.iterdir():
            if re.fullmatch(NAME + r"\.tmp|probe\.tmp", path.name):
                path.unlink()
            elif re.fullmatch(NAME + r"\.safetensors", path.name):
                try:
                    info = read_info(path, self.key)
                except DamagedFile as error:
                    log.warning("document cache: %s is removed: %s", path, error)
                    path.unlink()
                except OSError as error:
                    log.warning("document cache: %s cannot be read: %s", path, error)
                else:
                    if info.ids:
                        path.unlink()
                    else:
                        found.append((path.stat().st_mtime_ns, info))
        for _, info in sorted(found, key=lambda pair: pair[0]):
            self.add(info)
        self.make_room(0)


def _salt_of(path: Path) -> bytes:
    """The salt in a file that only its owner may read; it is made if there is none."""
    with suppress(FileNotFoundError):
        with open(path, "rb", opener=open_plain) as file:
            salt = file.read()
        if len(salt) == 32:
            return salt
        log.warning("document cache: %s is damaged, so that no file can be used", path)
    salt, temporary = secrets.token_bytes(32), path.with_suffix(".tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(salt)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return salt


def _measure_reading(path: Path) -> float:
    """Bytes per second that are read from the disk and verified.

    A guess if that cannot be measured, for example on a full disk, whose files can be read.
    """
    try:
        with open(path, "wb") as file:
            file.write(secrets.token_bytes(1 << 20) * (_PROBE_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # else it is read from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = time.perf_counter()
        with open(path, "rb") as file:
            checksum(memoryview(file.read()))
        return _PROBE_BYTES / (time.perf_counter() - started_s)
    except OSError as error:
        log.warning("document cache: %s: %s", path, error)
        return _GUESSED_BYTES_PER_S
    finally:
        with suppress(OSError):
            path.unlink()
